// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "spillway/lane/op_graph.h"
#include "spillway/runtime/virtual_machine.h"
#include "spillway/schedule/schedules.h"
#include "spillway/state/chunk_store.h"
#include "spillway/state/layout.h"
#include "spillway/state/model_config.h"

namespace spillway {

/// A layer block that goes through the gate in forward. Parameters are numbered as in the layout.
struct ForwardGate {
  std::vector<std::int64_t> parameters = {};  // whose chunks it waits for
  double elements = 0;                        // each row is multiplied with, trained or not
};

/// What a schedule sees of a model: the order of events in a micro-batch, declared or recorded from a run.
struct ModelEvents {
  std::vector<ForwardGate> gates = {};  // in the order of forward
  /// The parameters whose gradients become ready, in that order: one list a micro-batch of the run, from the first
  /// again where the run is longer. A parameter that is missing has no gradient then.
  std::vector<std::vector<std::int64_t>> gradients = {};
};

/// The events of the model that is built from `model`, all of it trained: gates embedding, layers, head; gradients in
/// the reverse of the order in which forward uses the parameters first.
ModelEvents declared_events(const ModelConfig& model);

struct RecordOptions {
  std::int64_t steps = 1;
  std::int64_t micro_batches = 1;  // of each step
  bool last_is_known = true;       // backward is told which micro-batch is the step's last
  /// Rows (tokens) of a micro-batch, from which its computation is counted; 0: none is recorded.
  double rows = 0;
  bool recompute = false;  // gates compute forward again in backward, all but the first, whose input needs no gradient
  StepRequest step = {};
  VirtualMachineOptions machine = {};
};

/// A run that did not happen.
struct RecordedRun {
  OpGraph graph;
  MemoryPlan memory;                    // what its pools held
  std::vector<StepDecision> decisions;  // one a step
};

/// Drives `schedule` on a virtual machine with the calls that an engine makes for the same events. Compute's share is
/// recorded as marks: "forward" and "recompute" by gate, "backward" by the gate of the parameter whose gradient it
/// brings.
/// Throws: OutOfMemory when the states pass the machine's capacities; InvalidArgument for events that do not fit the
/// layout, or less than one step or micro-batch.
RecordedRun record_run(const Layout& layout, const StateSpec& spec, const ScheduleEntry& schedule,
                       const ModelEvents& events, const RecordOptions& options);

}  // namespace spillway
