// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "spillway/core/units.h"
#include "spillway/lane/op_graph.h"
#include "spillway/runtime/machine.h"
#include "spillway/runtime/oracle.h"

namespace spillway {

/// What a virtual machine is made from.
struct VirtualMachineOptions {
  std::optional<Bytes> device_memory = std::nullopt;  // none: no limit
  std::optional<Bytes> host_memory = std::nullopt;    // the most that the pinned tier may take
  OracleOptions oracle = {};
  bool network = false;  // whether there is a network lane, as with several ranks
};

/// A machine for planning: its lanes record ops and run nothing, its pools count bytes and hold none, its oracle makes
/// answers up. Views are null, waits return at once and are recorded.
class VirtualMachine : public Machine {
 public:
  /// All ops and waits so far.
  virtual const OpGraph& graph() const = 0;
  /// The same, to keep: nothing may be submitted or waited for after it.
  virtual OpGraph take_graph() = 0;
};

/// Throws: InvalidArgument as make_seeded_oracle, and for a device without memory.
std::unique_ptr<VirtualMachine> make_virtual_machine(VirtualMachineOptions options);

}  // namespace spillway
