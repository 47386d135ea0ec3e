// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace spillway {

/// A data set of token rows for causal language modelling, memory-mapped.
///
/// Two formats:
/// - `*.bin`: flat little-endian token numbers (uint16, or uint32 where the name ends in `.u32.bin`), cut into
///   consecutive windows: row i is tokens [i*length, i*length + length + 1), so neighbours share one token; a last
///   window that is short is left out.
/// - `*.safetensors`: `tokens` [rows, length+1] int32 and optionally, of the same shape and type, `labels`, -100 where
/// a
///   token is not a target, and `documents`, each position's document, -1 where it is padding. Nothing else.
///
/// In both the target of position t is element t+1; where that is padding or of another document, t has no target.
/// Threads: safe to read from several.
class TokenFile {
 public:
  /// `length`: tokens the model sees a row; for safetensors 0 takes what the file has, another value must equal it.
  /// Throws: FileError naming the file and what was expected (missing, empty, shorter than one row, odd size, wrong
  /// type or shape, an unknown tensor, no target at all, another format); InvalidArgument for a length of a `.bin`
  /// below 1.
  TokenFile(const std::filesystem::path& file, std::int64_t length);
  ~TokenFile();
  TokenFile(TokenFile&&) noexcept;
  TokenFile& operator=(TokenFile&&) noexcept;

  std::int64_t rows() const;
  std::int64_t length() const;
  /// Whether rows hold several documents, or padding.
  bool has_documents() const;

  /// Copies row `index`: `inputs` and `targets` of length() elements each; a target is -100 where it does not count.
  /// Throws: InvalidArgument when out of range; FileError naming row and position when a token that is used is not in
  /// [0, vocabulary) or a label is neither -100 nor in that range.
  void read(std::int64_t index, std::int64_t vocabulary, std::span<std::int64_t> inputs,
            std::span<std::int64_t> targets) const;

  /// Copies the documents of the length() inputs of row `index`: what CausalLM::forward takes. Throws: InvalidArgument
  /// when out of range or without documents; FileError for a number below -1.
  void read_documents(std::int64_t index, std::span<std::int64_t> documents) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway
