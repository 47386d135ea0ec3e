// SPDX-License-Identifier: Apache-2.0
// Lanes over streams, on a device whose streams are threads.
#include "spillway/lane/stream_lane.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "support/thread_device.h"

namespace spillway {
namespace {

using test::ThreadDevice;

// Holds up the work of a stream until the test opens it.
class Gate {
 public:
  void open() { open_ = true; }
  void pass() const {
    while (!open_) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  std::atomic<bool> open_ = false;
};

struct StreamLanes : testing::Test {
  std::shared_ptr<ThreadDevice> device = std::make_shared<ThreadDevice>();
  EventPool events{device, 8};
  StreamRef up = device->make_stream(), down = device->make_stream(), main = device->make_stream();

  std::unique_ptr<Lane> lane(const char* name, StreamRef stream) { return make_stream_lane(name, stream, events, {}); }
  std::unique_ptr<ComputeLane> compute() {
    return make_stream_compute_lane([this] { return main; }, events, {});
  }
  /// An op that gives its stream `work`.
  Op op(std::function<void()> work, std::vector<Ticket> after = {}) {
    return {"op", 0, OpKind::copy, 0, std::move(after), [this, work = std::move(work)](StreamRef stream) {
              device->enqueue(stream, work);
            }};
  }
};

TEST_F(StreamLanes, ATicketIsIssuedBeforeItIsDone) {
  Gate gate;
  const auto a = lane("h2d", up);
  std::atomic<bool> ran = false;
  const Ticket ticket = a->submit(op([&] {
    gate.pass();
    ran = true;
  }));
  ticket.wait_in(down);  // returns although the device has not come past it
  EXPECT_FALSE(ticket.done());
  gate.open();
  ticket.wait();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(ticket.done());
}

TEST_F(StreamLanes, OpsOfStreamsWaitForEachOtherOnTheDevice) {
  const auto a = lane("h2d", up), b = lane("d2h", down);
  for (int round = 0; round < 200; ++round) {
    int value = 0;  // not atomic: events order the accesses, which the thread sanitizer checks
    const Ticket first = a->submit(op([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(round % 7 * 10));
      value = 1;
    }));
    const Ticket second = b->submit(op([&] { value = value == 1 ? 2 : -1; }, {first}));
    const Ticket third = a->submit(op([&] { value = value == 2 ? 3 : -1; }, {second}));
    third.wait();
    ASSERT_EQ(value, 3);
  }
}

TEST_F(StreamLanes, HostOpsAndStreamOpsWaitForEachOther) {
  const auto a = lane("h2d", up);
  const auto host = make_thread_lane("cpu", {}, {});
  for (int round = 0; round < 200; ++round) {
    int value = 0;
    const Ticket first = host->submit({"host", 0, OpKind::compute, 0, {}, [&](StreamRef stream) {
                                         EXPECT_EQ(stream, StreamRef());
                                         value = 1;
                                       }});
    const Ticket second = a->submit(op([&] { value = value == 1 ? 2 : -1; }, {first}));
    const Ticket third =
        host->submit({"host", 0, OpKind::compute, 0, {second}, [&](StreamRef) { value = value == 2 ? 3 : -1; }});
    third.wait();
    ASSERT_EQ(value, 3);
  }
}

TEST_F(StreamLanes, ComputeRunsOnTheCurrentStreamAndAWaitOnlyOrdersIt) {
  Gate gate;
  const auto a = lane("h2d", up);
  const auto c = compute();
  int value = 0;
  const Ticket upload = a->submit(op([&] {
    gate.pass();
    value = 5;
  }));
  c->wait(upload);  // returns before the upload is done
  int seen = 0;
  device->enqueue(main, [&] { seen = value; });  // what a framework would give its stream
  const Ticket mark = c->mark("here", 0, 0);
  EXPECT_FALSE(mark.done());
  const StreamRef other = device->make_stream();
  main = other;  // the framework changes streams
  StreamRef used;
  const Ticket moved = c->submit({"op", 0, OpKind::compute, 0, {mark}, [&](StreamRef stream) { used = stream; }});
  gate.open();
  moved.wait();
  EXPECT_EQ(used, other);
  EXPECT_EQ(seen, 5);
}

TEST_F(StreamLanes, AnOpWhoseIssueFailsFailsItsDependents) {
  const auto a = lane("h2d", up);
  const auto c = compute();
  std::atomic<bool> ran = false;
  const Ticket failed =
      a->submit({"op", 0, OpKind::copy, 0, {}, [](StreamRef) { throw std::runtime_error("refused"); }});
  const Ticket dependent = c->submit(op([&] { ran = true; }, {failed}));
  EXPECT_THROW(dependent.wait(), std::runtime_error);
  EXPECT_THROW(c->wait(failed), std::runtime_error);
  EXPECT_TRUE(failed.done());
  EXPECT_FALSE(ran);
  a->submit(op([&] { ran = true; })).wait();  // nobody else is
  EXPECT_TRUE(ran);
}

TEST_F(StreamLanes, WhatGoesWrongOnTheDeviceReachesWhoeverWaits) {
  const auto a = lane("h2d", up);
  const auto host = make_thread_lane("cpu", {}, {});
  Gate gate;
  const Ticket issued = a->submit(op([&] {
    gate.pass();
    throw DeviceError("an illegal address");
  }));
  issued.wait_in(down);  // was issued without a fault
  std::atomic<bool> ran = false;
  const Ticket dependent = host->submit({"host", 0, OpKind::compute, 0, {issued}, [&](StreamRef) { ran = true; }});
  gate.open();
  EXPECT_THROW(issued.wait(), DeviceError);
  EXPECT_THROW(dependent.wait(), DeviceError);
  EXPECT_FALSE(ran);
  EXPECT_THROW(a->submit(op([] {})).wait(), DeviceError);  // a device does not recover
}

TEST_F(StreamLanes, AnEventGoesBackWhenTheLastCopyOfItsTicketDies) {
  const auto a = lane("h2d", up);
  EXPECT_EQ(events.idle(), 8);
  Ticket ticket = a->submit(op([] {}));
  ticket.wait();
  EXPECT_EQ(events.idle(), 7);  // done, but somebody may still wait
  Ticket copy = ticket;
  ticket = {};
  EXPECT_EQ(events.idle(), 7);
  const Ticket last = a->submit(op([] {}, {std::move(copy)}));  // the op holds the only copy
  copy = {};
  last.wait();
  while (events.idle() != 7) std::this_thread::yield();  // the lane lets go of the op right after issuing it
  EXPECT_EQ(events.made(), 8);
}

TEST_F(StreamLanes, StepsMakeNoEventsOnceThePoolIsLargeEnough) {
  const auto a = lane("h2d", up), b = lane("d2h", down);
  const auto c = compute();
  for (int step = 0; step < 50; ++step) {
    Ticket last;
    for (int i = 0; i < 10; ++i) {
      last = a->submit(op([] {}, {c->mark("here", i, 0), last}));
      last = b->submit(op([] {}, {last}));
      c->wait(last);
    }
    last.wait();
  }
  EXPECT_LE(events.made(), 48);  // those of one step at most, not of fifty
  EXPECT_EQ(device->events_alive(), events.made());
  EXPECT_EQ(device->threads_entered(), 2);
}

TEST_F(StreamLanes, TicketsMayOutliveTheirLaneAndPool) {
  Ticket ticket;
  {
    EventPool other(device, 1);
    const auto a = make_stream_lane("h2d", up, other, {});
    ticket = a->submit(op([] {}));
  }
  ticket.wait();
  EXPECT_EQ(device->events_alive(), 9);
  ticket = {};
  EXPECT_EQ(device->events_alive(), 8);
}

TEST_F(StreamLanes, DelaysChangeNoOrder) {
  std::mt19937 random(1);
  std::mutex mutex;
  device->set_delay([&] {
    unsigned draw = 0;
    {
      const std::scoped_lock lock(mutex);
      draw = random();
    }
    if (draw % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 4 % 50));
  });
  const auto a = lane("h2d", up), b = lane("d2h", down);
  const auto c = compute();
  std::vector<int> buffer(3), sums;
  std::vector<Ticket> freed(3);
  for (int i = 0; i < 300; ++i) {
    const auto slot = static_cast<std::size_t>(i % 3);
    const Ticket filled = c->submit(op([&buffer, slot, i] { buffer[slot] = i; }, {freed[slot]}));
    freed[slot] = b->submit(op([&, slot] { sums.push_back(buffer[slot]); }, {filled}));
    static_cast<void>(a->submit(op([] {}, {freed[slot]})));
  }
  for (const Ticket& ticket : freed) ticket.wait();
  for (int i = 0; i < 300; ++i) ASSERT_EQ(sums.at(static_cast<std::size_t>(i)), i);
  device->set_delay({});
}

}  // namespace
}  // namespace spillway
