// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"

namespace spillway::fuzz {

inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// What is printed about a file must not pass its control characters on to a terminal.
inline void check_printable(std::string_view text) {
  for (const char c : text) {
    check(static_cast<unsigned char>(c) >= 0x20 || c == '\n', "what is printed holds no control characters");
  }
}

/// A refusal: says something, in a few lines, that may be printed. False, for the target to return.
inline bool refused(const std::exception& error) {
  constexpr std::size_t kLongest = 8000;
  const std::string_view text = error.what();
  check(!text.empty() && text.size() < kLongest, "a refusal has a text that can be read");
  check_printable(text);
  return false;
}

/// Takes two bytes off the front, a number, and as many bytes off the end.
inline std::span<const std::byte> take_last(std::span<const std::byte>& input) {
  if (input.size() < 2) return {};
  const std::size_t wanted = std::to_integer<std::size_t>(input[0]) + 256 * std::to_integer<std::size_t>(input[1]);
  input = input.subspan(2);
  const std::size_t taken = std::min(wanted, input.size());
  const auto last = input.last(taken);
  input = input.first(input.size() - taken);
  return last;
}

/// A safetensors file of a header's text and, after it, data whose length the first two bytes give.
inline std::vector<std::byte> safetensors_file(std::span<const std::byte> input) {
  const auto data = take_last(input);
  std::vector<std::byte> file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<std::byte>(input.size() >> (8 * i)));
  file.insert(file.end(), input.begin(), input.end());
  file.insert(file.end(), data.begin(), data.end());
  return file;
}

/// Reads every byte of every tensor.
inline void read_all(const SafetensorsReader& reader) {
  static volatile unsigned sink = 0;  // keeps the compiler from leaving out the reads
  for (const std::string& name : reader.names()) {
    try {
      const TensorView view = reader.tensor(name);
      check(view.numel() * size_of(view.dtype) == static_cast<std::int64_t>(view.bytes.size()),
            "a view holds its shape");
      unsigned sum = 0;
      for (const std::byte byte : view.bytes) sum += std::to_integer<unsigned>(byte);
      sink = sink + sum;
    } catch (const FileError& error) {
      refused(error);  // a type that is not computed with
    }
  }
}

}  // namespace spillway::fuzz
