// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "spillway/schedule/schedules.h"

namespace spillway::test {

/// A training run without LibTorch: made-up gradients through a schedule, on any machine.
struct Case {
  std::string schedule = "zero_offload";
  std::int64_t chunk_elements = 2048;
  std::int64_t slots = 2;
  int threads = 1;
  std::int64_t steps = 4, micro_batches = 2;
  double clip_norm = 1.0;
  DType working = DType::f32;
  bool low_memory = false;  // gradients summed in the working type
  unsigned order_seed = 0;  // of the order in which gradients become ready
  bool uneven = false;      // some parameters have no gradient in some micro-batches
  std::int64_t infinite_step = -1;
  Partition partition = {};
  std::int64_t bucket = 1;
  bool reduce_last = false;              // ranks add their gradients in the last micro-batch only
  bool last_known = true;                // schedules are told which micro-batch is the last
  Communicator* communicator = nullptr;  // where there are several ranks
  OpDelay delay = {};
  std::function<std::unique_ptr<Machine>(const MachineOptions&)> machine = make_emulated_machine;
};

struct Outcome {
  std::vector<float> masters, first, second;
  std::vector<std::byte> working;
  std::vector<double> norms;
  std::vector<bool> finite;
  std::vector<std::int64_t> updates;
  std::vector<std::string> culprits;  // of the last step that was not finite
};

/// One run. Forward is imitated by waiting for each chunk and reading its working parameters, which a race with an
/// upload would show; gradients are written and overwritten in the order of compute, as a framework does.
class TrainingRun {
 public:
  explicit TrainingRun(const Case& c);
  Outcome train();
  Machine& machine() { return *machine_; }
  const ChunkStore& store() const { return runtime_.store(); }
  const Layout& layout() const { return layout_; }

 private:
  StateSpec spec() const;
  double forward();
  void backward(std::int64_t step, std::int64_t micro_batch);
  /// Whether a parameter has a gradient in a micro-batch on a rank.
  bool gives(std::int64_t parameter, std::int64_t step, std::int64_t micro_batch, int rank) const;
  /// What of `order` has a gradient on any rank; where the last micro-batch reduces, then what had one before.
  std::vector<std::int64_t> given(const std::vector<std::int64_t>& order, std::int64_t step,
                                  std::int64_t micro_batch) const;
  void give_gradient(std::int64_t parameter, const std::vector<float>& values);
  void read_back();
  /// Gives compute a copy from a host buffer that lives as long as the run.
  void write_in_order(std::byte* to, std::vector<std::byte> bytes);

  const Case case_;
  const ScheduleEntry& entry_;
  std::unique_ptr<Machine> machine_;
  Layout layout_;
  std::unique_ptr<Pool> gradient_pool_;
  View gradient_;  // what LibTorch would hand over: one place for all, used again at once
  std::deque<std::vector<std::byte>> in_flight_;
  Runtime runtime_;
  std::unique_ptr<Schedule> schedule_;
  Outcome out_;
};

/// The outcomes of all ranks, which are threads here; each the whole states, put together from all ranks.
std::vector<Outcome> train_ranks(const Case& c);

/// Norms only where the step was finite.
void expect_same(const Outcome& expected, const Outcome& actual);

/// The same case on the emulated device, resident, in one chunk, by one thread, without delays.
Outcome reference(Case c);

std::vector<std::string> schedule_names();

}  // namespace spillway::test
