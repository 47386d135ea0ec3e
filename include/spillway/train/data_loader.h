// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "spillway/formats/token_file.h"

namespace spillway {

/// One micro-batch. Shapes: [batch, length] int64 each; targets are -100 where they do not count.
struct Batch {
  torch::Tensor inputs, targets;
  torch::Tensor documents;  // undefined where the file has none; CausalLM::forward takes either
  std::int64_t valid_targets = 0;
};

struct DataLoaderOptions {
  std::int64_t batch_size = 8;
  bool shuffle = true;  // a new order each epoch, from the seed and the epoch's number alone
  std::uint64_t seed = 0;
};

/// Rows of a token file as micro-batches, epoch after epoch: every batch is full, the last one of an epoch is filled
/// from the next, so that a row is given out once an epoch and none is left out. Order: row i of the sequence depends
/// on the file, the seed and i alone, whatever the batch size. Tensors are made in ordinary host memory. Owns: nothing;
/// the file must outlive it. Threads: one at a time.
class DataLoader {
 public:
  /// `vocabulary`: tokens must be below it. Throws: InvalidArgument for a batch size below 1.
  DataLoader(const TokenFile& file, std::int64_t vocabulary, DataLoaderOptions options);

  /// Throws: FileError naming the row for tokens out of range.
  Batch next();

  /// Rows of the file: an epoch.
  std::int64_t rows() const { return file_.rows(); }
  /// Rows given out so far: the position in the endless sequence of epochs.
  std::int64_t position() const { return position_; }
  /// Goes to a position, for example one saved before. Throws: InvalidArgument when negative.
  void seek(std::int64_t position);

 private:
  std::int64_t row_at(std::int64_t position);

  const TokenFile& file_;
  const std::int64_t vocabulary_;
  const DataLoaderOptions options_;
  std::int64_t position_ = 0;
  std::int64_t epoch_ = -1;  // the one `order_` is of
  std::vector<std::int64_t> order_;
};

/// The rows of a micro-batch that one of several ranks computes: dealt out in order, as evenly as they go. So what is
/// trained on depends on the size of the whole micro-batch, not on the number of ranks; a rank beyond the rows has
/// none, and no valid targets.
Batch rows_of_rank(const Batch& batch, int rank, int ranks);

}  // namespace spillway
