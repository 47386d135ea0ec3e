// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/scalars.h"
#include "spillway/core/units.h"
#include "spillway/device/device.h"

namespace spillway {

/// What op bodies do with model states, wherever these are: the calls of kernels/cpu_kernels.h, given to the op's
/// stream. With an empty stream they are done on return.
/// Threads: safe; pieces of one array may be given from several threads at once, cut at grains.
class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  /// Between any two of device, pinned and ordinary host memory.
  virtual void copy(StreamRef stream, void* to, const void* from, Bytes bytes) const = 0;
  virtual void zero(StreamRef stream, void* to, Bytes bytes) const = 0;

  virtual void widen(StreamRef stream, float* target, const void* source, kernels::Element type,
                     std::int64_t count) const = 0;
  /// The sum is kept in fp32, or rounded to 16 bits after each addition.
  virtual void accumulate(StreamRef stream, void* sum, kernels::Element sum_type, const void* source,
                          kernels::Element type, std::int64_t count) const = 0;
  virtual void narrow(StreamRef stream, void* target, kernels::Element type, const float* source,
                      std::int64_t count) const = 0;
  virtual void grain_square_sums(StreamRef stream, double* sums, const void* values, kernels::Element type,
                                 std::int64_t count) const = 0;

  virtual void adam(StreamRef stream, const kernels::AdamScalars& scalars, float* p, float* m, float* v, const void* g,
                    kernels::Element g_type, void* copy, kernels::Element copy_type, std::int64_t count) const = 0;
  virtual void sgd(StreamRef stream, const kernels::SgdScalars& scalars, float* p, float* b, const void* g,
                   kernels::Element g_type, void* copy, kernels::Element copy_type, std::int64_t count) const = 0;
  virtual void adagrad(StreamRef stream, const kernels::AdagradScalars& scalars, float* p, float* h, const void* g,
                       kernels::Element g_type, void* copy, kernels::Element copy_type, std::int64_t count) const = 0;
  virtual void lion(StreamRef stream, const kernels::LionScalars& scalars, float* p, float* m, const void* g,
                    kernels::Element g_type, void* copy, kernels::Element copy_type, std::int64_t count) const = 0;
};

/// The processor's kernels, on host addresses, done on return: the work of the cpu lane and of the emulated device.
const DeviceWork& cpu_work();
/// The same with the kernels of one instruction set; of the fastest where `name` is empty. Throws: InvalidArgument
/// where this build or this processor has no such set.
const DeviceWork& cpu_work(const std::string& name);

}  // namespace spillway
