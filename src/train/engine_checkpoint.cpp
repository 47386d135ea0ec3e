// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints: everything that a bit-equal resume needs, by parameter, whatever the placement.
//
// Tensors of the state files, by name: master/P and state0/P, state1/P of every trained parameter P (fp32); frozen/P of
// those that are not trained but were written since the engine was made; buffer/B of every buffer; random/cpu and
// random/dropout, the states of random number generators (bytes).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "core/strict_json.h"
#include "formats/checksum.h"
#include "models/scalar_type.h"
#include "spillway/core/error.h"
#include "spillway/train/checkpoint.h"
#include "train/engine_impl.h"
#include "train/state_files.h"

namespace spillway {
namespace {

// Element types a buffer may have.
DType dtype_of(const torch::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case torch::kFloat:
      return DType::f32;
    case torch::kDouble:
      return DType::f64;
    case torch::kBFloat16:
      return DType::bf16;
    case torch::kHalf:
      return DType::f16;
    case torch::kLong:
      return DType::i64;
    case torch::kInt:
      return DType::i32;
    case torch::kShort:
      return DType::i16;
    case torch::kChar:
      return DType::i8;
    case torch::kByte:
      return DType::u8;
    case torch::kBool:
      return DType::boolean;
    default:
      throw InvalidArgument(
          fmt::format("buffer {} is {}, which checkpoints cannot hold", name, c10::toString(tensor.scalar_type())));
  }
}

void copy_out(const torch::Tensor& tensor, std::span<std::byte> target) {
  const HostScope host;
  const torch::Tensor here = tensor.detach().to(torch::kCPU).contiguous();
  check(here.nbytes() == target.size(), "a tensor fills its place in a file");
  if (!target.empty()) std::memcpy(target.data(), here.const_data_ptr(), target.size());
}

TensorSource source_of(std::string name, const torch::Tensor& tensor) {
  return {name, dtype_of(tensor, name), tensor.sizes().vec(),
          [tensor](std::span<std::byte> target) { copy_out(tensor, target); }};
}

// A copy of a checkpoint's tensor in ordinary memory.
torch::Tensor tensor_of(const TensorView& view, torch::ScalarType type) {
  const HostScope host;
  torch::Tensor out = torch::empty(view.shape, torch::TensorOptions().dtype(type));
  if (!view.bytes.empty()) std::memcpy(out.mutable_data_ptr(), view.bytes.data(), view.bytes.size());
  return out;
}

torch::Tensor random_state(torch::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(torch::Device device, const torch::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state);
}

/// Throws: FileError where the bytes are no state of such a generator.
void check_random_state(torch::Device device, const torch::Tensor& state, const std::string& where) {
  try {
    at::Generator generator = at::globalContext().defaultGenerator(device).clone();
    generator.set_state(state);
  } catch (const std::exception& error) {
    throw FileError(fmt::format("{}: random numbers cannot go on from what is stored: {}", where, error.what()));
  }
}

Bytes bytes_of(const TensorSource& source) {
  std::int64_t bytes = size_of(source.dtype);
  for (const std::int64_t size : source.shape) bytes *= size;
  return {bytes};
}

}  // namespace

// ---- saving --------------------------------------------------------------------------------------------------------

std::vector<TensorSource> Engine::Impl::checkpoint_tensors() {
  std::vector<TensorSource> out;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    const ModelParameter& parameter = plan.trainable[i];
    const auto add = [&](const std::string& name, StateRole role) {
      out.push_back({name + parameter.name, DType::f32, parameter.tensor.sizes().vec(),
                     [this, i, role](std::span<std::byte> target) {
                       copy_out(read(static_cast<std::int64_t>(i), role), target);
                     }});
    };
    add("master/", {StateRole::Kind::master});
    for (std::int64_t k = 0; k < plan.spec.optimizer_states; ++k) {
      add(fmt::format("state{}/", k), {StateRole::Kind::optimizer_state, k});
    }
  }
  for (std::size_t i = 0; i < plan.frozen.size(); ++i) {
    const torch::Tensor& tensor = plan.frozen[i].tensor;
    if (tensor._version() != frozen_versions[i]) out.push_back(source_of("frozen/" + plan.frozen[i].name, tensor));
  }
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) out.push_back(source_of("buffer/" + buffer.key(), buffer.value()));
  }
  out.push_back(source_of("random/cpu", random_state(torch::kCPU)));
  const torch::Device device = torch_device(config.device);
  if (!device.is_cpu()) out.push_back(source_of("random/device", random_state(device)));
  if (causal_lm != nullptr && causal_lm->uses_dropout()) {
    out.push_back(source_of("random/dropout", causal_lm->dropout_state()));
  }
  return out;
}

std::filesystem::path Engine::save(const std::filesystem::path& root, const CheckpointOptions& options) {
  Impl& s = *impl_;
  s.check_usable();
  s.check_between_steps("save()");
  const TorchDeviceScope device(s.config.device);
  require(options.keep >= 0, fmt::format("keep is {}; expected zero (all) or more", options.keep));
  const HostScope host;
  s.check_parameters();  // masters of weights that the program wrote are brought up to date
  s.runtime->wait_all();
  std::vector<TensorSource> tensors = s.checkpoint_tensors();
  Bytes total, done;
  for (TensorSource& source : tensors) {
    total += bytes_of(source);
    source.fill = [&done, &total, &options, bytes = bytes_of(source), fill = source.fill](std::span<std::byte> target) {
      fill(target);
      done += bytes;
      if (options.progress) options.progress(done, total);
    };
  }
  CheckpointWriter writer(root, s.updates);
  std::int64_t parts = 0;
  for (std::size_t first = 0; first < tensors.size();) {
    std::size_t last = first + 1;
    Bytes bytes = bytes_of(tensors[first]);
    while (last < tensors.size() && bytes + bytes_of(tensors[last]) <= options.max_file)
      bytes += bytes_of(tensors[last++]);
    writer.add_file(fmt::format("states-{:05}.safetensors", ++parts), std::span(tensors).subspan(first, last - first));
    first = last;
  }
  CheckpointManifest manifest;
  manifest.skipped = s.skipped;
  manifest.not_finite = s.not_finite;
  manifest.first_weight = s.first_weight;
  manifest.optimizer = std::string(to_string(s.config.optimizer));
  manifest.precision = s.config.precision;
  manifest.groups = s.base_hyperparameters;
  if (s.scaler.dynamic()) manifest.scaler = s.scaler.state();
  for (std::size_t i = 0; i < s.plan.trainable.size(); ++i) {
    const ModelParameter& parameter = s.plan.trainable[i];
    manifest.parameters.push_back(
        {parameter.name, parameter.tensor.sizes().vec(), s.runtime->updates(static_cast<std::int64_t>(i))});
  }
  for (std::size_t i = 0; i < s.plan.frozen.size(); ++i) {
    manifest.frozen.push_back({s.plan.frozen[i].name, s.frozen_checksum(i)});
  }
  manifest.program = options.program;
  const std::filesystem::path made = writer.commit(std::move(manifest));
  if (options.keep > 0) prune_checkpoints(root, made, options.keep);
  return made;
}

std::uint64_t Engine::Impl::frozen_checksum(std::size_t i) {
  frozen_checksums.resize(plan.frozen.size());
  const torch::Tensor& tensor = plan.frozen[i].tensor;
  auto& [version, sum] = frozen_checksums[i];
  if (version == tensor._version() + 1) return sum;  // 0: not computed
  const HostScope host;
  const torch::Tensor here = tensor.detach().to(torch::kCPU).contiguous();
  Checksum checksum;
  checksum.add({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()});
  version = tensor._version() + 1;
  return sum = checksum.value();
}

namespace {

void check_numbers(const std::filesystem::path& folder, const Hyperparameters& group) {
  try {
    check_hyperparameters("manifest.json", group);
  } catch (const InvalidArgument& error) {
    throw FileError(fmt::format("{}: {}", folder.string(), error.what()));
  }
}

}  // namespace

// ---- loading -------------------------------------------------------------------------------------------------------

void Engine::Impl::check_same_parameters(const CheckpointManifest& manifest, const std::string& where) const {
  std::unordered_map<std::string, const CheckpointParameter*> saved;
  for (const CheckpointParameter& parameter : manifest.parameters) saved.emplace(parameter.name, &parameter);
  std::vector<std::string> faults;
  for (const ModelParameter& parameter : plan.trainable) {
    const auto found = saved.find(parameter.name);
    if (found == saved.end()) {
      faults.push_back(parameter.name + " is trained here but not in the checkpoint");
    } else if (found->second->shape != parameter.tensor.sizes()) {
      faults.push_back(fmt::format("{} has shape {} here and {} in the checkpoint", parameter.name,
                                   c10::str(parameter.tensor.sizes()), c10::str(found->second->shape)));
    }
    if (found != saved.end()) saved.erase(found);
  }
  for (const auto& [name, parameter] : saved)
    faults.push_back(in_quotes(name) + " is in the checkpoint but not trained here");
  if (faults.empty()) return;
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(faults.size(), 5); ++i) text += "; " + faults[i];
  throw FileError(fmt::format("{}: not a checkpoint of this run: {} differences{}", where, faults.size(), text));
}

void Engine::Impl::check_same_frozen(const CheckpointManifest& manifest, const StateFiles& files,
                                     const std::string& where) {
  if (manifest.precision != config.precision) return;  // the same values have other bytes
  std::unordered_map<std::string, std::uint64_t> saved;
  for (const FrozenParameter& parameter : manifest.frozen) saved.emplace(parameter.name, parameter.checksum);
  for (std::size_t i = 0; i < plan.frozen.size(); ++i) {
    const std::string& name = plan.frozen[i].name;
    const auto found = saved.find(name);
    if (files.contains("frozen/" + name) || (found != saved.end() && found->second == frozen_checksum(i))) continue;
    throw FileError(
        fmt::format("{}: the frozen parameter {} has other values here than in the run that was saved: load "
                    "the same base model first",
                    where, name));
  }
}

std::string Engine::load(const std::filesystem::path& path, const CheckpointLoadOptions& options) {
  Impl& s = *impl_;
  s.check_usable();
  s.check_between_steps("load()");
  const TorchDeviceScope device(s.config.device);
  const HostScope host;
  const torch::NoGradGuard no_grad;
  std::filesystem::path folder = path;
  if (!std::filesystem::exists(path / "manifest.json")) {
    const auto all = list_checkpoints(path);
    if (all.empty())
      throw FileError(fmt::format("{}: neither a checkpoint nor a folder of checkpoints", path.string()));
    folder = all.back();
  }
  const CheckpointManifest manifest = read_checkpoint_manifest(folder);
  if (manifest.optimizer != to_string(s.config.optimizer)) {
    throw FileError(fmt::format("{}: its states are those of {}, this run's optimizer is {}", folder.string(),
                                manifest.optimizer, to_string(s.config.optimizer)));
  }
  s.check_same_parameters(manifest, folder.string());
  check_checkpoint_files(folder, manifest, options.verify);
  StateFiles files(folder, manifest);
  // First everything is found and checked, then it is taken over: a checkpoint that is refused changes nothing.
  std::vector<std::function<void()>> actions = s.checkpoint_actions(files);
  files.check_all_asked();
  s.check_same_frozen(manifest, files, folder.string());
  Bytes total, done;
  for (const CheckpointFile& file : manifest.files) total += file.bytes;
  for (const Hyperparameters& group : manifest.groups) check_numbers(folder, group);
  s.runtime->wait_all();
  try {
    for (std::size_t i = 0; i < actions.size(); ++i) {
      actions[i]();
      done = {total.value / static_cast<std::int64_t>(actions.size()) * static_cast<std::int64_t>(i + 1)};
      if (options.progress) options.progress(i + 1 == actions.size() ? total : done, total);
    }
  } catch (const std::exception& error) {
    s.failure = error.what();  // a part of the states is the checkpoint's
    throw;
  }
  s.take_counters(manifest, options.hyperparameters);
  return manifest.program;
}

std::vector<std::function<void()>> Engine::Impl::checkpoint_actions(StateFiles& files) {
  std::vector<std::function<void()>> actions;
  const auto take_role = [&](std::size_t i, const std::string& name, StateRole role) {
    const torch::Tensor& tensor = plan.trainable[i].tensor;
    const TensorView view = files.get(name + plan.trainable[i].name, DType::f32, tensor.sizes().vec());
    actions.push_back([this, i, role, view] {
      const torch::Tensor values = tensor_of(view, torch::kFloat);
      runtime->write(role, static_cast<std::int64_t>(i), values.const_data_ptr<float>());
    });
  };
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    take_role(i, "master/", {StateRole::Kind::master});
    for (std::int64_t k = 0; k < plan.spec.optimizer_states; ++k) {
      take_role(i, fmt::format("state{}/", k), {StateRole::Kind::optimizer_state, k});
    }
  }
  const auto copy_into = [&](const std::string& name, torch::Tensor target) {
    const TensorView view = files.get(name, dtype_of(target, name), target.sizes().vec());
    actions.push_back([view, target]() mutable { target.copy_(tensor_of(view, target.scalar_type())); });
  };
  for (const ModelParameter& parameter : plan.frozen) {
    if (files.contains("frozen/" + parameter.name)) copy_into("frozen/" + parameter.name, parameter.tensor.detach());
  }
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) copy_into("buffer/" + buffer.key(), buffer.value());
  }
  const auto take_random = [&](const std::string& name, torch::Device device) {
    const torch::Tensor state = tensor_of(files.get(name, DType::u8, random_state(device).sizes().vec()), torch::kByte);
    check_random_state(device, state, name);
    actions.push_back([state, device] { set_random_state(device, state); });
  };
  take_random("random/cpu", torch::kCPU);
  const torch::Device device = torch_device(config.device);
  if (!device.is_cpu() && files.contains("random/device")) {
    take_random("random/device", device);
  } else {
    files.leave("random/device");  // of another kind of device: masks drawn there cannot be drawn here
  }
  if (causal_lm != nullptr && causal_lm->uses_dropout() &&
      files.has_shape("random/dropout", causal_lm->dropout_state())) {
    const torch::Tensor before = causal_lm->dropout_state();
    const torch::Tensor masks = tensor_of(files.get("random/dropout", DType::u8, before.sizes().vec()), torch::kByte);
    try {
      causal_lm->set_dropout_state(masks);
    } catch (const std::exception& error) {
      throw FileError(fmt::format("random/dropout: masks cannot go on from what is stored: {}", error.what()));
    }
    causal_lm->set_dropout_state(before);
    actions.push_back([this, masks] { causal_lm->set_dropout_state(masks); });
  } else {
    files.leave("random/dropout");
  }
  return actions;
}

void Engine::Impl::take_counters(const CheckpointManifest& manifest, bool take_hyperparameters) {
  std::unordered_map<std::string, std::int64_t> counts;
  for (const CheckpointParameter& parameter : manifest.parameters) counts[parameter.name] = parameter.updates;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    runtime->set_updates(static_cast<std::int64_t>(i), counts.at(plan.trainable[i].name));
    plan.trainable[i].tensor.unsafeGetTensorImpl()->bump_version();
    versions[i] = plan.trainable[i].tensor._version();
  }
  updates = manifest.step;
  skipped = manifest.skipped;
  not_finite = manifest.not_finite;
  first_weight = manifest.first_weight;
  if (manifest.scaler) scaler.set_state(*manifest.scaler);
  if (!take_hyperparameters || manifest.groups == base_hyperparameters) return;
  if (manifest.groups.size() != base_hyperparameters.size()) {
    log(options.log, LogLevel::warning,
        fmt::format("the checkpoint has {} parameter groups, this run {}: the numbers of this run's are kept",
                    manifest.groups.size(), base_hyperparameters.size()));
    return;
  }
  log(options.log, LogLevel::info,
      "learning rates and other numbers of the parameter groups are the checkpoint's, not the configuration's");
  base_hyperparameters = manifest.groups;
}

}  // namespace spillway
