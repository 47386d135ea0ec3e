// SPDX-License-Identifier: Apache-2.0
#include "formats/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "core/strict_json.h"
#include "formats/file_kind.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr std::size_t kLengthBytes = 8;  // the header's length, little-endian

std::uint64_t read_length(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) length = (length << 8) | std::to_integer<std::uint64_t>(bytes[i]);
  return length;
}

// Returns the header's length once it is known to lie inside the file.
std::size_t checked_length(const std::filesystem::path& file, std::span<const std::byte> bytes, Bytes limit) {
  // A header's length may be any number, those that spell the beginning of another format too: where a header stands,
  // it is one.
  const bool header = bytes.size() > kLengthBytes && read_length(bytes) <= bytes.size() - kLengthBytes &&
                      read_length(bytes) <= static_cast<std::uint64_t>(limit.value) &&
                      bytes[kLengthBytes] == std::byte{'{'};
  const std::string_view other = header ? std::string_view() : foreign_format(bytes);
  if (!other.empty()) {
    throw FileError(fmt::format("{}: expected a safetensors file, found {}", file.string(), other));
  }
  if (bytes.size() < kLengthBytes) {
    throw FileError(fmt::format("{}: not a safetensors file: it has {} bytes, the header's length alone takes 8; {}",
                                file.string(), bytes.size(), "an incomplete download has to be fetched again"));
  }
  const std::uint64_t length = read_length(bytes);
  if (length > static_cast<std::uint64_t>(limit.value)) {
    throw FileError(fmt::format("{}: its first 8 bytes give a header of {} bytes, over the limit of {}; {}",
                                file.string(), length, limit.value,
                                "it is not a safetensors file, or has to be split into several"));
  }
  if (length > bytes.size() - kLengthBytes) {
    throw FileError(fmt::format("{}: truncated, or not a safetensors file: {} bytes are there, its header needs {}; {}",
                                file.string(), bytes.size(), length + kLengthBytes,
                                "an incomplete download has to be fetched again"));
  }
  return static_cast<std::size_t>(length);
}

void check_size(const std::filesystem::path& file, const TensorEntry& tensor) {
  if (tensor.end < tensor.begin) {
    throw FileError(fmt::format("{}: tensor {} ends at byte {}, before its start {}", file.string(),
                                in_quotes(tensor.name), tensor.end, tensor.begin));
  }
  const std::int64_t element = tensor.dtype ? size_of(*tensor.dtype) : 1;
  const auto numel = checked_numel(tensor.shape, element);
  if (!numel) {
    throw FileError(fmt::format("{}: tensor {} has shape [{}], whose size passes 63 bits", file.string(),
                                in_quotes(tensor.name), fmt::join(tensor.shape, ", ")));
  }
  const std::uint64_t there = tensor.end - tensor.begin;
  if (tensor.dtype && there != static_cast<std::uint64_t>(*numel * element)) {
    throw FileError(fmt::format("{}: tensor {} of type {} and shape [{}] needs {} bytes, its data_offsets give {}",
                                file.string(), in_quotes(tensor.name), tensor.dtype_word, fmt::join(tensor.shape, ", "),
                                *numel * element, there));
  }
}

// The tensors, in the order of their bytes, must fill the space after the header without overlap, gap or rest.
void check_layout(const std::filesystem::path& file, const SafetensorsHeader& header, std::size_t file_size) {
  std::uint64_t at = 0;
  for (const TensorEntry& tensor : header.tensors) {
    check_size(file, tensor);
    if (tensor.begin != at) {
      throw FileError(fmt::format("{}: tensor {} starts at byte {} of the data, {} the end {} of the one before it",
                                  file.string(), in_quotes(tensor.name), tensor.begin,
                                  tensor.begin < at ? "overlapping" : "leaving a gap after", at));
    }
    at = tensor.end;
  }
  const std::uint64_t there = file_size - header.data_start;
  if (at > there) {
    throw FileError(fmt::format("{}: truncated: its header describes {} bytes of tensors, {} are there{}",
                                file.string(), at, there, "; an incomplete download has to be fetched again"));
  }
  if (at < there) {
    throw FileError(fmt::format("{}: {} bytes of tensors are expected by its header, {} are there: {} trailing bytes",
                                file.string(), at, there, there - at));
  }
}

}  // namespace

std::optional<std::int64_t> checked_numel(std::span<const std::int64_t> shape, std::int64_t element_size) {
  std::int64_t product = element_size;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, extent, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product / element_size;
}

SafetensorsHeader read_header(const std::filesystem::path& file, std::span<const std::byte> bytes, Bytes header_limit) {
  const std::size_t length = checked_length(file, bytes, header_limit);
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  SafetensorsHeader header = read_header_json(file, {text, length});
  header.data_start = kLengthBytes + length;
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  check_layout(file, header, bytes.size());
  return header;
}

}  // namespace spillway
