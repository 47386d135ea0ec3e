// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "core/strict_json.h"
#include "formats/safetensors_header.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

using Json = nlohmann::json;
constexpr std::size_t kMostDimensions = 64;

struct Word {
  DType type;
  std::string_view word;
};
constexpr std::array<Word, 13> kWords{{{DType::f32, "F32"},
                                       {DType::bf16, "BF16"},
                                       {DType::f16, "F16"},
                                       {DType::f64, "F64"},
                                       {DType::i64, "I64"},
                                       {DType::i32, "I32"},
                                       {DType::i16, "I16"},
                                       {DType::i8, "I8"},
                                       {DType::u64, "U64"},
                                       {DType::u32, "U32"},
                                       {DType::u16, "U16"},
                                       {DType::u8, "U8"},
                                       {DType::boolean, "BOOL"}}};

std::optional<DType> type_of_word(std::string_view word) {
  for (const Word& entry : kWords) {
    if (entry.word == word) return entry.type;
  }
  return std::nullopt;
}

// Takes the header's JSON event by event, so that a hostile header of the allowed size is refused at its first wrong
// value instead of growing into a tree many times its size.
class HeaderEvents final : public Json::json_sax_t {
 public:
  explicit HeaderEvents(SafetensorsHeader& out) : out_(out) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_integer(number_integer_t value) override { return unexpected(fmt::format("the number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected("the number " + text.substr(0, 40));
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& value) override;
  bool start_object(std::size_t) override;
  bool key(string_t& value) override;
  bool end_object() override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    throw JsonFault(fmt::format("is not valid JSON: {}", json_fault_text(error)));
  }

 private:
  enum class At { start, top, tensor, metadata, shape, offsets, done };
  static constexpr unsigned kDtype = 1, kShape = 2, kOffsets = 4;  // bits of fields_

  bool unexpected(const std::string& what) const {
    throw JsonFault(fmt::format("holds {} where {} belongs{}", what, expected(), place()));
  }
  std::string place() const {
    if (at_ == At::start || at_ == At::done || key_.empty()) return "";
    if (at_ == At::top) return fmt::format(" (key {})", in_quotes(key_));
    return fmt::format(" (tensor {}, key {})", in_quotes(at_ == At::metadata ? "__metadata__" : current_.name),
                       in_quotes(key_));
  }
  std::string_view expected() const {
    switch (at_) {
      case At::start:
      case At::top:
        return "an object";
      case At::metadata:
        return "a string";
      case At::tensor:
        return key_ == "dtype" ? "a string" : "a list";
      case At::shape:
        return "a size";
      case At::offsets:
        return "an offset";
      case At::done:
        break;
    }
    return "nothing";
  }
  void take_field(const std::string& name);
  void finish_tensor();

  SafetensorsHeader& out_;
  At at_ = At::start;
  std::string key_;
  TensorEntry current_;
  unsigned fields_ = 0;
  std::vector<std::uint64_t> offsets_;
  std::unordered_set<std::string> names_;
};

bool HeaderEvents::number_unsigned(number_unsigned_t value) {
  if (at_ == At::offsets) {
    if (offsets_.size() == 2) return unexpected("a third number");
    offsets_.push_back(value);
    return true;
  }
  if (at_ != At::shape) return unexpected(fmt::format("the number {}", value));
  if (current_.shape.size() == kMostDimensions) {
    throw JsonFault(fmt::format("gives tensor {} more than {} dimensions", in_quotes(current_.name), kMostDimensions));
  }
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return unexpected(fmt::format("the number {}", value));
  }
  current_.shape.push_back(static_cast<std::int64_t>(value));
  return true;
}

bool HeaderEvents::string(string_t& value) {
  if (at_ == At::metadata) {
    out_.metadata[key_] = value;
  } else if (at_ == At::tensor && key_ == "dtype") {
    current_.dtype_word = value;
    current_.dtype = type_of_word(value);
  } else {
    return unexpected("a string");
  }
  return true;
}

bool HeaderEvents::start_object(std::size_t) {
  if (at_ == At::start) {
    at_ = At::top;
  } else if (at_ == At::top) {
    at_ = key_ == "__metadata__" ? At::metadata : At::tensor;
    current_ = TensorEntry{};
    current_.name = key_;
    fields_ = 0;
    key_.clear();
  } else {
    return unexpected("an object");
  }
  return true;
}

bool HeaderEvents::key(string_t& value) {
  if (at_ == At::tensor) {
    take_field(value);
  } else if (at_ == At::top && !names_.insert(value).second) {
    throw JsonFault(fmt::format("names {} twice", in_quotes(value)));
  } else if (at_ == At::metadata && out_.metadata.contains(value)) {
    throw JsonFault(fmt::format("has the metadata key {} twice", in_quotes(value)));
  }
  key_ = value;
  return true;
}

void HeaderEvents::take_field(const std::string& name) {
  const unsigned field = name == "dtype" ? kDtype : name == "shape" ? kShape : name == "data_offsets" ? kOffsets : 0;
  if (field == 0) {
    throw JsonFault(fmt::format("gives tensor {} the unknown key {}: expected dtype, shape and data_offsets",
                                in_quotes(current_.name), in_quotes(name)));
  }
  if ((fields_ & field) != 0)
    throw JsonFault(fmt::format("gives tensor {} two \"{}\"", in_quotes(current_.name), name));
  fields_ |= field;
}

bool HeaderEvents::end_object() {
  if (at_ == At::tensor) finish_tensor();
  at_ = at_ == At::top ? At::done : At::top;
  return true;
}

void HeaderEvents::finish_tensor() {
  if (fields_ != (kDtype | kShape | kOffsets)) {
    const char* missing = (fields_ & kDtype) == 0 ? "dtype" : (fields_ & kShape) == 0 ? "shape" : "data_offsets";
    throw JsonFault(fmt::format("gives tensor {} no \"{}\"", in_quotes(current_.name), missing));
  }
  out_.tensors.push_back(std::move(current_));
}

bool HeaderEvents::start_array(std::size_t) {
  if (at_ != At::tensor || key_ == "dtype") return unexpected("a list");
  at_ = key_ == "shape" ? At::shape : At::offsets;
  offsets_.clear();
  return true;
}

bool HeaderEvents::end_array() {
  if (at_ == At::offsets) {
    if (offsets_.size() != 2) {
      throw JsonFault(
          fmt::format("gives tensor {} {} data_offsets instead of 2", in_quotes(current_.name), offsets_.size()));
    }
    current_.begin = offsets_[0];
    current_.end = offsets_[1];
  }
  at_ = At::tensor;
  return true;
}

}  // namespace

std::string_view safetensors_word(DType type) {
  for (const Word& entry : kWords) {
    if (entry.type == type) return entry.word;
  }
  return "";
}

SafetensorsHeader read_header_json(const std::filesystem::path& file, std::string_view json) {
  SafetensorsHeader header;
  try {
    if (!json.starts_with('{')) throw JsonFault("does not begin with '{'");
    if (json.find('\0') != std::string_view::npos) throw JsonFault("holds a NUL byte");
    HeaderEvents events(header);
    Json::sax_parse(json, &events);
  } catch (const JsonFault& fault) {
    throw FileError(fmt::format("{}: not a safetensors file: its header {}", file.string(), fault.what()));
  }
  return header;
}

}  // namespace spillway
