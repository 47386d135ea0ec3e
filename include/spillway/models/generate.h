// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "spillway/models/causal_lm.h"

namespace spillway {

struct GenerateOptions {
  std::int64_t max_new_tokens = 64;
  double temperature = 0;  // what logits are divided by; 0: the likeliest token each time
  double top_p = 1;        // draws from the fewest likeliest tokens that together have this probability
  std::int64_t top_k = 0;  // draws from so many of the likeliest tokens; 0: from all
  std::uint64_t seed = 0;  // of a generator of its own: the same seed gives the same tokens
  std::optional<std::int64_t> stop_token{};  // ends the text, as its last token
};

/// Continues `prompt`, one token after the other, and returns both.
///
/// Keys and values are kept, so that a token costs the forward of one position. A prompt longer than
/// config().max_position is read from its last max_position tokens; where a text fills them, it goes on from its last
/// max_position / 2 tokens, computed anew. Runs without gradients in evaluation mode, which is restored. Throws:
/// InvalidArgument for an empty prompt, a token that is not in the vocabulary or an option out of its range; StateError
/// where tokens are drawn and logits are NaN.
std::vector<std::int64_t> generate(CausalLM& model, std::vector<std::int64_t> prompt, const GenerateOptions& options);

/// Reads rows of tokens one position after the other, keeping keys and values of what it has read: for programs that
/// choose tokens themselves.
///
/// Layers with a sliding window keep the window alone. Blocks run through the model's BlockCall; the cache is
/// allocated by LibTorch, at once, on the device of the parameters. Weights must not change between `start` and the
/// last `next`.
/// Owns: the cache; the model must outlive it. Threads: one at a time.
class Decoder {
 public:
  /// `capacity`: positions a row can have. Throws: InvalidArgument for less than one row, or a capacity that is not in
  /// [1, config().max_position].
  Decoder(CausalLM& model, std::int64_t rows, std::int64_t capacity);

  /// Forgets what was read and reads the beginning of the rows. Shapes: tokens [rows, length] int64 -> logits of the
  /// last position [rows, vocabulary]. Throws: InvalidArgument for another shape or type, or more than the capacity.
  torch::Tensor start(const torch::Tensor& tokens);

  /// Reads one more token of each row. After an exception inside the model `start` is needed again. Shapes: tokens
  /// [rows, 1] int64 -> [rows, vocabulary]. Throws: InvalidArgument as start; StateError before start, or where the
  /// capacity is used up.
  torch::Tensor next(const torch::Tensor& tokens);

  /// Goes on as if `length` positions had been read, on a model without memory: to know what the next one takes.
  /// Throws: InvalidArgument for another model, or a length that is not in [1, capacity()].
  void pretend(std::int64_t length);

  /// Positions read so far.
  std::int64_t length() const { return length_; }
  std::int64_t capacity() const { return capacity_; }

 private:
  struct Kept {
    torch::Tensor keys, values;  // [rows, kv_heads, positions that fit, head_dim]
  };

  void check(const torch::Tensor& tokens) const;
  void give_cache(std::int64_t layer, std::int64_t count, std::int64_t length, BlockInputs& inputs) const;
  torch::Tensor read(BlockInputs inputs, std::int64_t count);

  CausalLM& model_;
  std::int64_t rows_, capacity_;
  std::int64_t first_ = 0, length_ = 0;  // positions that start() read, and all
  std::vector<Kept> layers_;
};

}  // namespace spillway
