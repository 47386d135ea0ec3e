// SPDX-License-Identifier: Apache-2.0
#include "spillway/formats/token_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <utility>

#include "core/strict_json.h"
#include "formats/file_kind.h"
#include "formats/mapped_file.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using ElementReader = std::int64_t (*)(const std::byte*);

constexpr std::int64_t kNoTarget = -100;
constexpr std::int64_t kPadding = -1;  // of documents
static_assert(std::endian::native == std::endian::little, "token numbers are read as little-endian");

// Files do not promise alignment.
template <typename T>
std::int64_t element(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Rows of numbers that may share elements: row i starts at element i * stride.
struct Table {
  std::span<const std::byte> bytes;
  std::int64_t element_size = 0;
  ElementReader read = nullptr;
  std::int64_t rows = 0;
  std::int64_t length = 0;  // a row has length + 1 elements
  std::int64_t stride = 0;

  std::int64_t at(std::int64_t row, std::int64_t position) const {
    return read(bytes.data() + (row * stride + position) * element_size);
  }
};

Table flat_table(const fs::path& file, std::span<const std::byte> bytes, std::int64_t length) {
  const bool wide = file.filename().string().ends_with(".u32.bin");
  require(length >= 1, fmt::format("{}: rows of {} tokens: the length must be at least 1", file.string(), length));
  const std::string_view other = foreign_format_of_tokens(bytes);
  if (!other.empty()) throw FileError(fmt::format("{}: expected token numbers, found {}", file.string(), other));
  Table table{bytes, wide ? 4 : 2, wide ? element<std::uint32_t> : element<std::uint16_t>, 0, length, length};
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size % table.element_size != 0) {
    throw FileError(fmt::format("{}: {} bytes are no whole number of {}-byte tokens: truncated, or another format",
                                file.string(), size, table.element_size));
  }
  const std::int64_t tokens = size / table.element_size;
  table.rows = (tokens - 1) / length;  // a row and the token after it
  if (tokens == 0 || table.rows == 0) {
    throw FileError(fmt::format("{}: {} tokens are fewer than one row, which takes {} and one to predict",
                                file.string(), tokens, length));
  }
  return table;
}

Table matrix(const fs::path& file, const TensorView& view, std::int64_t length) {
  if (view.dtype != DType::i32 || view.shape.size() != 2 || view.shape[0] < 1 || view.shape[1] < 2) {
    throw FileError(fmt::format("{}: \"{}\" is {} [{}]; expected int32 [rows, length+1]", file.string(), view.name,
                                to_string(view.dtype), fmt::join(view.shape, ", ")));
  }
  const std::int64_t columns = view.shape[1];
  if (length != 0 && length != columns - 1) {
    throw FileError(fmt::format("{}: its rows have {} tokens and one to predict; {} were asked for", file.string(),
                                columns - 1, length));
  }
  return {view.bytes, 4, element<std::int32_t>, view.shape[0], columns - 1, columns};
}

}  // namespace

struct TokenFile::Impl {
  fs::path path;
  std::optional<MappedFile> flat;
  std::optional<SafetensorsReader> tensors;
  Table tokens;
  std::optional<Table> labels, documents;

  void open_tensors(std::int64_t length);
  void check_names() const;
  bool has_target() const;
  std::optional<Table> beside_tokens(const char* name) const;
  void check_row(std::int64_t index, std::initializer_list<std::size_t> sizes) const;
  std::int64_t document(std::int64_t row, std::int64_t position) const;
  [[noreturn]] void fail(const char* what, std::int64_t row, std::int64_t position, std::int64_t value,
                         std::int64_t vocabulary) const;
};

void TokenFile::Impl::open_tensors(std::int64_t length) {
  require(length >= 0, fmt::format("{}: rows of {} tokens: 0 (what the file has) or more", path.string(), length));
  tensors.emplace(path);
  if (!tensors->contains("tokens")) {
    throw FileError(
        fmt::format("{}: expected a tensor \"tokens\"; it holds {} others", path.string(), tensors->names().size()));
  }
  check_names();
  tokens = matrix(path, tensors->tensor("tokens"), length);
  labels = beside_tokens("labels");
  documents = beside_tokens("documents");
  if (has_target()) return;
  throw FileError(fmt::format("{}: none of its {} rows has a target: each label is -100, or each document one token",
                              path.string(), tokens.rows));
}

// A mask under another name would go unseen, and all tokens would be trained on.
void TokenFile::Impl::check_names() const {
  for (const std::string& name : tensors->names()) {
    if (name == "tokens" || name == "labels" || name == "documents") continue;
    throw FileError(fmt::format("{}: it holds a tensor {}; a token file has \"tokens\", and beside them \"labels\" {}",
                                path.string(), in_quotes(name),
                                "(-100 where a token is no target) and \"documents\" alone"));
  }
}

// Ends at the first target: nearly always in the first rows.
bool TokenFile::Impl::has_target() const {
  if (!labels && !documents) return true;
  for (std::int64_t row = 0; row < tokens.rows; ++row) {
    for (std::int64_t i = 0; i < tokens.length; ++i) {
      if (labels && labels->at(row, i + 1) == kNoTarget) continue;
      if (!documents) return true;
      const std::int64_t own = documents->at(row, i);
      if (own != kPadding && documents->at(row, i + 1) == own) return true;
    }
  }
  return false;
}

std::optional<Table> TokenFile::Impl::beside_tokens(const char* name) const {
  if (!tensors->contains(name)) return std::nullopt;
  const Table table = matrix(path, tensors->tensor(name), tokens.length);
  if (table.rows != tokens.rows) {
    throw FileError(fmt::format("{}: \"{}\" has {} rows, \"tokens\" {}", path.string(), name, table.rows, tokens.rows));
  }
  return table;
}

void TokenFile::Impl::check_row(std::int64_t index, std::initializer_list<std::size_t> sizes) const {
  require(index >= 0 && index < tokens.rows,
          fmt::format("{}: row {} was asked for; it has {}", path.string(), index, tokens.rows));
  for (const std::size_t size : sizes) {
    require(size == static_cast<std::size_t>(tokens.length),
            fmt::format("{}: a row has {} tokens; a span has {}", path.string(), tokens.length, size));
  }
}

std::int64_t TokenFile::Impl::document(std::int64_t row, std::int64_t position) const {
  const std::int64_t number = documents->at(row, position);
  if (number >= kPadding) return number;
  throw FileError(fmt::format("{}: row {}, position {}: the document {}; expected 0 or more, or -1 for padding",
                              path.string(), row, position, number));
}

void TokenFile::Impl::fail(const char* what, std::int64_t row, std::int64_t position, std::int64_t value,
                           std::int64_t vocabulary) const {
  throw FileError(fmt::format("{}: row {}, position {}: the {} {} is outside the model's vocabulary of {}",
                              path.string(), row, position, what, value, vocabulary));
}

TokenFile::TokenFile(const fs::path& file, std::int64_t length) : impl_(std::make_unique<Impl>()) {
  impl_->path = file;
  const std::string name = file.filename().string();
  if (name.ends_with(".safetensors")) {
    impl_->open_tensors(length);
  } else if (name.ends_with(".bin")) {
    impl_->flat.emplace(file);
    impl_->tokens = flat_table(file, impl_->flat->bytes(), length);
  } else {
    throw FileError(fmt::format("{}: expected a token file: *.bin (uint16), *.u32.bin or *.safetensors; {}",
                                file.string(), "scripts/prepare_data.py makes one from text"));
  }
}

TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;
TokenFile& TokenFile::operator=(TokenFile&&) noexcept = default;

std::int64_t TokenFile::rows() const {
  return impl_->tokens.rows;
}
std::int64_t TokenFile::length() const {
  return impl_->tokens.length;
}

void TokenFile::read(std::int64_t index, std::int64_t vocabulary, std::span<std::int64_t> inputs,
                     std::span<std::int64_t> targets) const {
  const Table& tokens = impl_->tokens;
  impl_->check_row(index, {inputs.size(), targets.size()});
  const auto length = static_cast<std::size_t>(tokens.length);
  const auto checked = [&](const Table& table, const char* what, std::int64_t position) {
    const std::int64_t value = table.at(index, position);
    const bool masked = &table != &tokens && value == kNoTarget;
    if (!masked && (value < 0 || value >= vocabulary)) impl_->fail(what, index, position, value, vocabulary);
    return value;
  };
  for (std::size_t i = 0; i < length; ++i) inputs[i] = checked(tokens, "token", static_cast<std::int64_t>(i));
  const Table& wanted = impl_->labels ? *impl_->labels : tokens;
  const char* what = impl_->labels ? "label" : "token";
  for (std::size_t i = 0; i < length; ++i) targets[i] = checked(wanted, what, static_cast<std::int64_t>(i) + 1);
  if (!impl_->documents) return;
  for (std::int64_t i = 0; i < tokens.length; ++i) {
    const std::int64_t own = impl_->document(index, i);
    if (own == kPadding || impl_->document(index, i + 1) != own) targets[static_cast<std::size_t>(i)] = kNoTarget;
  }
}

bool TokenFile::has_documents() const {
  return impl_->documents.has_value();
}

void TokenFile::read_documents(std::int64_t index, std::span<std::int64_t> documents) const {
  require(has_documents(), fmt::format("{}: it has no tensor \"documents\"", impl_->path.string()));
  impl_->check_row(index, {documents.size()});
  for (std::size_t i = 0; i < documents.size(); ++i) {
    documents[i] = impl_->document(index, static_cast<std::int64_t>(i));
  }
}

}  // namespace spillway
