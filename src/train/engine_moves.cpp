// SPDX-License-Identifier: Apache-2.0
//
// The module's parameters on their way into the pools and out of them.
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "spillway/core/error.h"
#include "train/engine_impl.h"

namespace spillway {

void Engine::Impl::give_back() noexcept {
  for (auto* list : {&plan.trainable, &plan.frozen}) {
    for (ModelParameter& parameter : *list) torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
  }
  try {
    lift_torch_cap(config.device);  // the module's next user may take all of the device
    move_out();
  } catch (const std::exception& error) {
    log(options.log, LogLevel::error,
        fmt::format("no memory to give the module's parameters back in: some of its values are lost ({})",
                    error.what()));
  }
}

void Engine::Impl::move_out() {
  if (runtime->released()) return;
  const auto inside = [](const View& pool, const void* data) {
    return data >= pool.data && data < pool.data + pool.size.value;
  };
  for (auto* list : {&plan.trainable, &plan.frozen}) {
    for (ModelParameter& parameter : *list) {
      const void* data = parameter.tensor.const_data_ptr();
      const bool ours = inside(runtime->store().working(), data) || inside(runtime->store().frozen(), data);
      if (!ours && parameter.tensor.is_cpu()) continue;
      move_to_ordinary_memory(parameter.tensor);
    }
  }
  move_buffers(buffers, torch::kCPU);
}

View Engine::Impl::working_place(std::size_t i) const {
  const std::int64_t size = size_of(config.precision);
  return runtime->store().working().slice({plan.layout->offset(static_cast<std::int64_t>(i)) * size},
                                          {plan.trainable[i].tensor.numel() * size});
}

torch::Tensor Engine::Impl::move_in(ModelParameter& parameter, const View& place) {
  const torch::Tensor given = options.weights ? options.weights(parameter.name) : torch::Tensor();
  if (!given.defined()) {
    own_storage(parameter.tensor);
    torch::Tensor exact = convert_parameter(parameter.tensor, config.precision);
    move_to(parameter.tensor, place, torch_device(config.device));
    return exact;
  }
  check_value(parameter.name, parameter.tensor, given);
  // The module's own memory goes unread: where nothing was written to it, the system never gave it.
  forget_values(parameter.tensor, config.precision);
  move_to(parameter.tensor, place, torch_device(config.device), /*keep_values=*/false);
  return given.detach().to(torch::kCPU, torch::kFloat).contiguous();
}

void Engine::Impl::move_parameters() {
  const HostScope host;  // what is converted here is not the device's affair, nor that of another engine's device
  const torch::NoGradGuard no_grad;
  move_buffers(buffers, torch_device(config.device));
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    const torch::Tensor exact = move_in(plan.trainable[i], working_place(i));
    note_checksum(plan.trainable[i], exact);
    if (exact.defined()) {
      runtime->write({StateRole::Kind::master}, static_cast<std::int64_t>(i), exact.const_data_ptr<float>());
    } else {
      runtime->load_masters(static_cast<std::int64_t>(i));
    }
  }
  for_frozen_places([this](ModelParameter& parameter, const View& place) {
    const torch::Tensor exact = move_in(parameter, place);
    note_checksum(parameter, exact);
    if (options.weights && exact.defined()) parameter.tensor.detach().copy_(exact);
  });
}

template <class Visit>
void Engine::Impl::for_frozen_places(const Visit& visit) {
  const std::int64_t size = size_of(config.precision);
  std::int64_t offset = 0;
  for (ModelParameter& parameter : plan.frozen) {
    const std::int64_t count = parameter.tensor.numel();
    visit(parameter, runtime->store().frozen().slice({offset * size}, {count * size}));
    offset += (count + kGrainElements - 1) / kGrainElements * kGrainElements;
  }
}

void Engine::Impl::move_working_values() {
  const torch::Device device = torch_device(config.device);
  move_buffers(buffers, device);
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) move_to(plan.trainable[i].tensor, working_place(i), device);
  for_frozen_places([&](ModelParameter& parameter, const View& place) { move_to(parameter.tensor, place, device); });
}

}  // namespace spillway
