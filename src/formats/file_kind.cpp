// SPDX-License-Identifier: Apache-2.0
#include "formats/file_kind.h"

#include <algorithm>
#include <array>

namespace spillway {
namespace {

using namespace std::string_view_literals;

struct Mark {
  std::string_view bytes;
  std::string_view words;
};

constexpr std::string_view kPickle =
    "a Python pickle, which Spillway does not read since loading one runs code; save it as safetensors";

constexpr std::array kMarks{
    Mark{"PK\x03\x04"sv, "a zip archive (a PyTorch checkpoint or .npz); save it as safetensors"},
    Mark{"GGUF"sv, "a GGUF file; Spillway reads the original safetensors weights"},
    Mark{"\x89HDF\r\n\x1a\n"sv, "an HDF5 file; save it as safetensors"},
    Mark{"version https://git-lfs"sv, "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"},
    Mark{"\x93NUMPY"sv, "a NumPy .npy file; save it as safetensors, or as plain numbers for tokens"},
    Mark{"<!DOCTYPE"sv, "an HTML page, probably a failed download"},
    Mark{"<html"sv, "an HTML page, probably a failed download"},
};
// Too short to tell from the numbers of a token file.
constexpr std::array kShortMarks{
    Mark{"\x80\x02"sv, kPickle},
    Mark{"\x80\x03"sv, kPickle},
    Mark{"\x80\x04"sv, kPickle},
    Mark{"\x80\x05"sv, kPickle},
    Mark{"\x1f\x8b"sv, "a gzip archive; unpack it first"},
};

template <typename Marks>
std::string_view find(const Marks& marks, std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto at = std::find_if(marks.begin(), marks.end(), [&](const Mark& m) { return text.starts_with(m.bytes); });
  return at == marks.end() ? std::string_view() : at->words;
}

}  // namespace

std::string_view foreign_format_of_tokens(std::span<const std::byte> bytes) {
  return find(kMarks, bytes);
}

std::string_view foreign_format(std::span<const std::byte> bytes) {
  const std::string_view found = find(kMarks, bytes);
  return found.empty() ? find(kShortMarks, bytes) : found;
}

}  // namespace spillway
