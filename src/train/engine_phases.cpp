// SPDX-License-Identifier: Apache-2.0
//
// Between phases: the profiling step, release and restore of all memory.
#include <fmt/format.h>

#include <cstring>
#include <new>
#include <utility>

#include "spillway/core/error.h"
#include "train/engine_impl.h"
#include "train/random_numbers.h"

namespace spillway {

// ---- the profiling step --------------------------------------------------------------------------------------------

namespace {

// What a forward may change beside its activations, as it is now: set back at the end.
class ForwardState {
 public:
  ForwardState(const std::vector<std::shared_ptr<CausalLM>>& models, const std::vector<torch::Tensor>& buffers,
               torch::Device device)
      : random_(models, device) {
    const HostScope host;
    for (const torch::Tensor& buffer : buffers) {
      if (buffer.defined()) kept_.push_back({buffer, copy_of(buffer)});
    }
  }
  ~ForwardState() {
    const HostScope host;
    const torch::NoGradGuard no_grad;
    try {
      random_.set();
      for (Kept& kept : kept_) {
        // Running statistics are written without a trace in the version counter.
        if (!torch::equal(copy_of(kept.buffer), kept.values)) kept.buffer.copy_(kept.values);
      }
    } catch (const std::exception&) {  // a device that fails here has failed before, where it was reported
    }
  }
  ForwardState(const ForwardState&) = delete;
  ForwardState& operator=(const ForwardState&) = delete;

 private:
  struct Kept {
    torch::Tensor buffer, values;
  };
  static torch::Tensor copy_of(const torch::Tensor& buffer) {
    return buffer.detach().to(torch::kCPU, buffer.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  const RandomNumbers random_;
  std::vector<Kept> kept_;
};

}  // namespace

MemoryPlan Engine::profile(const std::function<torch::Tensor()>& loss) {
  Impl& s = *impl_;
  s.check_usable();
  s.check_between_steps("profile()");
  MemoryLedger& ledger = *s.machine->ledger(Tier::device);
  const TorchDeviceScope device(s.config.device);
  {
    const ForwardState forward_state(s.causal_lms, s.buffers, torch_device(s.config.device));
    const std::unique_ptr<DeviceScope> memory = s.count_memory();
    const std::vector<bool> gated = s.gated;  // the next training forward may go another way
    const MemoryLedger::Unlimited unlimited(ledger);
    lift_torch_cap(s.config.device);
    ledger.reset_peak();
    reset_torch_memory_peak(s.config.device);
    s.profiling = true;
    try {
      s.together([&] {
        const torch::Tensor value = loss();
        if (s.ranks != nullptr) static_cast<void>(s.agree_micro_batch(1, false, s.order_of_gradients(value)));
        s.run_backward(value, s.scaler.scale(), false);
      });
    } catch (...) {
      s.profiling = false;
      s.gated = gated;
      cap_torch_memory(s.config.device, ledger);
      throw;
    }
    s.profiling = false;
    s.gated = gated;
    cap_torch_memory(s.config.device, ledger);
    s.runtime->wait_discard_gradients();  // with several ranks: zeros
  }
  s.plan.memory[Tier::device][MemoryUse::activations] =
      ledger.usage_at_peak()[MemoryUse::activations] + torch_memory_peak(s.config.device);
  ledger.reset_peak();  // what was measured beyond the limit is no part of the run
  s.together([&] {
    check_fits(s.plan, s.config);
    if (s.ranks != nullptr) s.ranks->barrier({"profile"});
  });
  return s.plan.memory;
}

// ---- release and restore -------------------------------------------------------------------------------------------

ReleasedStates::ReleasedStates(const std::optional<std::filesystem::path>& file) : file_(file) {
  if (!file_) return;
  require(!std::filesystem::exists(*file_),
          fmt::format("release to {}: there is something of that name already", file_->string()));
  stream_.open(*file_, std::ios::binary | std::ios::in | std::ios::out | std::ios::trunc);
  if (!stream_) throw FileError(fmt::format("cannot make {} to put the released states in", file_->string()));
}

ReleasedStates::~ReleasedStates() {
  if (!file_ || !stream_.is_open()) return;
  stream_.close();
  std::error_code ignored;
  std::filesystem::remove(*file_, ignored);
}

void ReleasedStates::save(const void* data, std::size_t bytes) {
  if (!file_) {
    try {
      pieces_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
    } catch (const std::bad_alloc&) {
      const auto missing = static_cast<std::int64_t>(bytes);
      throw OutOfMemory(fmt::format("no host memory is left to keep released states in ({} bytes were asked for): "
                                    "release to a file instead",
                                    bytes),
                        missing, missing);
    }
    std::memcpy(pieces_.back().get(), data, bytes);
    return;
  }
  stream_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  if (!stream_) throw FileError(fmt::format("cannot write to {}: is the disk full?", file_->string()));
}

void ReleasedStates::rewind() {
  next_ = 0;
  if (!file_) return;
  stream_.flush();
  if (!stream_) throw FileError(fmt::format("cannot write to {}: is the disk full?", file_->string()));
  stream_.seekg(0);
}

void ReleasedStates::load(void* data, std::size_t bytes) {
  if (!file_) {
    std::memcpy(data, pieces_.at(next_++).get(), bytes);
    return;
  }
  stream_.read(static_cast<char*>(data), static_cast<std::streamsize>(bytes));
  if (stream_) return;
  stream_.clear();  // so that another attempt may read it
  throw FileError(fmt::format("cannot read the released states back from {}", file_->string()));
}

void Engine::release(const std::optional<std::filesystem::path>& file) {
  Impl& s = *impl_;
  s.check_thread();
  if (s.released) return;
  s.check_usable();
  s.check_between_steps("release()");
  const TorchDeviceScope device(s.config.device);
  s.check_parameters();
  auto states = std::make_unique<ReleasedStates>(file);
  s.wait_landed();
  s.runtime->release([&](const void* data, std::size_t bytes) { states->save(data, bytes); },
                     [&] {
                       states->rewind();
                       try {
                         s.move_out();
                       } catch (...) {
                         s.move_working_values();
                         throw;
                       }
                     });
  s.released = std::move(states);
  for (const auto& model : s.causal_lms) {
    model->set_block_call({});
    model->forget_tables();
  }
  lift_torch_cap(s.config.device);  // what comes next may use all of the device
}

void Engine::restore() {
  Impl& s = *impl_;
  s.check_thread();
  if (!s.released) return;
  const TorchDeviceScope device(s.config.device);
  if (s.runtime->released()) {  // else an earlier restore() came this far
    empty_torch_cache(s.config.device);
    s.released->rewind();
    s.runtime->restore([&](void* data, std::size_t bytes) { s.released->load(data, bytes); });
  }
  s.move_working_values();
  cap_torch_memory(s.config.device, *s.machine->ledger(Tier::device));
  s.released.reset();
  for (const auto& model : s.causal_lms) model->set_block_call(block_call(), /*newer_weights=*/true);
}

}  // namespace spillway
