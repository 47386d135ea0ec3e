// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints: everything that a bit-equal resume needs, by parameter, whatever the placement.
//
// Tensors of the state files, by name: master/P and state0/P, state1/P of every trained parameter P (fp32), whole or in
// parts, master@O/P being the one that starts at element O of P; frozen/P of those that are not trained but were
// written since the engine was made; buffer/B of every buffer; random/cpu, random/device and random/dropout, the states
// of random number generators (bytes), rank r's beyond 0 being random-r/cpu and so on.
#include <fmt/format.h>

#include <optional>
#include <sstream>
#include <utility>

#include "formats/checksum.h"
#include "spillway/core/error.h"
#include "spillway/train/checkpoint.h"
#include "train/checkpoint_tensors.h"
#include "train/engine_impl.h"

namespace spillway {
namespace {

Bytes bytes_of(const TensorSource& source) {
  std::int64_t bytes = size_of(source.dtype);
  for (const std::int64_t size : source.shape) bytes *= size;
  return {bytes};
}

}  // namespace

// ---- saving --------------------------------------------------------------------------------------------------------

void Engine::Impl::add_state_tensors(std::size_t i, const std::string& role_name, StateRole role,
                                     std::vector<TensorSource>& out) {
  const ModelParameter& parameter = plan.trainable[i];
  const auto index = static_cast<std::int64_t>(i);
  if (!plan.layout->partition().cuts()) {
    // Whole, each by one rank.
    if (ranks != nullptr && index % ranks->size() != ranks->rank()) return;
    out.push_back({role_name + "/" + parameter.name, DType::f32, parameter.tensor.sizes().vec(),
                   [this, index, role](std::span<std::byte> target) { copy_out(read(index, role), target); }});
    return;
  }
  for (const Segment& part : plan.layout->kept_segments_of_parameter(index)) {
    out.push_back({fmt::format("{}@{}/{}", role_name, part.parameter_offset, parameter.name),
                   DType::f32,
                   {part.count},
                   [this, &part, role](std::span<std::byte> target) {
                     runtime->read_part(role, part, reinterpret_cast<float*>(target.data()));
                   }});
  }
}

std::vector<TensorSource> Engine::Impl::checkpoint_tensors() {
  std::vector<TensorSource> out;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    add_state_tensors(i, "master", {StateRole::Kind::master}, out);
    for (std::int64_t k = 0; k < plan.spec.optimizer_states; ++k) {
      add_state_tensors(i, fmt::format("state{}", k), {StateRole::Kind::optimizer_state, k}, out);
    }
  }
  const std::string random = random_prefix();
  out.push_back(source_of(random + "cpu", random_state(torch::kCPU)));
  const torch::Device device = torch_device(config.device);
  if (!device.is_cpu()) out.push_back(source_of(random + "device", random_state(device)));
  for (const auto& [name, model] : dropout_states()) out.push_back(source_of(random + name, model->dropout_state()));
  if (ranks != nullptr && ranks->rank() > 0) return out;  // what all ranks have, the first one writes
  for (std::size_t i = 0; i < plan.frozen.size(); ++i) {
    const torch::Tensor& tensor = plan.frozen[i].tensor;
    if (tensor._version() != frozen_versions[i]) out.push_back(source_of("frozen/" + plan.frozen[i].name, tensor));
  }
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) out.push_back(source_of("buffer/" + buffer.key(), as_stored(buffer.value())));
  }
  return out;
}

std::vector<std::pair<std::string, std::shared_ptr<CausalLM>>> Engine::Impl::dropout_states() const {
  std::vector<std::pair<std::string, std::shared_ptr<CausalLM>>> out;
  for (const auto& model : causal_lms) {
    if (!model->uses_dropout()) continue;
    out.emplace_back(out.empty() ? "dropout" : fmt::format("dropout-{}", out.size()), model);
  }
  return out;
}

std::string Engine::Impl::random_prefix() const {
  return ranks == nullptr || ranks->rank() == 0 ? "random/" : fmt::format("random-{}/", ranks->rank());
}

CheckpointManifest Engine::Impl::checkpoint_manifest(const std::string& program) {
  CheckpointManifest manifest;
  manifest.skipped = skipped;
  manifest.not_finite = not_finite;
  manifest.first_weight = first_weight;
  manifest.optimizer = std::string(to_string(config.optimizer));
  manifest.precision = config.precision;
  manifest.groups = base_hyperparameters;
  if (scaler.dynamic()) manifest.scaler = scaler.state();
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    const ModelParameter& parameter = plan.trainable[i];
    manifest.parameters.push_back(
        {parameter.name, parameter.tensor.sizes().vec(), runtime->updates(static_cast<std::int64_t>(i))});
  }
  for (std::size_t i = 0; i < plan.frozen.size(); ++i) {
    manifest.frozen.push_back({plan.frozen[i].name, frozen_checksum(i)});
  }
  manifest.program = program;
  return manifest;
}

std::vector<CheckpointFile> Engine::Impl::write_parts(const std::filesystem::path& aside,
                                                      const CheckpointOptions& options) {
  std::vector<TensorSource> tensors = checkpoint_tensors();
  Bytes total, done;
  for (TensorSource& source : tensors) {
    total += bytes_of(source);
    source.fill = [&done, &total, &options, bytes = bytes_of(source), fill = source.fill](std::span<std::byte> target) {
      fill(target);
      done += bytes;
      if (options.progress) options.progress(done, total);
    };
  }
  const std::string prefix = ranks == nullptr ? "states" : fmt::format("states-{:05}", ranks->rank());
  std::vector<CheckpointFile> files;
  for (std::size_t first = 0; first < tensors.size();) {
    std::size_t last = first + 1;
    Bytes bytes = bytes_of(tensors[first]);
    while (last < tensors.size() && bytes + bytes_of(tensors[last]) <= options.max_file)
      bytes += bytes_of(tensors[last++]);
    files.push_back(write_checkpoint_part(aside, fmt::format("{}-{:05}.safetensors", prefix, files.size() + 1),
                                          std::span(tensors).subspan(first, last - first)));
    first = last;
  }
  return files;
}

namespace {

// Lines of "bytes checksum name".
std::string text_of(const std::vector<CheckpointFile>& files) {
  std::string text;
  for (const CheckpointFile& file : files)
    text += fmt::format("{} {} {}\n", file.bytes.value, file.checksum, file.name);
  return text;
}

std::vector<CheckpointFile> files_of(const std::string& text) {
  std::vector<CheckpointFile> files;
  std::istringstream lines(text);
  for (CheckpointFile file; lines >> file.bytes.value >> file.checksum >> file.name;) files.push_back(file);
  return files;
}

}  // namespace

std::filesystem::path Engine::Impl::save_with_ranks(const std::filesystem::path& root,
                                                    const CheckpointOptions& options) {
  const bool first = ranks->rank() == 0;
  std::optional<CheckpointWriter> writer;
  if (first) writer.emplace(root, updates);
  const std::filesystem::path aside = gather_text("save: where", first ? writer->aside().string() : "").front();
  const std::vector<std::string> parts = gather_text("save: parts", text_of(write_parts(aside, options)));
  std::filesystem::path made;
  if (first) {
    for (const std::string& part : parts) {
      for (CheckpointFile& file : files_of(part)) writer->add_part(std::move(file));
    }
    made = writer->commit(checkpoint_manifest(options.program));
    if (options.keep > 0) prune_checkpoints(root, made, options.keep);
  }
  return gather_text("save: made", made.string()).front();
}

std::filesystem::path Engine::save(const std::filesystem::path& root, const CheckpointOptions& options) {
  Impl& s = *impl_;
  s.check_usable();
  s.check_between_steps("save()");
  const TorchDeviceScope device(s.config.device);
  require(options.keep >= 0, fmt::format("keep is {}; expected zero (all) or more", options.keep));
  const HostScope host;
  s.together([&s] {
    s.check_parameters();  // masters of weights that the program wrote are brought up to date
    s.wait_landed();
  });
  if (s.ranks != nullptr) return s.together([&] { return s.save_with_ranks(root, options); });
  CheckpointWriter writer(root, s.updates);
  for (CheckpointFile& file : s.write_parts(writer.aside(), options)) writer.add_part(std::move(file));
  const std::filesystem::path made = writer.commit(s.checkpoint_manifest(options.program));
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

}  // namespace spillway
