// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "benchmarks/team.h"
#include "kernels/cpu_kernels.h"

namespace spillway::bench {

/// What a pass over memory does for one element, in bytes.
struct Mix {
  int read = 0;      // from the source
  int written = 0;   // to the target
  int in_place = 0;  // of the target, read and written
  double bytes() const { return read + written + 2.0 * in_place; }
};

/// Two arrays of eight bytes an element that start at lines of the caches, as Spillway's own do; each thread's share is
/// touched by itself.
class Arrays {
 public:
  Arrays(std::int64_t count, Team& team) : count_(count), threads_(team.size()) {
    for (auto& array : arrays_) {
      const auto size = static_cast<std::size_t>(count + kApart) * sizeof(std::uint64_t);
      array.reset(static_cast<std::uint64_t*>(::operator new[](size, kLine)));
    }
    team.run([&](int thread) {
      for (auto& array : arrays_)
        std::fill(array.get() + begin(thread), array.get() + begin(thread + 1), 0x3c003c003c003c00u);
    });
  }
  std::int64_t begin(int thread) const { return count_ / kernels::kGrain * thread / threads_ * kernels::kGrain; }
  std::int64_t count(int thread) const { return begin(thread + 1) - begin(thread); }
  template <class T>
  T* source(int thread) {
    return reinterpret_cast<T*>(arrays_[0].get() + begin(thread));
  }
  /// At another offset of its page than the source.
  template <class T>
  T* target(int thread) {
    return reinterpret_cast<T*>(arrays_[1].get() + kApart + begin(thread));
  }

 private:
  static constexpr std::align_val_t kLine{64};
  static constexpr std::int64_t kApart = 72;  // elements: nine lines
  struct Free {
    void operator()(std::uint64_t* array) const { ::operator delete[](array, kLine); }
  };

  std::int64_t count_;
  int threads_;
  std::unique_ptr<std::uint64_t[], Free> arrays_[2];
};

/// Moves the bytes of `mix` and computes next to nothing, a few lines of each array at a time.
inline void move_bytes(const Mix& mix, const std::uint64_t* __restrict source, std::uint64_t* __restrict target,
                       std::int64_t count) {
  constexpr std::int64_t kTile = 256;
  const std::int64_t read = kTile * mix.read / 8, written = kTile * mix.written / 8,
                     in_place = kTile * mix.in_place / 8;
  std::uint64_t all = 1;
  for (std::int64_t tile = 0; tile < count / kTile; ++tile) {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < read; ++i) sum ^= source[i];
    for (std::int64_t i = 0; i < written; ++i) target[i] = all;
    for (std::int64_t i = 0; i < in_place; ++i) target[i] += 1;
    all ^= sum;
    source += read;
    target += std::max(written, in_place);
  }
  benchmark::DoNotOptimize(all);
}

inline double processor_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Processor time of the slowest thread: other programs disturb it less than they do the clock on the wall.
inline double seconds(Team& team, const std::function<void(int)>& work) {
  std::vector<double> times(static_cast<std::size_t>(team.size()));
  team.run([&](int thread) {
    const double start = processor_seconds();
    work(thread);
    times[static_cast<std::size_t>(thread)] = processor_seconds() - start;
  });
  return *std::max_element(times.begin(), times.end());
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

using Work = std::function<void(const kernels::CpuKernels& set, Arrays& arrays, int thread)>;

/// Times `work` and the bare moves of the same bytes in turn. Counters: bytes for an element, GB/s of both, and
/// of_memory: time of the moves / time of the work, the median over rounds.
inline void run_against_memory(benchmark::State& state, const kernels::CpuKernels& set, const Mix& mix, int threads,
                               const Work& work) {
  constexpr std::int64_t kCount = 50'000'000;
  Team team(threads);
  Arrays arrays(kCount, team);
  const auto move = [&](int t) {
    move_bytes(mix, arrays.source<std::uint64_t>(t), arrays.target<std::uint64_t>(t), arrays.count(t));
  };
  seconds(team, move);
  std::vector<double> times, moves, ratios;
  for (auto _ : state) {
    times.push_back(seconds(team, [&](int t) { work(set, arrays, t); }));
    moves.push_back(seconds(team, move));
    state.SetIterationTime(times.back());
    ratios.push_back(moves.back() / times.back());
  }
  state.counters["bytes"] = mix.bytes();
  state.counters["GB_per_s"] = mix.bytes() * kCount / median(times) * 1e-9;
  state.counters["memory_GB_per_s"] = mix.bytes() * kCount / median(moves) * 1e-9;
  state.counters["of_memory"] = median(ratios);
}

/// Registers `work` for every instruction set of this processor and one and two threads.
inline void add_against_memory(const std::string& name, const Mix& mix, const Work& work) {
  for (std::string_view set : kernels::cpu_kernel_names()) {
    for (int threads : {1, 2}) {
      const std::string title = name + "/" + std::string(set) + "/threads:" + std::to_string(threads);
      const auto body = [set = kernels::cpu_kernels(set), mix, threads, work](benchmark::State& state) {
        run_against_memory(state, *set, mix, threads, work);
      };
      benchmark::RegisterBenchmark(title.c_str(), body)->UseManualTime()->Unit(benchmark::kMillisecond);
    }
  }
}

inline int run_all(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace spillway::bench
