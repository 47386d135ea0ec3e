// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/data_loader.h"

#include <fmt/format.h>

#include <numeric>
#include <random>
#include <span>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/models/causal_lm.h"
#include "spillway/train/device_scope.h"

namespace spillway {
namespace {

// A permutation that is the same with every standard library: std::shuffle and its distributions are not.
std::vector<std::int64_t> shuffled(std::int64_t count, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::mt19937_64 random(seed ^ (0x9E3779B97F4A7C15ULL * (static_cast<std::uint64_t>(epoch) + 1)));
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  return order;
}

}  // namespace

DataLoader::DataLoader(const TokenFile& file, std::int64_t vocabulary, DataLoaderOptions options)
    : file_(file), vocabulary_(vocabulary), options_(options) {
  require(options_.batch_size >= 1,
          fmt::format("a batch of {} rows was asked for; expected at least 1", options_.batch_size));
}

std::int64_t DataLoader::row_at(std::int64_t position) {
  const std::int64_t rows = file_.rows();
  if (!options_.shuffle) return position % rows;
  if (epoch_ != position / rows) {
    epoch_ = position / rows;
    order_ = shuffled(rows, options_.seed, epoch_);
  }
  return order_[static_cast<std::size_t>(position % rows)];
}

Batch DataLoader::next() {
  const HostScope host;
  const std::int64_t length = file_.length();
  Batch batch;
  batch.inputs = torch::empty({options_.batch_size, length}, torch::kLong);
  batch.targets = torch::empty({options_.batch_size, length}, torch::kLong);
  if (file_.has_documents()) batch.documents = torch::empty({options_.batch_size, length}, torch::kLong);
  for (std::int64_t i = 0; i < options_.batch_size; ++i) {
    const auto row_of = [&](const torch::Tensor& tensor) {
      return std::span(tensor.mutable_data_ptr<std::int64_t>() + i * length, static_cast<std::size_t>(length));
    };
    const std::int64_t row = row_at(position_ + i);
    file_.read(row, vocabulary_, row_of(batch.inputs), row_of(batch.targets));
    if (batch.documents.defined()) file_.read_documents(row, row_of(batch.documents));
  }
  batch.valid_targets = (batch.targets != -100).sum().item<std::int64_t>();
  position_ += options_.batch_size;  // not before all could be read
  return batch;
}

void DataLoader::seek(std::int64_t position) {
  require(position >= 0, fmt::format("a data position of {} was asked for; expected zero or more", position));
  position_ = position;
}

Batch rows_of_rank(const Batch& batch, int rank, int ranks) {
  require(ranks >= 1 && rank >= 0 && rank < ranks, fmt::format("rank {} of {} was asked for", rank, ranks));
  const std::int64_t rows = batch.inputs.size(0);
  const std::int64_t begin = rows * rank / ranks, end = rows * (rank + 1) / ranks;
  const HostScope host;
  const auto part = [&](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.slice(0, begin, end).contiguous() : tensor;
  };
  Batch out{part(batch.inputs), part(batch.targets), part(batch.documents), 0};
  out.valid_targets = count_targets(out.targets);
  return out;
}

}  // namespace spillway
