// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "spillway/runtime/machine.h"
#include "support/thread_device.h"

namespace spillway::test {

/// The machine of a GPU, with a ThreadDevice in its place: the library's own code but for the calls of CUDA.
/// `delay` is called before each piece of work of a stream; may be empty.
std::unique_ptr<Machine> make_thread_machine(const MachineOptions& options, std::function<void()> delay);

}  // namespace spillway::test
