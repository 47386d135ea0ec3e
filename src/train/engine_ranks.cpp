// SPDX-License-Identifier: Apache-2.0
//
// What an engine's ranks agree on.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "formats/checksum.h"
#include "spillway/core/config_file.h"
#include "spillway/core/error.h"
#include "train/engine_impl.h"
#include "train/recompute.h"

namespace spillway {

namespace {

std::uint64_t hash_of(const std::vector<std::int64_t>& numbers) {
  if (numbers.empty()) return 0;
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(numbers)));
  return std::max<std::uint64_t>(1, checksum.value());
}

// One order that contradicts none of `orders`, where there is one: a number comes once all that stand directly before
// it in any of them have come; of several, the one that stands first in the first order. Where orders contradict each
// other, the rest follows as it stands.
std::vector<std::int64_t> merge_orders(const std::vector<std::vector<std::int64_t>>& orders, std::size_t numbers) {
  std::vector<std::vector<std::int64_t>> followers(numbers);
  std::vector<std::int64_t> before(numbers, 0), preferred;
  std::vector<std::size_t> place(numbers, 0);  // in `preferred`
  std::vector<bool> seen(numbers, false), done(numbers, false);
  for (const std::vector<std::int64_t>& order : orders) {
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto number = static_cast<std::size_t>(order[i]);
      if (!seen[number]) {
        seen[number] = true;
        place[number] = preferred.size();
        preferred.push_back(order[i]);
      }
      if (i == 0) continue;
      followers[static_cast<std::size_t>(order[i - 1])].push_back(order[i]);
      ++before[number];
    }
  }
  std::set<std::size_t> ready;  // places
  for (const std::int64_t number : preferred) {
    if (before[static_cast<std::size_t>(number)] == 0) ready.insert(place[static_cast<std::size_t>(number)]);
  }
  std::vector<std::int64_t> out;
  while (!ready.empty()) {
    const auto number = static_cast<std::size_t>(preferred[*ready.begin()]);
    ready.erase(ready.begin());
    done[number] = true;
    out.push_back(static_cast<std::int64_t>(number));
    for (const std::int64_t follower : followers[number]) {
      if (--before[static_cast<std::size_t>(follower)] == 0) ready.insert(place[static_cast<std::size_t>(follower)]);
    }
  }
  for (const std::int64_t number : preferred) {
    if (!done[static_cast<std::size_t>(number)]) out.push_back(number);
  }
  return out;
}

}  // namespace

std::vector<std::int64_t> Engine::Impl::order_of_gradients(const torch::Tensor& loss) const {
  std::unordered_map<const void*, std::int64_t> index_of;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    if (plan.trainable[i].tensor.numel() > 0)
      index_of.emplace(plan.trainable[i].tensor.unsafeGetTensorImpl(), static_cast<std::int64_t>(i));
  }
  std::vector<std::int64_t> order;
  for (const torch::Tensor& leaf : gradient_order({loss})) {
    const auto found = index_of.find(leaf.unsafeGetTensorImpl());
    if (found != index_of.end()) order.push_back(found->second);
  }
  return order;
}

// What only an earlier micro-batch used has no place in this backward's order: it stands behind, as a number below -1.
std::vector<std::int64_t> Engine::Impl::with_earlier(std::vector<std::int64_t> order) const {
  const std::size_t now = order.size();
  std::vector<std::int64_t> all = runtime->with_earlier_gradients(std::move(order));
  for (std::size_t i = now; i < all.size(); ++i) all[i] = -2 - all[i];
  return all;
}

Engine::Impl::MicroBatch Engine::Impl::agree_micro_batch(double weight, bool last,
                                                         const std::vector<std::int64_t>& own) {
  struct Mine {
    double weight;
    std::uint64_t order, last;
  };
  const auto every =
      ranks->gather_all({"micro-batch", micro_batches}, Mine{weight, hash_of(own), last ? std::uint64_t{1} : 0});
  MicroBatch all{0, 0, true};
  bool same_order = order_hashes.size() == every.size();
  for (std::size_t rank = 0; rank < every.size(); ++rank) {
    const Mine& theirs = every[rank];
    all.weight += theirs.weight;
    if (all.first_weight == 0) all.first_weight = theirs.weight;
    all.last = all.last && theirs.last != 0;
    same_order = same_order && (theirs.order == 0 || theirs.order == order_hashes[rank]);
  }
  if (same_order || all.weight == 0) return all;
  if (config.reduce_last_only && !all.last) return all;  // no rank's gradients leave it
  agree_order(own);
  order_hashes.clear();
  for (const Mine& rank : every) order_hashes.push_back(rank.order);
  return all;
}

void Engine::Impl::agree_order(const std::vector<std::int64_t>& own) {
  std::vector<std::int64_t> padded = own;
  padded.resize(plan.trainable.size(), -1);
  const std::vector<std::byte> all = ranks->gather_bytes({"order of gradients"}, std::as_bytes(std::span(padded)));
  std::vector<std::vector<std::int64_t>> orders;
  std::set<std::int64_t> earlier;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks->size()); ++rank) {
    std::vector<std::int64_t> theirs(padded.size());
    std::memcpy(theirs.data(), all.data() + rank * theirs.size() * sizeof(std::int64_t),
                theirs.size() * sizeof(std::int64_t));
    for (const std::int64_t number : theirs) {
      if (number < -1) earlier.insert(-2 - number);
    }
    theirs.erase(std::find_if(theirs.begin(), theirs.end(), [](std::int64_t number) { return number < 0; }),
                 theirs.end());
    orders.push_back(std::move(theirs));
  }
  std::vector<std::int64_t> order = merge_orders(orders, padded.size());
  for (const std::int64_t number : earlier) {
    if (std::find(order.begin(), order.end(), number) == order.end()) order.push_back(number);
  }
  runtime->set_gradient_order(std::move(order));
}

void Engine::Impl::fail_ranks(const char* why) {
  if (failure.empty()) failure = why;
  ranks->fail(why);
}

std::vector<std::string> Engine::Impl::gather_text(const char* what, const std::string& mine) const {
  std::size_t most = 0;
  std::vector<std::int64_t> sizes = ranks->gather_all({what}, static_cast<std::int64_t>(mine.size()));
  for (const std::int64_t size : sizes) most = std::max(most, static_cast<std::size_t>(size));
  std::string padded = mine;
  padded.resize(most);
  const std::vector<std::byte> all = ranks->gather_bytes({what}, std::as_bytes(std::span(padded)));
  std::vector<std::string> out;
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    const char* const from = reinterpret_cast<const char*>(all.data()) + rank * most;
    out.emplace_back(from, static_cast<std::size_t>(sizes[rank]));
  }
  return out;
}

void Engine::Impl::note_checksum(const ModelParameter& parameter, const torch::Tensor& exact) {
  if (ranks == nullptr) return;
  const torch::Tensor values = (exact.defined() ? exact : parameter.tensor.detach()).to(torch::kCPU).contiguous();
  Checksum checksum;
  checksum.add({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
  weight_checksums.push_back(checksum.value());
}

void Engine::Impl::check_same_weights(const std::vector<std::uint64_t>& checksums) const {
  if (checksums.empty()) return;
  const std::vector<std::byte> all = ranks->gather_bytes({"first weights"}, std::as_bytes(std::span(checksums)));
  for (std::size_t i = 0; i < checksums.size(); ++i) {
    std::uint64_t first = 0;
    std::memcpy(&first, all.data() + i * sizeof first, sizeof first);
    for (std::size_t rank = 1; rank < static_cast<std::size_t>(ranks->size()); ++rank) {
      std::uint64_t theirs = 0;
      std::memcpy(&theirs, all.data() + (rank * checksums.size() + i) * sizeof theirs, sizeof theirs);
      if (theirs == first) continue;
      const std::size_t trained = plan.trainable.size();
      const ModelParameter& parameter = i < trained ? plan.trainable[i] : plan.frozen[i - trained];
      throw StateError(
          fmt::format("parameter {} has other values on rank {} than on rank 0: load the same folder, or seed the "
                      "initial values alike, on every rank",
                      parameter.name, rank));
    }
  }
}

int Engine::rank() const {
  return impl_->ranks == nullptr ? 0 : impl_->ranks->rank();
}

int Engine::rank_count() const {
  return impl_->ranks == nullptr ? 1 : impl_->ranks->size();
}

void Engine::Impl::check_same_configuration() const {
  Config shared = config;
  shared.device = {};  // each has its own
  shared.threads = 0;
  std::string text = to_json(shared, {});
  for (const Hyperparameters& h : base_hyperparameters)
    text += fmt::format("{} {} {} {} {};", h.lr, h.beta1, h.beta2, h.eps, h.weight_decay);
  for (const ModelParameter& parameter : plan.trainable)
    text += fmt::format("{} {} {};", parameter.name, parameter.tensor.numel(), parameter.group);
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(text)));
  const auto all = ranks->gather_all({"configuration"}, checksum.value());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw StateError(fmt::format(
        "rank {} has another configuration, other parameter groups or another model than rank 0: give every "
        "rank the same",
        rank));
  }
}

double Engine::mean_over_ranks(double value, double weight) {
  if (impl_->ranks == nullptr) return weight == 0 ? 0 : value;
  struct Mine {
    double value, weight;
  };
  double sum = 0, weights = 0;
  for (const Mine& rank : impl_->ranks->gather_all({"mean over ranks"}, Mine{value, weight})) {
    if (rank.weight == 0) continue;  // its value may be anything
    sum += rank.value * rank.weight;
    weights += rank.weight;
  }
  return weights == 0 ? 0 : sum / weights;
}

bool Engine::all_ranks(bool mine) {
  return impl_->ranks == nullptr ? mine : !impl_->ranks->any({"agreement of ranks"}, !mine);
}

}  // namespace spillway
