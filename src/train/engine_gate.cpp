// SPDX-License-Identifier: Apache-2.0
//
// The gate: blocks that await their parameters, and what of new weights is still on its way.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "spillway/core/error.h"
#include "train/engine_impl.h"

namespace spillway {

void Engine::Impl::wait_for_ungated_chunks(const std::vector<std::size_t>& updated) {
  std::vector<bool> pending(on_its_way.size(), false);
  for (std::size_t c = 0; c < plan.layout->chunks().size(); ++c) {
    const auto segments = plan.layout->chunk_segments(static_cast<std::int64_t>(c));
    const bool all_gated = std::all_of(segments.begin(), segments.end(), [&](const Segment& segment) {
      return gated[static_cast<std::size_t>(segment.parameter)];
    });
    if (!all_gated) runtime->wait_parameters(static_cast<std::int64_t>(c));
    // Masters on the device are updated in place, and nothing is on its way but what other ranks keep.
    const bool in_place = plan.spec.placement[c].master == Tier::device && !plan.layout->partition().cuts();
    if (!all_gated || in_place) continue;
    for (const Segment& segment : segments) pending[static_cast<std::size_t>(segment.parameter)] = true;
  }
  on_its_way.assign(on_its_way.size(), false);
  for (std::size_t i : updated) on_its_way[i] = pending[i];
}

void Engine::Impl::note_landed(std::size_t i) {
  if (!on_its_way[i]) return;
  if (plan.trainable[i].tensor._version() != versions[i]) {
    throw StateError(fmt::format(
        "parameter {} was written while its new weights were on their way to it, so that the write is lost "
        "or overwrote them: call wait_parameters() before a parameter is written (set_weight() mends this one)",
        plan.trainable[i].name));
  }
  on_its_way[i] = false;
}

void Engine::Impl::wait_landed() {
  runtime->wait_all();
  for (std::size_t i = 0; i < on_its_way.size(); ++i) note_landed(i);
}

void Engine::Impl::wait_landed_together() {
  if (!plan.layout->partition().cuts()) return wait_landed();
  together([this] { wait_landed(); });
}

std::unique_ptr<DeviceScope> Engine::Impl::count_memory() const {
  // What the program does on the host counts nowhere, in its blocks too.
  if (machine->kind() != DeviceKind::emulated || HostScope::is_newest()) return nullptr;
  return std::make_unique<DeviceScope>(machine->ledger(Tier::device));
}

GatedBlock& Engine::Impl::gated_block(const torch::nn::Module& block) {
  std::vector<const void*> identities = parameter_identities(block);
  const auto [found, fresh] = blocks.try_emplace(&block);
  GatedBlock& made = found->second;
  if (!fresh && made.identities == identities) return made;
  // Else one that is new, or that lies where another was: in place, since calls that wait for backward point to it.
  const std::int64_t index = fresh ? static_cast<std::int64_t>(blocks.size()) - 1 : made.index;
  made = GatedBlock();
  made.index = index;
  made.identities = std::move(identities);
  made.label = machine->trace().label("forward block");
  orders_inside.erase(&block);
  std::unordered_map<const void*, std::int64_t> index_of;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    index_of.emplace(plan.trainable[i].tensor.unsafeGetTensorImpl(), static_cast<std::int64_t>(i));
  }
  for (const torch::Tensor& tensor : block.parameters()) {
    made.elements += static_cast<double>(tensor.numel());
    const auto known = index_of.find(tensor.unsafeGetTensorImpl());
    if (known == index_of.end()) continue;
    made.parameters.push_back(known->second);
    for (const Segment& segment : plan.layout->parameter_segments(known->second)) made.chunks.push_back(segment.chunk);
  }
  std::sort(made.chunks.begin(), made.chunks.end());
  made.chunks.erase(std::unique(made.chunks.begin(), made.chunks.end()), made.chunks.end());
  return made;
}

std::int64_t Engine::rows_of(const torch::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0) return 0;
  return tensor.is_floating_point() && tensor.size(-1) > 0 ? tensor.numel() / tensor.size(-1) : tensor.numel();
}

std::int64_t Engine::enter_block(const torch::nn::Module& module, std::int64_t rows) {
  Impl& s = *impl_;
  if (!s.in_backward) s.check_thread();  // on a GPU, LibTorch computes a block again on a thread of its own
  const TorchDeviceScope device(s.config.device);
  GatedBlock& block = s.gated_block(module);
  for (std::int64_t chunk : block.chunks) s.runtime->wait_parameters(chunk);
  s.pace(0);  // the wait for uploads is no computation
  for (std::int64_t parameter : block.parameters) {
    const auto i = static_cast<std::size_t>(parameter);
    s.note_landed(i);
    if (!torch::GradMode::is_enabled()) continue;  // an evaluation says nothing of the next forward
    s.gated[i] = true;
    s.rows[i] = rows;
  }
  s.open_blocks.push_back({&block, Trace::now(), rows, s.count_memory()});
  return block.index;
}

void Engine::leave_block(std::int64_t index) noexcept {
  const OpenBlock open = std::move(impl_->open_blocks.back());
  impl_->open_blocks.pop_back();
  try {
    const TorchDeviceScope device(impl_->config.device);
    // Forward multiplies each row with each element once: two operations.
    impl_->pace(2.0 * open.block->elements * static_cast<double>(open.rows));
  } catch (...) {  // a device that fails here is reported by the next call that waits for it
  }
  impl_->machine->trace().span(impl_->forward_track, open.block->label, open.begin_ns, Trace::now(), 0, index);
}

}  // namespace spillway
