// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "kernels/cpu_kernels.h"
#include "kernels/denormal_mode.h"
#include "runtime/device_work.h"
#include "spillway/core/error.h"
#include "spillway/runtime/machine.h"

namespace spillway {
namespace {

using kernels::Element;
using kernels::KeepDenormals;

std::int64_t bytes_of(Element type) {
  return type == Element::f32 ? 4 : 2;
}
void* at_element(void* array, Element type, std::int64_t i) {
  return static_cast<std::byte*>(array) + i * bytes_of(type);
}
const void* at_element(const void* array, Element type, std::int64_t i) {
  return static_cast<const std::byte*>(array) + i * bytes_of(type);
}

// Calls body(a buffer, first element, how many) grain by grain.
template <class Body>
void for_tiles(std::int64_t count, const Body& body) {
  std::array<float, kernels::kGrain> wide;
  for (std::int64_t i = 0; i < count; i += kernels::kGrain) {
    body(wide.data(), i, std::min(kernels::kGrain, count - i));
  }
}

class CpuWork final : public DeviceWork {
 public:
  explicit CpuWork(const kernels::CpuKernels& kernels) : kernels_(kernels) {}

  void copy(StreamRef, void* to, const void* from, Bytes bytes) const override {
    if (bytes.value > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes.value));
  }
  void zero(StreamRef, void* to, Bytes bytes) const override {
    if (bytes.value > 0) std::memset(to, 0, static_cast<std::size_t>(bytes.value));
  }
  void widen(StreamRef, float* target, const void* source, Element type, std::int64_t count) const override {
    const KeepDenormals keep;
    kernels_.widen(target, source, type, count);
  }
  void accumulate(StreamRef, void* sum, Element sum_type, const void* source, Element type,
                  std::int64_t count) const override {
    const KeepDenormals keep;
    if (sum_type == Element::f32) return kernels_.accumulate(static_cast<float*>(sum), source, type, count);
    for_tiles(count, [&](float* wide, std::int64_t at, std::int64_t n) {
      kernels_.widen(wide, at_element(sum, sum_type, at), sum_type, n);
      kernels_.accumulate(wide, at_element(source, type, at), type, n);
      kernels_.narrow(at_element(sum, sum_type, at), sum_type, wide, n);
    });
  }
  void narrow(StreamRef, void* target, Element type, const float* source, std::int64_t count) const override {
    const KeepDenormals keep;
    kernels_.narrow(target, type, source, count);
  }
  void grain_square_sums(StreamRef, double* sums, const void* values, Element type, std::int64_t count) const override {
    const KeepDenormals keep;
    if (type == Element::f32) return kernels_.grain_square_sums(sums, static_cast<const float*>(values), count);
    for_tiles(count, [&](float* wide, std::int64_t at, std::int64_t n) {
      kernels_.widen(wide, at_element(values, type, at), type, n);
      kernels_.grain_square_sums(sums++, wide, n);
    });
  }
  void adam(StreamRef, const kernels::AdamScalars& scalars, float* p, float* m, float* v, const void* g, Element g_type,
            void* copy, Element copy_type, std::int64_t count) const override {
    const KeepDenormals keep;
    kernels_.adam(scalars, p, m, v, g, g_type, copy, copy_type, count);
  }
  void sgd(StreamRef, const kernels::SgdScalars& scalars, float* p, float* b, const void* g, Element g_type, void* copy,
           Element copy_type, std::int64_t count) const override {
    const KeepDenormals keep;
    kernels_.sgd(scalars, p, b, g, g_type, copy, copy_type, count);
  }
  void adagrad(StreamRef, const kernels::AdagradScalars& scalars, float* p, float* h, const void* g, Element g_type,
               void* copy, Element copy_type, std::int64_t count) const override {
    const KeepDenormals keep;
    kernels_.adagrad(scalars, p, h, g, g_type, copy, copy_type, count);
  }
  void lion(StreamRef, const kernels::LionScalars& scalars, float* p, float* m, const void* g, Element g_type,
            void* copy, Element copy_type, std::int64_t count) const override {
    const KeepDenormals keep;
    kernels_.lion(scalars, p, m, g, g_type, copy, copy_type, count);
  }

 private:
  const kernels::CpuKernels& kernels_;
};

}  // namespace

const DeviceWork& cpu_work() {
  static const CpuWork work(kernels::cpu_kernels());
  return work;
}

const DeviceWork& cpu_work(const std::string& name) {
  if (name.empty()) return cpu_work();
  static const auto works = [] {
    std::map<std::string, CpuWork> all;
    for (std::string_view set : kernels::cpu_kernel_names()) {
      all.emplace(std::string(set), CpuWork(*kernels::cpu_kernels(set)));
    }
    return all;
  }();
  const auto found = works.find(name);
  if (found != works.end()) return found->second;
  std::string names;
  for (const auto& [set, work] : works) names += (names.empty() ? "" : ", ") + set;
  throw InvalidArgument("instruction set \"" + name + "\" was asked for; this processor and build have: " + names);
}

const DeviceWork& Machine::device_work() const {
  return cpu_work();
}

const DeviceWork& Machine::host_work() const {
  return cpu_work();
}

}  // namespace spillway
