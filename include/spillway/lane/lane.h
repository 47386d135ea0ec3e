// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/core/trace.h"
#include "spillway/core/units.h"
#include "spillway/device/device.h"
#include "spillway/lane/ticket.h"

namespace spillway {

/// What an op consumes: with its amount, all that the cost model needs to know of it.
enum class OpKind : unsigned char {
  compute,     // amount: floating-point operations
  copy,        // amount: bytes
  optimizer,   // amount: elements updated
  elementwise  // amount: bytes read and written (casts, accumulation, norms)
};
std::string_view to_string(OpKind kind);

/// What a lane runs.
struct Op {
  const char* name = "";    // a literal: shown in traces
  std::int64_t index = -1;  // the chunk or block it concerns; below zero: none
  OpKind kind = OpKind::compute;
  double amount = 0;
  std::vector<Ticket> after;            // the op starts when these are done
  std::function<void(StreamRef)> body;  // real lanes only; the stream is empty except on CUDA lanes
};

/// Called around every op with the lane's and the op's name; sleeping in it stretches the op. For tests of races.
using OpDelay = std::function<void(const std::string& lane, const Op& op)>;

/// An ordered asynchronous queue over one resource. Ops start in the order in which they were submitted, each after its
/// tickets. The destructor runs what was submitted, then ends.
/// Threads: submit from one thread at a time.
class Lane {
 public:
  explicit Lane(std::string name) : name_(std::move(name)) {}
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const std::string& name() const { return name_; }
  [[nodiscard]] virtual Ticket submit(Op op) = 0;

 private:
  const std::string name_;
};

/// The lane of forward, backward and device kernels: ordered with what the calling thread gives LibTorch to do.
class ComputeLane : public Lane {
 public:
  using Lane::Lane;

  /// Everything submitted or given to LibTorch after this call runs after `ticket`.
  /// Blocks: on the emulated device until the ticket is done; on CUDA until its copy has been issued.
  /// Throws: the error of the ticket's op.
  virtual void wait(const Ticket& ticket) = 0;

  /// A ticket for all compute given so far, of about `flops` operations since the last mark. On the emulated device
  /// with a modelled compute rate, Blocks: until that work would have taken its time there.
  [[nodiscard]] virtual Ticket mark(const char* name, std::int64_t index, double flops) = 0;
};

/// The modelled time of a copy: latency + bytes / bandwidth. Bandwidth in bytes a second; zero: as fast as memory.
struct LinkModel {
  double bandwidth = 0;
  Seconds latency;
};

/// What every lane of a machine is given. `trace` must outlive the lane.
struct LaneContext {
  Trace* trace = nullptr;
  OpDelay delay;  // may be empty
  /// Called on the lane's thread with the error of an op that failed, its own or one that it waited for. May be empty.
  std::function<void(const std::exception_ptr&)> failed = {};
};

/// A lane with a thread of its own. After an op's body it sleeps until the modelled link would have carried the op's
/// bytes, so that copies overlap with compute as they would on a device, without using a core.
/// Throws: Error where the system does not start the thread.
std::unique_ptr<Lane> make_thread_lane(std::string name, LinkModel link, LaneContext context);

/// The compute lane of the emulated device: ops run at once on the submitting thread, in LibTorch's order.
/// `flops_rate`: operations a second that mark() paces to; zero: no pacing.
std::unique_ptr<ComputeLane> make_inline_compute_lane(double flops_rate, LaneContext context);

}  // namespace spillway
