// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "spillway/device/event.h"
#include "spillway/lane/lane.h"

namespace spillway {

// Lanes over the streams of a device. An op's body gives work to the stream it is passed and returns; its ticket is
// issued with an event recorded behind that work. Spans in the trace are the times of issue on the host, not those of
// the device.

/// A lane that issues its ops from a thread of its own: an op waits on the host for tickets of ops on the host, and in
/// the stream for those of ops on streams. `events` must outlive the lane.
std::unique_ptr<Lane> make_stream_lane(std::string name, StreamRef stream, EventPool& events, LaneContext context);

/// A lane of host work beside a device with streams: as make_thread_lane, and its thread may wait for the device's
/// events. `device` must outlive the lane.
std::unique_ptr<Lane> make_host_lane(std::string name, StreamDevice& device, LaneContext context);

/// The stream that the calling thread's work goes to now. A framework's own; may change from call to call.
using CurrentStream = std::function<StreamRef()>;

/// The compute lane of such a device: ops are issued at once by the calling thread, on the stream that is current
/// there, in the framework's order. `events` must outlive the lane.
std::unique_ptr<ComputeLane> make_stream_compute_lane(CurrentStream current, EventPool& events, LaneContext context);

}  // namespace spillway
