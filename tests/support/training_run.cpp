// SPDX-License-Identifier: Apache-2.0
#include "support/training_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <random>
#include <thread>
#include <type_traits>
#include <utility>

#include "runtime/device_work.h"
#include "runtime/runtime_impl.h"
#include "spillway/comm/transports.h"

namespace spillway::test {
namespace {

std::vector<ParameterInfo> parameters() {
  return {{"a", {3}, 0},    {"b", {70, 33}, 1}, {"c", {}, 0},    {"d", {2048}, 1},
          {"e", {4100}, 1}, {"f", {1}, 0},      {"g", {1500}, 1}};
}
constexpr std::int64_t kLargest = 4100;

MachineOptions options(const Case& c) {
  MachineOptions out;
  out.device.kind = DeviceConfig::Kind::emulated;
  out.threads = c.threads;
  out.delay = c.delay;
  out.communicator = c.communicator;
  return out;
}

std::vector<std::byte> rounded(const std::vector<float>& values, DType type) {
  std::vector<std::byte> out(values.size() * static_cast<std::size_t>(size_of(type)));
  cpu_work().narrow({}, out.data(), element_of(type), values.data(), static_cast<std::int64_t>(values.size()));
  return out;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

TrainingRun::TrainingRun(const Case& c)
    : case_(c),
      entry_(find_schedule(c.schedule)),
      machine_(c.machine(options(c))),
      layout_(parameters(), c.chunk_elements, c.partition),
      gradient_pool_(machine_->make_pool(Tier::device, Pool::padded({kLargest * 4}))),
      gradient_(gradient_pool_->allocate({kLargest * 4}, MemoryUse::activations)),
      runtime_(*machine_, layout_, spec(), OptimizerKind::adamw,
               {{1e-2, 0.9, 0.95, 1e-8, 0.0}, {1e-2, 0.9, 0.95, 1e-8, 0.1}}),
      schedule_(entry_.make(runtime_)) {
  std::vector<float> values(static_cast<std::size_t>(layout_.padded_elements()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i) * 0.1F);
  runtime_.wait_write(runtime_.store().working(), rounded(values, c.working).data());
  for (std::size_t p = 0; p < layout_.parameters().size(); ++p) runtime_.load_masters(static_cast<std::int64_t>(p));
}

StateSpec TrainingRun::spec() const {
  StateSpec out;
  out.working = case_.working;
  if (case_.low_memory) out.gradient = case_.working;
  out.placement.assign(layout_.chunks().size(), entry_.placement);
  out.pinned_slots = entry_.stages ? case_.slots : 0;
  out.device_slots = entry_.stages || case_.partition.shared() ? case_.slots : 0;
  out.reduce_slots = case_.partition.shared() ? case_.slots : 0;
  out.bucket_chunks = case_.bucket;
  if (case_.reduce_last && case_.partition.shared()) {
    out.reduce_last = true;
    out.device_slots = out.piece_slots = out.pinned_slots;
  }
  if (case_.working != DType::f32) out.upload_slots = out.pinned_slots;
  return out;
}

Outcome TrainingRun::train() {
  for (std::int64_t step = 0; step < case_.steps; ++step) {
    for (std::int64_t m = 0; m < case_.micro_batches; ++m) backward(step, m);
    runtime_.wait_agree_gradients();
    const StepDecision decision = schedule_->step({1.0 / static_cast<double>(case_.micro_batches), case_.clip_norm});
    if (!decision.finite) {
      out_.culprits = runtime_.describe_non_finite(9);
      runtime_.wait_discard_gradients();
    }
    out_.norms.push_back(decision.grad_norm);
    out_.finite.push_back(decision.finite);
  }
  runtime_.wait_all();
  read_back();
  return out_;
}

// What forward and backward would read: the sum of the chunk's working parameters goes into every gradient.
double TrainingRun::forward() {
  double sum = 0;
  const std::int64_t size = size_of(case_.working);
  for (std::int64_t c = 0; c < static_cast<std::int64_t>(layout_.chunks().size()); ++c) {
    runtime_.wait_parameters(c);
    const View& working = runtime_.store().working(c);
    std::vector<std::byte> bytes(static_cast<std::size_t>(working.size.value));
    runtime_.wait_read(bytes.data(), working);
    std::vector<float> values(bytes.size() / static_cast<std::size_t>(size));
    cpu_work().widen({}, values.data(), bytes.data(), element_of(case_.working),
                     static_cast<std::int64_t>(values.size()));
    for (const Segment& s : layout_.chunk_segments(c)) {  // not the padding between parameters: nobody reads that
      for (std::int64_t i = 0; i < s.count; ++i) sum += values[static_cast<std::size_t>(s.chunk_offset + i)];
    }
  }
  return sum;
}

bool TrainingRun::gives(std::int64_t parameter, std::int64_t step, std::int64_t micro_batch, int rank) const {
  return !case_.uneven || (parameter + step + micro_batch + rank) % 3 != 0;
}

std::vector<std::int64_t> TrainingRun::given(const std::vector<std::int64_t>& order, std::int64_t step,
                                             std::int64_t micro_batch) const {
  std::vector<std::int64_t> out;
  const bool all = case_.reduce_last && micro_batch + 1 == case_.micro_batches;
  for (std::int64_t m = micro_batch; m >= (all ? 0 : micro_batch); --m) {
    for (const std::int64_t p : order) {
      bool any = false;
      for (int rank = 0; rank < case_.partition.ranks; ++rank) any = any || gives(p, step, m, rank);
      if (any && std::find(out.begin(), out.end(), p) == out.end()) out.push_back(p);
    }
  }
  return out;
}

void TrainingRun::backward(std::int64_t step, std::int64_t micro_batch) {
  const double context = forward();
  in_flight_.clear();  // forward has waited for all compute before it
  std::vector<std::int64_t> order(layout_.parameters().size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(order.size() - 1 - i);
  std::mt19937 random(case_.order_seed + static_cast<unsigned>(step * 16 + micro_batch));
  if (case_.order_seed != 0) std::shuffle(order.begin(), order.end(), random);
  runtime_.set_gradient_order(given(order, step, micro_batch));
  schedule_->begin_backward(case_.last_known && micro_batch + 1 == case_.micro_batches);
  for (std::int64_t p : order) {
    const int rank = case_.partition.rank;
    if (!gives(p, step, micro_batch, rank)) continue;
    std::vector<float> gradient(static_cast<std::size_t>(layout_.parameters()[static_cast<std::size_t>(p)].numel()));
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = static_cast<float>(
          std::cos(static_cast<double>(i + 1) * (static_cast<double>(p) + 0.3) + context + rank) * 0.1);
    }
    if (step == case_.infinite_step && p == 4) gradient[4099] = std::numeric_limits<float>::infinity();
    give_gradient(p, gradient);
  }
  schedule_->end_backward();
}

void TrainingRun::give_gradient(std::int64_t parameter, const std::vector<float>& values) {
  write_in_order(gradient_.data, rounded(values, case_.working));
  schedule_->gradient_ready({parameter, gradient_.data});
  // The framework's memory may be used for something else at once.
  write_in_order(gradient_.data, rounded(std::vector<float>(values.size(), std::nanf("")), case_.working));
}

void TrainingRun::write_in_order(std::byte* to, std::vector<std::byte> bytes) {
  const std::vector<std::byte>& from = in_flight_.emplace_back(std::move(bytes));
  static_cast<void>(machine_->compute().submit(
      {"framework", -1, OpKind::compute, 0, {}, [this, to, &from](StreamRef stream) {
         machine_->device_work().copy(stream, to, from.data(), {static_cast<std::int64_t>(from.size())});
       }}));
}

void TrainingRun::read_back() {
  const std::int64_t size = size_of(case_.working);
  for (const Segment& s : layout_.segments()) {
    const auto at = out_.working.size();
    out_.working.resize(at + static_cast<std::size_t>(s.count * size));
    runtime_.wait_read(out_.working.data() + at,
                       runtime_.store().working(s.chunk).slice({s.chunk_offset * size}, {s.count * size}));
  }
  for (std::size_t p = 0; p < layout_.parameters().size(); ++p) {
    const auto append = [&](std::vector<float>& to, StateRole role) {
      const auto at = to.size();
      to.resize(at + static_cast<std::size_t>(layout_.parameters()[p].numel()));
      runtime_.read(role, static_cast<std::int64_t>(p), to.data() + at);
    };
    append(out_.masters, {StateRole::Kind::master});
    append(out_.first, {StateRole::Kind::optimizer_state, 0});
    append(out_.second, {StateRole::Kind::optimizer_state, 1});
    out_.updates.push_back(runtime_.updates(static_cast<std::int64_t>(p)));
  }
}

std::vector<Outcome> train_ranks(const Case& c) {
  const auto count = static_cast<std::size_t>(c.partition.ranks);
  auto ranks = make_thread_ranks(c.partition.ranks, {.timeout = {60}});
  std::vector<Outcome> outcomes(count);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < count; ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Communicator> mine = std::move(ranks[r]);
      try {
        Case own = c;
        own.partition.rank = static_cast<int>(r);
        own.communicator = mine.get();
        TrainingRun run(own);
        try {
          outcomes[r] = run.train();
        } catch (const std::exception& error) {
          mine->fail(error.what());  // before the run waits for what its lanes were given
          throw;
        }
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return outcomes;
}

void expect_same(const Outcome& expected, const Outcome& actual) {
  EXPECT_TRUE(same(expected.working, actual.working));
  EXPECT_TRUE(same(expected.masters, actual.masters));
  EXPECT_TRUE(same(expected.first, actual.first));
  EXPECT_TRUE(same(expected.second, actual.second));
  EXPECT_EQ(expected.finite, actual.finite);
  EXPECT_EQ(expected.updates, actual.updates);
  EXPECT_EQ(expected.culprits, actual.culprits);
  for (std::size_t i = 0; i < expected.norms.size(); ++i) {
    if (expected.finite[i]) {
      EXPECT_EQ(expected.norms[i], actual.norms[i]);
    }
  }
}

Outcome reference(Case c) {
  c.schedule = "resident";
  c.chunk_elements = 1 << 20;
  c.threads = 1;
  c.order_seed = 0;
  c.delay = {};
  c.machine = make_emulated_machine;
  return TrainingRun(c).train();
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleEntry& entry : schedules()) names.emplace_back(entry.name);
  return names;
}

}  // namespace spillway::test
