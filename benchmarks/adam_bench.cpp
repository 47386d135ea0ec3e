// SPDX-License-Identifier: Apache-2.0
// How close the optimizer kernels come to the speed of memory: each update is timed in turn with a loop that moves the
// same bytes and computes next to nothing, so that the ratio of the two does not drift with the machine.
//
// Counters: bytes moved for a parameter, GB/s, and of_memory: time of the bare traffic / time of the update, the median
// over rounds. The cases named alike show what it can cost when arrays start at the same offset of their pages:
// of_staggered is the time with arrays that start at different offsets / the time with these.

#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/team.h"
#include "kernels/cpu_kernels.h"

namespace {

using namespace spillway::kernels;
using spillway::bench::Team;

std::int64_t bytes_of(Element type) {
  return type == Element::none ? 0 : type == Element::f32 ? 4 : 2;
}

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

/// Five arrays at equal distances in memory of huge pages, where the system has them.
class Arena {
 public:
  explicit Arena(std::int64_t distance) : distance_(distance), size_((6 * distance / kHugePage + 1) * kHugePage) {
    memory_.reset(static_cast<char*>(std::aligned_alloc(kHugePage, static_cast<std::size_t>(size_))));
    if (!memory_) throw std::bad_alloc();
    madvise(memory_.get(), static_cast<std::size_t>(size_), MADV_HUGEPAGE);
  }
  template <class T>
  T* array(int index) {
    return reinterpret_cast<T*>(memory_.get() + index * distance_);
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::int64_t distance_, size_;
  std::unique_ptr<char, Free> memory_;
};

/// Reads and writes p, m and v, reads g and writes the copy (words of 8 bytes), tile by tile as an update does.
void traffic(float* __restrict p, float* __restrict m, float* __restrict v, const std::uint64_t* __restrict g,
             std::int64_t g_words, std::uint64_t* __restrict copy, std::int64_t copy_words, std::int64_t count) {
  constexpr std::int64_t kTile = 256;
  for (std::int64_t tile = 0; tile < count / kTile; ++tile) {
    for (std::int64_t i = tile * kTile; i < (tile + 1) * kTile; ++i) {
      p[i] += 1;
      m[i] += 1;
      v[i] += 1;
    }
    std::uint64_t all = 0;
    for (std::int64_t i = tile * g_words; i < (tile + 1) * g_words; ++i) all ^= g[i];
    benchmark::DoNotOptimize(all);
    for (std::int64_t i = tile * copy_words; i < (tile + 1) * copy_words; ++i) copy[i] = all;
  }
}

struct Case {
  const CpuKernels* set;
  Element g_type, copy_type;
  std::int64_t count;
  int threads;
};

/// The arrays of one case, each thread with its share of grains.
class Arrays {
 public:
  Arrays(const Case& c, std::int64_t distance, Team& team) : arena_(distance), case_(c) {
    team.run([&](int thread) { touch(thread); });
  }

  void update(int thread) {
    static const AdamScalars scalars = adam_scalars(1e-4, 0.9, 0.999, 1e-8, 0.01, true, 100, 0.5f);
    const std::int64_t i = begin(thread);
    case_.set->adam(scalars, wide(0) + i, wide(1) + i, wide(2) + i, g() + i * bytes_of(case_.g_type), case_.g_type,
                    copy() + i * bytes_of(case_.copy_type), case_.copy_type, begin(thread + 1) - i);
  }

  /// Reads and writes what an update does.
  void move(int thread) {
    const std::int64_t i = begin(thread), g_bytes = bytes_of(case_.g_type), copy_bytes = bytes_of(case_.copy_type);
    traffic(wide(0) + i, wide(1) + i, wide(2) + i, reinterpret_cast<std::uint64_t*>(g() + i * g_bytes), g_bytes * 32,
            reinterpret_cast<std::uint64_t*>(copy() + i * copy_bytes), copy_bytes * 32, begin(thread + 1) - i);
  }

 private:
  std::int64_t begin(int thread) const { return case_.count / kGrain * thread / case_.threads * kGrain; }
  float* wide(int index) { return arena_.array<float>(index); }
  char* g() { return arena_.array<char>(3); }
  char* copy() { return arena_.array<char>(4); }

  void touch(int thread) {
    std::vector<float> noise(kGrain);
    std::uint32_t state = 1;
    for (std::int64_t i = begin(thread); i < begin(thread + 1); i += kGrain) {
      for (float& value : noise) {
        state = state * 1664525u + 1013904223u;
        value = static_cast<float>(state >> 8) * 0x1p-24f - 0.4f;
      }
      for (std::int64_t k = 0; k < kGrain; ++k) {
        const float value = noise[static_cast<std::size_t>(k)];
        wide(0)[i + k] = value;
        wide(1)[i + k] = 0.1f * value;
        wide(2)[i + k] = value * value;
      }
      case_.set->narrow(g() + i * bytes_of(case_.g_type), case_.g_type, noise.data(), kGrain);
      if (case_.copy_type == Element::none) continue;
      case_.set->narrow(copy() + i * bytes_of(case_.copy_type), case_.copy_type, noise.data(), kGrain);
    }
  }

  Arena arena_;
  Case case_;
};

using Work = std::function<void(int)>;

double processor_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Processor time of the slowest thread: other programs disturb it less than they do the clock on the wall.
double seconds(Team& team, const Work& work) {
  std::vector<double> times(static_cast<std::size_t>(team.size()));
  team.run([&](int thread) {
    const double start = processor_seconds();
    work(thread);
    times[static_cast<std::size_t>(thread)] = processor_seconds() - start;
  });
  return *std::max_element(times.begin(), times.end());
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Times `work` and `yardstick` in turn.
void measure(benchmark::State& state, const Case& c, Team& team, const Work& work, const Work& yardstick,
             const char* ratio) {
  seconds(team, yardstick);
  std::vector<double> times, ratios;
  for (auto _ : state) {
    times.push_back(seconds(team, work));
    state.SetIterationTime(times.back());
    ratios.push_back(seconds(team, yardstick) / times.back());
  }
  const auto bytes = static_cast<double>(24 + bytes_of(c.g_type) + bytes_of(c.copy_type));
  const double time = median(times) / static_cast<double>(c.count);
  state.counters["bytes_per_param"] = bytes;
  state.counters["ns_per_param"] = time * 1e9;
  state.counters["GB_per_s"] = bytes / time * 1e-9;
  state.counters[ratio] = median(ratios);
}

/// Arrays that start at different offsets inside a page.
std::int64_t staggered(const Case& c) {
  return (4 * c.count / kHugePage + 1) * kHugePage + 576;
}

void against_memory(benchmark::State& state, const Case& c) {
  Team team(c.threads);
  Arrays arrays(c, staggered(c), team);
  measure(
      state, c, team, [&](int thread) { arrays.update(thread); }, [&](int thread) { arrays.move(thread); },
      "of_memory");
}

/// Arrays that start at one offset of pages that this family of processors (Zen) takes for each other.
void alike(benchmark::State& state, const Case& c) {
  constexpr std::int64_t kUnlucky = (std::int64_t{64} << 20) + 4096;
  Team team(c.threads);
  Arrays arrays(c, kUnlucky, team), others(c, staggered(c), team);
  measure(
      state, c, team, [&](int thread) { arrays.update(thread); }, [&](int thread) { others.update(thread); },
      "of_staggered");
}

std::string name_of(Element type) {
  const char* names[] = {"f32", "bf16", "f16", "none"};
  return names[static_cast<int>(type)];
}

void add(const char* kind, void (*run)(benchmark::State&, const Case&), const Case& c) {
  const std::string name = std::string(kind) + "/" + c.set->name + "/" + name_of(c.g_type) + "_to_" +
                           name_of(c.copy_type) + "/" + std::to_string(c.count) +
                           "/threads:" + std::to_string(c.threads);
  benchmark::RegisterBenchmark(name.c_str(), [run, c](benchmark::State& state) { run(state, c); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

void add_all() {
  const std::pair<Element, Element> types[] = {
      {Element::f32, Element::none}, {Element::bf16, Element::bf16}, {Element::f16, Element::f16}};
  for (std::string_view name : cpu_kernel_names()) {
    const CpuKernels* set = cpu_kernels(name);
    for (int threads : {1, 2}) {
      for (auto [g_type, copy_type] : types) {
        for (std::int64_t count : {100'000'000, 50'000}) {
          add("adam", against_memory, {set, g_type, copy_type, count, threads});
        }
      }
      add("alike", alike, {set, Element::f32, Element::none, 10'000'000, threads});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
