// SPDX-License-Identifier: Apache-2.0
#include "tools/inspect.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "core/printable.h"
#include "spillway/core/error.h"
#include "spillway/formats/safetensors.h"
#include "spillway/state/checkpoint_folder.h"
#include "spillway/state/lora_options.h"
#include "spillway/state/model_config.h"

namespace spillway::tools {
namespace {

using std::filesystem::path;

template <class Parameters, class Numel>
std::int64_t elements(const Parameters& parameters, Numel numel) {
  std::int64_t total = 0;
  for (const auto& parameter : parameters) total += numel(parameter);
  return total;
}

std::string describe_weights(const path& file_or_folder) {
  struct Sum {
    std::int64_t tensors = 0, elements = 0;
    Bytes bytes;
  };
  const SafetensorsReader reader(file_or_folder);
  std::map<std::string, Sum> by_type;
  std::string text;
  for (const std::string& name : reader.names()) {
    try {
      const TensorView view = reader.tensor(name);
      Sum& sum = by_type[std::string(to_string(view.dtype))];
      ++sum.tensors;
      sum.elements += view.numel();
      sum.bytes += Bytes{static_cast<std::int64_t>(view.bytes.size())};
    } catch (const FileError& error) {
      text += fmt::format("  not read: {}\n", error.what());
    }
  }
  for (const auto& [type, sum] : by_type) {
    text += fmt::format("  {} {} tensors, {} elements, {} ({} bytes)\n", sum.tensors, type, sum.elements,
                        to_string(sum.bytes), sum.bytes.value);
  }
  return text;
}

std::string describe_files(const path& folder) {
  std::map<std::string, std::uintmax_t> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code error;  // a link that leads nowhere is no file
    if (!entry.is_regular_file(error)) continue;
    const std::uintmax_t size = entry.file_size(error);
    if (!error) files[entry.path().filename().string()] = size;
  }
  std::string text = "files\n";
  for (const auto& [name, bytes] : files) text += fmt::format("  {} {} bytes\n", printable(name), bytes);
  return text;
}

bool is_there(const path& file) {
  std::error_code error;
  return exists(file, error);
}

bool has_weights(const path& folder) {
  return is_there(folder / "model.safetensors") || is_there(folder / "model.safetensors.index.json");
}

std::string describe_model(const path& folder) {
  const ModelConfig model = ModelConfig::load(folder);
  const auto parameters = parameter_shapes(model);
  std::string text = fmt::format("Hugging Face model: {}\n", to_string(model.family));
  text += fmt::format("  {} layers of width {}, {} heads ({} of keys and values) of {}, feed-forward {}\n",
                      model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.intermediate);
  text += fmt::format("  vocabulary {}, {} positions, {} head\n", model.vocabulary, model.max_position,
                      model.tied_head ? "tied" : "own");
  text += fmt::format("parameters by its shape\n  {} tensors, {} elements\n", parameters.size(),
                      elements(parameters, [](const ParameterShape& p) { return p.numel(); }));
  text += "weights\n" + (has_weights(folder) ? describe_weights(folder) : "  none: only random ones to start from\n");
  return text + describe_files(folder);
}

std::string describe_adapters(const path& folder) {
  const LoraOptions options = LoraOptions::load(folder);
  std::string text = fmt::format("PEFT adapters: LoRA of rank {}, alpha {}, scale {}, dropout {}\n", options.rank,
                                 options.alpha, options.scaling(), options.dropout);
  text += options.targets.empty() ? "  on the family's own layers\n"
                                  : fmt::format("  on {}\n", fmt::join(options.targets, ", "));
  text += "weights\n" + describe_weights(folder / "adapter_model.safetensors");
  return text + describe_files(folder);
}

std::int64_t numel(const CheckpointParameter& parameter) {  // the manifest's reader saw to it that this can be counted
  std::int64_t product = 1;
  for (const std::int64_t size : parameter.shape) product *= size;
  return product;
}

std::string describe_checkpoint(const path& folder, bool checksums) {
  const CheckpointManifest manifest = read_checkpoint_manifest(folder);
  check_checkpoint_files(folder, manifest, checksums);
  std::string text = fmt::format("checkpoint: {} updates done, {} steps skipped\n", manifest.step, manifest.skipped);
  text += fmt::format("  optimizer {}, {} groups, written by a run in {}\n", manifest.optimizer, manifest.groups.size(),
                      to_string(manifest.precision));
  if (manifest.scaler) text += fmt::format("  loss scale {}\n", manifest.scaler->scale);
  text += fmt::format("  {} trained parameters, {} elements; {} frozen ones, known by their checksums\n",
                      manifest.parameters.size(), elements(manifest.parameters, numel), manifest.frozen.size());
  text += "resumes with the same model, groups and optimizer, in any precision, on any schedule and placement\n";
  if (!manifest.frozen.empty()) {
    text += fmt::format("  values of frozen parameters are compared in {} only: in another, see to the same base\n",
                        to_string(manifest.precision));
  }
  text += "files\n";
  for (const CheckpointFile& file : manifest.files) {
    text += fmt::format("  {} {} bytes, {}\n", file.name, file.bytes.value,
                        checksums ? "undamaged" : "there in full (--checksums reads it)");
  }
  return text;
}

}  // namespace

std::string inspect(const path& folder, bool checksums) {
  if (!is_directory(folder)) throw FileError(fmt::format("{} is not a folder", folder.string()));
  if (is_there(folder / "manifest.json")) return describe_checkpoint(folder, checksums);
  if (is_there(folder / "adapter_config.json")) return describe_adapters(folder);
  if (is_there(folder / "config.json")) return describe_model(folder);
  const auto checkpoints = list_checkpoints(folder);
  if (checkpoints.empty()) {
    throw FileError(
        fmt::format("{}: found no manifest.json (a checkpoint), adapter_config.json (PEFT adapters), "
                    "config.json (a Hugging Face model) and no checkpoints step-N",
                    folder.string()));
  }
  std::string text = fmt::format("{} checkpoints\n", checkpoints.size());
  std::string newest;  // that is whole
  bool all_whole = true;
  for (const path& checkpoint : checkpoints) {
    std::string verdict = checksums ? "undamaged" : "there in full";
    try {
      newest = describe_checkpoint(checkpoint, checksums);
    } catch (const FileError& error) {
      verdict = error.what();
      all_whole = false;
    }
    text += fmt::format("  {}: {}\n", checkpoint.filename().string(), verdict);
  }
  if (!newest.empty()) text += "the newest that is whole:\n" + newest;
  if (!all_whole) throw FileError(fmt::format("{}: not all of its checkpoints are whole\n{}", folder.string(), text));
  return text;
}

}  // namespace spillway::tools
