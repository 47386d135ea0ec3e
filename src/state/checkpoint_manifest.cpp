// SPDX-License-Identifier: Apache-2.0
#include "state/checkpoint_manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "core/printable.h"
#include "core/strict_json.h"
#include "formats/safetensors_header.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

using Json = nlohmann::json;
constexpr std::int64_t kVersion = 1;
constexpr const char* kFormat = "spillway-checkpoint";
constexpr std::uintmax_t kLongestManifest = std::uintmax_t{256} << 20;

// Reads values with the path to them for messages; everything a manifest says passes through here.
class Reader {
 public:
  Reader(const Json& value, std::string where) : value_(value), where_(std::move(where)) {}

  Reader at(const char* key) const {
    if (!value_.is_object()) fail("an object");
    const auto found = value_.find(key);
    if (found == value_.end()) throw FileError(fmt::format("{}: \"{}\" is missing", where_, key));
    return {*found, fmt::format("{}.{}", where_, key)};
  }
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  std::vector<Reader> items() const {
    if (!value_.is_array()) fail("an array");
    std::vector<Reader> out;
    for (const Json& item : value_) out.emplace_back(item, fmt::format("{}[{}]", where_, out.size()));
    return out;
  }
  std::string text() const {
    if (!value_.is_string()) fail("a string");
    return value_.get<std::string>();
  }
  /// A text that may be printed.
  std::string word() const {
    const std::string out = text();
    if (std::any_of(out.begin(), out.end(), is_control)) fail("a text without control characters");
    return out;
  }
  std::int64_t count() const {
    if (!value_.is_number_integer() || (value_.is_number_unsigned() && value_.get<std::uint64_t>() >> 62 != 0) ||
        value_.get<std::int64_t>() < 0) {
      fail("an integer of zero or more");
    }
    return value_.get<std::int64_t>();
  }
  double number() const {
    if (!value_.is_number() || !std::isfinite(value_.get<double>())) fail("a number");
    return value_.get<double>();
  }
  [[noreturn]] void fail(const char* expected) const {
    throw FileError(fmt::format("{}: expected {}, found {}", where_, expected, in_quotes(value_.dump())));
  }

 private:
  const Json& value_;
  std::string where_;
};

Json json_of(const Hyperparameters& h) {
  return {{"lr", h.lr}, {"beta1", h.beta1}, {"beta2", h.beta2}, {"eps", h.eps}, {"weight_decay", h.weight_decay}};
}

Hyperparameters read_hyperparameters(const Reader& in) {
  return {in.at("lr").number(), in.at("beta1").number(), in.at("beta2").number(), in.at("eps").number(),
          in.at("weight_decay").number()};
}

// A file's name must be one in the checkpoint's own folder.
std::string read_file_name(const Reader& in) {
  std::string name = in.word();
  const bool plain = !name.empty() && name.size() < 200 && name[0] != '.' && name.find('/') == std::string::npos;
  if (!plain) in.fail("the plain name of a file");
  return name;
}

std::uint64_t read_checksum(const Reader& in) {
  const std::string sum = in.text();
  if (sum.size() != 16 || sum.find_first_not_of("0123456789abcdef") != std::string::npos) {
    in.fail("16 hexadecimal digits");
  }
  return std::stoull(sum, nullptr, 16);
}

CheckpointFile read_file(const Reader& in) {
  return {read_file_name(in.at("name")), {in.at("bytes").count()}, read_checksum(in.at("xxh3"))};
}

// `total` grows by the parameter's elements.
CheckpointParameter read_parameter(const Reader& in, std::int64_t& total) {
  constexpr std::int64_t kMost = std::int64_t{1} << 58;  // at 16 bytes of states an element: 62 bits of bytes
  CheckpointParameter out;
  out.name = in.at("name").text();
  for (const Reader& size : in.at("shape").items()) out.shape.push_back(size.count());
  const std::optional<std::int64_t> elements = checked_numel(out.shape, 1);
  if (!elements || *elements > kMost - total) in.at("shape").fail("a shape whose elements can be counted");
  total += *elements;
  out.updates = in.at("updates").count();
  return out;
}

LossScalerState read_scaler(const Reader& in) {
  LossScalerState out;
  out.scale = in.at("scale").number();
  if (!(out.scale > 0 && out.scale <= std::numeric_limits<float>::max()))
    in.at("scale").fail("a number above zero that fp32 holds");
  out.finite_steps = in.at("finite_steps").count();
  out.tolerance = in.at("tolerance").count();
  out.skips_at_minimum = in.at("skips_at_minimum").count();
  return out;
}

template <class List, class Name>
void check_unique(const List& list, const Name& name, const std::string& where) {
  std::set<std::string> seen;
  for (const auto& item : list) {
    if (!seen.insert(name(item)).second)
      throw FileError(fmt::format("{}: {} stands twice", where, in_quotes(name(item))));
  }
}

CheckpointManifest read_manifest(const Json& document, const std::string& source) {
  const Reader in(document, source);
  if (in.at("format").text() != kFormat) in.at("format").fail("\"spillway-checkpoint\"");
  const std::int64_t version = in.at("version").count();
  if (version != kVersion) {
    throw FileError(
        fmt::format("{}: version {} of the format; this build reads version {}", source, version, kVersion));
  }
  CheckpointManifest out;
  out.step = in.at("step").count();
  out.skipped = in.at("skipped").count();
  out.not_finite = in.at("not_finite").count();
  out.first_weight = in.at("first_weight").number();
  if (out.first_weight < 0) in.at("first_weight").fail("a number of zero or more");
  out.optimizer = in.at("optimizer").word();
  const std::optional<DType> precision = parse_dtype(in.at("precision").text());
  if (!precision) in.at("precision").fail("an element type");
  out.precision = *precision;
  for (const Reader& group : in.at("groups").items()) out.groups.push_back(read_hyperparameters(group));
  if (in.has("loss_scaler")) out.scaler = read_scaler(in.at("loss_scaler"));
  std::int64_t elements = 0;
  for (const Reader& parameter : in.at("parameters").items()) {
    out.parameters.push_back(read_parameter(parameter, elements));
  }
  for (const Reader& frozen : in.at("frozen").items()) {
    out.frozen.push_back({frozen.at("name").text(), read_checksum(frozen.at("xxh3"))});
  }
  for (const Reader& file : in.at("files").items()) out.files.push_back(read_file(file));
  out.program = in.at("program").text();
  check_unique(
      out.parameters, [](const auto& p) { return p.name; }, source);
  check_unique(
      out.files, [](const auto& f) { return f.name; }, source);
  return out;
}

}  // namespace

std::string checkpoint_manifest_text(const CheckpointManifest& manifest) {
  Json out = {{"format", kFormat},
              {"version", kVersion},
              {"step", manifest.step},
              {"skipped", manifest.skipped},
              {"not_finite", manifest.not_finite},
              {"first_weight", manifest.first_weight},
              {"optimizer", manifest.optimizer},
              {"precision", std::string(to_string(manifest.precision))},
              {"groups", Json::array()},
              {"parameters", Json::array()},
              {"frozen", Json::array()},
              {"files", Json::array()},
              {"program", manifest.program}};
  for (const Hyperparameters& group : manifest.groups) out["groups"].push_back(json_of(group));
  if (manifest.scaler) {
    out["loss_scaler"] = {{"scale", manifest.scaler->scale},
                          {"finite_steps", manifest.scaler->finite_steps},
                          {"tolerance", manifest.scaler->tolerance},
                          {"skips_at_minimum", manifest.scaler->skips_at_minimum}};
  }
  for (const CheckpointParameter& p : manifest.parameters) {
    out["parameters"].push_back({{"name", p.name}, {"shape", p.shape}, {"updates", p.updates}});
  }
  for (const FrozenParameter& p : manifest.frozen) {
    out["frozen"].push_back({{"name", p.name}, {"xxh3", fmt::format("{:016x}", p.checksum)}});
  }
  for (const CheckpointFile& file : manifest.files) {
    out["files"].push_back(
        {{"name", file.name}, {"bytes", file.bytes.value}, {"xxh3", fmt::format("{:016x}", file.checksum)}});
  }
  try {
    return out.dump(1) + "\n";
  } catch (const Json::exception& error) {
    throw InvalidArgument(fmt::format("what a checkpoint is to keep is not UTF-8 text: {}", json_fault_text(error)));
  }
}

CheckpointManifest read_checkpoint_manifest(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / kManifestName;
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    throw FileError(fmt::format("{}: expected a checkpoint's folder", folder.string()));
  }
  const std::uintmax_t size = std::filesystem::file_size(file, error);
  if (error)
    throw FileError(
        fmt::format("{}: there is no {}: not a checkpoint, or not a complete one", folder.string(), kManifestName));
  if (size > kLongestManifest)
    throw FileError(fmt::format("{}: {} bytes are too many for a manifest", file.string(), size));
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) throw FileError(fmt::format("{}: cannot be read", file.string()));
  try {
    return read_manifest(parse_strict_object(text.str()), file.string());
  } catch (const JsonFault& fault) {
    throw FileError(fmt::format("{}: not a checkpoint's manifest: {}", file.string(), fault.what()));
  }
}

}  // namespace spillway
