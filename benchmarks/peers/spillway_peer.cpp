// SPDX-License-Identifier: Apache-2.0
// Spillway's updates behind a C interface, for a program of another language that times them beside those of others.
// Every function returns 0, or -1 where it was asked for what this processor or build lacks.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/cpu_kernels.h"
#include "spillway/lane/thread_team.h"

namespace {

using namespace spillway::kernels;

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

struct Session {
  Session(int threads, const CpuKernels* kernels, std::vector<int> cores)
      : team(threads, std::move(cores)), set(kernels) {}
  spillway::ThreadTeam team;
  const CpuKernels* set;
};

// Reads and writes what an update does (p, m and v in place; bf16 gradients in, bf16 copies out), tile by tile, and
// computes next to nothing.
void traffic(float* __restrict p, float* __restrict m, float* __restrict v, const std::uint64_t* __restrict g,
             std::uint64_t* __restrict copy, std::int64_t count) {
  constexpr std::int64_t kTile = 256, kWords = kTile / 4;
  for (std::int64_t tile = 0; tile < count / kTile; ++tile) {
    for (std::int64_t i = tile * kTile; i < (tile + 1) * kTile; ++i) {
      p[i] += 1;
      m[i] += 1;
      v[i] += 1;
    }
    for (std::int64_t i = tile * kWords; i < (tile + 1) * kWords; ++i) copy[i] = g[i] ^ 1;
  }
}

// Calls body(first element, count) for each thread's grains.
template <class Body>
void for_grains(Session& session, std::int64_t count, const Body& body) {
  session.team.parallel_for((count + kGrain - 1) / kGrain, [&](std::int64_t begin, std::int64_t end) {
    body(begin * kGrain, std::min(end * kGrain, count) - begin * kGrain);
  });
}

template <class T>
T* at(T* array, std::int64_t i) {
  return array == nullptr ? nullptr : array + i;
}
void* at(void* array, std::int64_t bytes) {
  return array == nullptr ? nullptr : static_cast<char*>(array) + bytes;
}

std::int64_t bytes_of(Element type) {
  return type == Element::none ? 0 : type == Element::f32 ? 4 : 2;
}
std::int64_t bytes_of(StateFormat format) {
  return format == StateFormat::f32 ? 4 : format == StateFormat::bf16 ? 2 : 1;
}

AdamScalars scalars_of(std::int64_t step, float factor) {
  return adam_scalars(1e-4, 0.9, 0.999, 1e-8, 0.01, true, step, factor);
}

}  // namespace

extern "C" {

/// `set`: a name of the dispatch, or null for the fastest.
void* spillway_open(int threads, const char* set) {
  const CpuKernels* kernels = set == nullptr ? &cpu_kernels() : cpu_kernels(set);
  if (kernels == nullptr) return nullptr;
  std::vector<int> cores(static_cast<std::size_t>(threads));
  std::iota(cores.begin(), cores.end(), 0);
  return std::make_unique<Session>(threads, kernels, cores).release();
}

void spillway_close(void* session) {
  const std::unique_ptr<Session> owner(static_cast<Session*>(session));
}

const char* spillway_set(void* session) {
  return static_cast<Session*>(session)->set->name;
}

/// Memory of huge pages, where the system has them, touched by the team; it lasts until the program ends. Arrays start
/// `offset` bytes inside a page.
void* spillway_memory(void* session, std::int64_t bytes, std::int64_t offset) {
  constexpr auto kPage = static_cast<std::uintptr_t>(kHugePage);
  const std::size_t size = (static_cast<std::size_t>(bytes + offset) / kPage + 2) * kPage;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto start = (reinterpret_cast<std::uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  char* array = static_cast<char*>(memory) + (start - reinterpret_cast<std::uintptr_t>(memory));
  madvise(array, size - kPage, MADV_HUGEPAGE);
  static_cast<Session*>(session)->team.parallel_for((bytes + offset) / 4096 + 1,
                                                    [&](std::int64_t from, std::int64_t to) {
                                                      for (std::int64_t page = from; page < to; ++page)
                                                        array[page * 4096] = 0;
                                                    });
  return array + offset;
}

/// One AdamW step. `low`: null for fp32 masters in `p`, else `p` is the bf16 working copy. `format` of both moments and
/// `g_type`, `copy_type`: numbers of StateFormat and Element.
int spillway_adamw(void* handle, std::int64_t step, float factor, void* p, std::uint16_t* low, void* m, float* m_scales,
                   void* v, float* v_scales, int format, void* g, int g_type, void* copy, int copy_type,
                   std::int64_t count) {
  Session& session = *static_cast<Session*>(handle);
  const AdamScalars scalars = scalars_of(step, factor);
  const auto states = static_cast<StateFormat>(format);
  const auto g_element = static_cast<Element>(g_type), copy_element = static_cast<Element>(copy_type);
  const RoundingKey key = rounding_key(1, step);
  for_grains(session, count, [&](std::int64_t i, std::int64_t n) {
    UpdateArrays arrays;
    arrays.p = low == nullptr ? MasterArray{static_cast<float*>(p) + i, nullptr, nullptr}
                              : MasterArray{nullptr, static_cast<std::uint16_t*>(p) + i, low + i};
    arrays.states[0] = {states, at(m, i * bytes_of(states)), at(m_scales, i / kBlock)};
    arrays.states[1] = {states, at(v, i * bytes_of(states)), at(v_scales, i / kBlock)};
    arrays.g = at(g, i * bytes_of(g_element));
    arrays.g_type = g_element;
    arrays.copy = at(copy, i * bytes_of(copy_element));
    arrays.copy_type = copy_element;
    arrays.count = n;
    arrays.first = i;
    arrays.key = key;
    session.set->adam_packed(scalars, arrays);
  });
  return 0;
}

/// The bytes of a step with fp32 states, bf16 gradients and a bf16 copy, and nothing else.
int spillway_traffic(void* session, float* p, float* m, float* v, void* g, void* copy, std::int64_t count) {
  for_grains(*static_cast<Session*>(session), count, [&](std::int64_t i, std::int64_t n) {
    traffic(p + i, m + i, v + i, static_cast<std::uint64_t*>(at(g, 2 * i)),
            static_cast<std::uint64_t*>(at(copy, 2 * i)), n);
  });
  return 0;
}

}  // extern "C"
