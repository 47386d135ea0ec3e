// SPDX-License-Identifier: Apache-2.0
#include "models/dropout.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "spillway/core/error.h"

namespace spillway {

at::Generator& DropoutGenerator::on(torch::Device device) {
  if (device.is_meta()) device = torch::kCPU;  // nothing is drawn there
  if (generator_.defined() && generator_.device().type() == device.type() &&
      (device.is_cpu() || generator_.device() == device)) {
    return generator_;
  }
  if (device.is_cpu()) {
    generator_ = at::detail::createCPUGenerator(seed_);
  } else {
    // A clone of the device's default generator is of the right kind without naming a backend here.
    generator_ = at::globalContext().defaultGenerator(device).clone();
    generator_.set_current_seed(seed_);
  }
  return generator_;
}

torch::Tensor DropoutGenerator::apply(const torch::Tensor& x, double probability, bool training) {
  if (!training || probability <= 0) return x;
  const double kept = 1 - probability;
  torch::Tensor mask;
  {
    const torch::NoGradGuard no_grad;
    mask = at::empty_like(x).bernoulli_(kept, on(x.device()));
    if (kept > 0) mask.div_(kept);
  }
  return x * mask;
}

void DropoutGenerator::set_seed(std::uint64_t seed) {
  seed_ = seed;
  generator_ = {};
}

torch::Tensor DropoutGenerator::state(torch::Device device) {
  at::Generator& generator = on(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void DropoutGenerator::set_state(torch::Device device, const torch::Tensor& state) {
  const std::int64_t expected = this->state(device).numel();
  const bool fits =
      state.defined() && state.is_cpu() && state.scalar_type() == torch::kByte && state.numel() == expected;
  require(fits, "The dropout state to be set is not one of a generator on " + device.str() + " (" +
                    std::to_string(expected) +
                    " bytes in host memory): pass what dropout_state() of a model on the "
                    "same kind of device returned.");
  at::Generator& generator = on(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state.contiguous());
}

}  // namespace spillway
