// SPDX-License-Identifier: Apache-2.0
//
// Going on from a checkpoint: first everything is found and checked, then it is taken over.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <unordered_map>
#include <utility>

#include "core/strict_json.h"
#include "formats/checksum.h"
#include "models/scalar_type.h"
#include "spillway/core/error.h"
#include "spillway/train/checkpoint.h"
#include "train/checkpoint_tensors.h"
#include "train/engine_impl.h"
#include "train/state_files.h"

namespace spillway {
namespace {

// What a part of a parameter and `values`, which start at element `offset` of it, have in common.
void copy_overlap(const StatePart& part, std::int64_t offset, std::vector<float>& values) {
  const std::int64_t count = part.view.numel();
  const std::int64_t begin = std::max(offset, part.offset);
  const std::int64_t end = std::min(offset + static_cast<std::int64_t>(values.size()), part.offset + count);
  if (begin >= end) return;
  std::memcpy(values.data() + (begin - offset), part.view.bytes.data() + (begin - part.offset) * 4,
              static_cast<std::size_t>(end - begin) * 4);
}

void check_numbers(const std::filesystem::path& folder, const Hyperparameters& group) {
  try {
    check_hyperparameters("manifest.json", group);
  } catch (const InvalidArgument& error) {
    throw FileError(fmt::format("{}: {}", folder.string(), error.what()));
  }
}

}  // namespace

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

Engine::Impl::CheckedCheckpoint Engine::Impl::check_checkpoint(const std::filesystem::path& path,
                                                               const CheckpointLoadOptions& options) {
  CheckedCheckpoint out;
  out.folder = path;
  if (!std::filesystem::exists(path / "manifest.json")) {
    const auto all = list_checkpoints(path);
    if (all.empty())
      throw FileError(fmt::format("{}: neither a checkpoint nor a folder of checkpoints", path.string()));
    out.folder = all.back();
  }
  const std::string where = out.folder.string();
  out.manifest = read_checkpoint_manifest(out.folder);
  if (out.manifest.optimizer != to_string(config.optimizer)) {
    throw FileError(fmt::format("{}: its states are those of {}, this run's optimizer is {}", where,
                                out.manifest.optimizer, to_string(config.optimizer)));
  }
  check_same_parameters(out.manifest, where);
  check_files(out.folder, out.manifest, options.verify);
  out.files = std::make_unique<StateFiles>(out.folder, out.manifest);
  out.actions = checkpoint_actions(*out.files);
  out.files->check_all_asked();
  check_same_frozen(out.manifest, *out.files, where);
  for (const Hyperparameters& group : out.manifest.groups) check_numbers(out.folder, group);
  return out;
}

Engine::Impl::CheckedCheckpoint Engine::Impl::check_together(const std::filesystem::path& path,
                                                             const CheckpointLoadOptions& options) {
  if (ranks == nullptr) return check_checkpoint(path, options);
  CheckedCheckpoint out;
  std::exception_ptr refused;
  std::string verdict;  // "+" and what was found, or "-" and why not
  try {
    out = check_checkpoint(path, options);
    verdict = fmt::format("+{} ({})", out.folder.filename().string(), checksum_of_file(out.folder / "manifest.json"));
  } catch (const std::exception& error) {
    refused = std::current_exception();
    verdict = fmt::format("-{}", error.what());
  }
  const std::vector<std::string> verdicts = gather_text("load: found", verdict);
  if (refused) std::rethrow_exception(refused);
  for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
    if (verdicts[rank].front() == '-')
      throw FileError(fmt::format("rank {} refuses the checkpoint: {}", rank, verdicts[rank].substr(1)));
    if (verdicts[rank] != verdicts[0]) {
      throw FileError(
          fmt::format("rank {} finds the checkpoint {} in {}, rank 0 {}: all ranks have to see the same "
                      "folder",
                      rank, verdicts[rank].substr(1), path.string(), verdicts[0].substr(1)));
    }
  }
  return out;
}

std::string Engine::load(const std::filesystem::path& path, const CheckpointLoadOptions& options) {
  Impl& s = *impl_;
  s.check_usable();
  s.check_between_steps("load()");
  return load_checked(path, options);
}

std::string Engine::load_checked(const std::filesystem::path& path, const CheckpointLoadOptions& options) {
  Impl& s = *impl_;
  const TorchDeviceScope device(s.config.device);
  const HostScope host;
  const torch::NoGradGuard no_grad;
  // First everything is found and checked, then it is taken over: a checkpoint that is refused changes nothing.
  const Impl::CheckedCheckpoint checked = s.check_together(path, options);
  s.together([&] { s.take_checkpoint(checked, options); });
  return checked.manifest.program;
}

void Engine::Impl::take_checkpoint(const CheckedCheckpoint& checked, const CheckpointLoadOptions& options) {
  Bytes total, done;
  for (const CheckpointFile& file : checked.manifest.files) total += file.bytes;
  runtime->wait_all();
  on_its_way.assign(on_its_way.size(), false);  // what was written before counts no more
  try {
    for (std::size_t i = 0; i < checked.actions.size(); ++i) {
      checked.actions[i]();
      done = {total.value / static_cast<std::int64_t>(checked.actions.size()) * static_cast<std::int64_t>(i + 1)};
      if (options.progress) options.progress(i + 1 == checked.actions.size() ? total : done, total);
    }
  } catch (const std::exception& error) {
    failure = error.what();  // a part of the states is the checkpoint's
    throw;
  }
  take_counters(checked.manifest, options.hyperparameters);
}

void Engine::Impl::check_files(const std::filesystem::path& folder, const CheckpointManifest& manifest,
                               bool checksums) {
  check_checkpoint_files(folder, manifest, /*checksums=*/false);
  if (!checksums) return;
  CheckpointManifest share = manifest;  // each rank reads some of the files
  share.files.clear();
  const std::size_t count = ranks == nullptr ? 1 : static_cast<std::size_t>(ranks->size());
  for (std::size_t i = ranks == nullptr ? 0 : static_cast<std::size_t>(ranks->rank()); i < manifest.files.size();
       i += count) {
    share.files.push_back(manifest.files[i]);
  }
  check_checkpoint_files(folder, share, true);
}

std::vector<std::function<void()>> Engine::Impl::checkpoint_actions(StateFiles& files) {
  std::vector<std::function<void()>> actions;
  const auto take_role = [&](std::size_t i, const std::string& role_name, StateRole role) {
    const auto index = static_cast<std::int64_t>(i);
    const std::vector<StatePart> parts =
        files.parts(role_name, plan.trainable[i].name, plan.trainable[i].tensor.sizes().vec());
    std::size_t first = 0;  // of the parts that may reach into the segment: both are in order
    for (const Segment& kept : plan.layout->kept_segments_of_parameter(index)) {
      while (first < parts.size() && parts[first].offset + parts[first].view.numel() <= kept.parameter_offset) ++first;
      std::vector<StatePart> common;
      for (std::size_t i = first; i < parts.size() && parts[i].offset < kept.parameter_offset + kept.count; ++i)
        common.push_back(parts[i]);
      actions.push_back([this, role, &kept, common = std::move(common)] {
        std::vector<float> values(static_cast<std::size_t>(kept.count));
        for (const StatePart& part : common) copy_overlap(part, kept.parameter_offset, values);
        runtime->write_part(role, kept, values.data());
      });
    }
  };
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    take_role(i, "master", {StateRole::Kind::master});
    for (std::int64_t k = 0; k < plan.spec.optimizer_states; ++k) {
      take_role(i, fmt::format("state{}", k), {StateRole::Kind::optimizer_state, k});
    }
  }
  actions.push_back([this] { runtime->wait_gather_working(); });
  const auto copy_into = [&](const std::string& name, torch::Tensor target) {
    const torch::Tensor stored = as_stored(target);
    const TensorView view = files.get(name, dtype_of(stored, name), stored.sizes().vec());
    actions.push_back([view, target, type = stored.scalar_type()]() mutable {
      const torch::Tensor values = tensor_of(view, type);
      target.copy_(target.is_complex() ? torch::view_as_complex(values) : values);
    });
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
  const std::string random = random_prefix();
  if (ranks == nullptr || ranks->rank() == 0 || files.contains(random + "cpu"))
    take_random(random + "cpu", torch::kCPU);
  const torch::Device device = torch_device(config.device);
  if (!device.is_cpu() && files.contains(random + "device")) take_random(random + "device", device);
  for (const auto& [name, model] : dropout_states()) {
    const torch::Tensor before = model->dropout_state();
    if (!files.has_shape(random + name, before)) continue;
    const torch::Tensor masks = tensor_of(files.get(random + name, DType::u8, before.sizes().vec()), torch::kByte);
    try {
      model->set_dropout_state(masks);
    } catch (const std::exception& error) {
      throw FileError(fmt::format("{}{}: masks cannot go on from what is stored: {}", random, name, error.what()));
    }
    model->set_dropout_state(before);
    actions.push_back([model = model, masks] { model->set_dropout_state(masks); });
  }
  files.leave_others_random();  // of other ranks, or another kind of device: masks drawn there cannot be drawn here
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
