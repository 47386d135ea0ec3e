// SPDX-License-Identifier: Apache-2.0
#pragma once

// Updates that can be undone: grain by grain, what an update is about to change is written to a log first. A grain of
// everything stays in the fastest cache between the two. Part of kernels_body.h: the same rules hold.

#include "kernels/cpu/state_tiles.h"
#if defined(__AVX2__)
#include "kernels/cpu/vectors.h"
#endif

namespace spillway::kernels {
namespace {

/// Copies past the caches where registers are wide and the target is aligned to them: nobody reads a log soon, and its
/// lines need not be read before they are written.
void copy_to_log(void* target, const void* source, std::int64_t bytes) {
  std::int64_t done = 0;
#if defined(__AVX2__)
  constexpr std::int64_t kWide = sizeof(WordPart);
  if (reinterpret_cast<std::uintptr_t>(target) % kWide == 0) {
    for (; done + kWide <= bytes; done += kWide) {
      WordPart words;
      memcpy(&words, static_cast<const char*>(source) + done, sizeof(words));
      stream(static_cast<char*>(target) + done, words);
    }
  }
#endif
  memcpy(static_cast<char*>(target) + done, static_cast<const char*>(source) + done,
         static_cast<unsigned long>(bytes - done));
}

constexpr std::int64_t state_bytes(StateFormat format) {
  return format == StateFormat::f32 ? 4 : format == StateFormat::bf16 ? 2 : 1;
}

MasterArray from(const MasterArray& p, std::int64_t start) {
  if (p.f32 != nullptr) return {p.f32 + start, nullptr, nullptr};
  return {nullptr, p.working + start, p.low + start};
}

StateArray from(const StateArray& state, std::int64_t start) {
  char* data = static_cast<char*>(state.data) + start * state_bytes(state.format);
  return {state.format, data, state.scales == nullptr ? nullptr : state.scales + start / kBlock};
}

void log_master(const MasterArray& log, const MasterArray& p, std::int64_t count) {
  if (p.f32 != nullptr) return copy_to_log(log.f32, p.f32, 4 * count);
  copy_to_log(log.working, p.working, 2 * count);
  copy_to_log(log.low, p.low, 2 * count);
}

void log_state(const StateArray& log, const StateArray& state, std::int64_t count) {
  copy_to_log(log.data, state.data, state_bytes(state.format) * count);
  if (state.format != StateFormat::block8) return;
  memcpy(log.scales, state.scales, 4 * static_cast<unsigned long>((count + kBlock - 1) / kBlock));
}

/// The `count` elements of `arrays` from `start`, which begins a grain.
UpdateArrays part_of(const UpdateArrays& arrays, std::int64_t start, std::int64_t count) {
  UpdateArrays part = arrays;
  part.p = from(arrays.p, start);
  for (int k = 0; k < 2; ++k) {
    if (arrays.states[k].data != nullptr) part.states[k] = from(arrays.states[k], start);
  }
  const std::int64_t g_bytes = arrays.g_type == Element::f32 ? 4 : 2,
                     copy_bytes = arrays.copy_type == Element::f32 ? 4 : 2;
  part.g = static_cast<const char*>(arrays.g) + start * g_bytes;
  part.copy = arrays.copy == nullptr ? nullptr : static_cast<char*>(arrays.copy) + start * copy_bytes;
  part.count = count;
  part.first = arrays.first + start;
  return part;
}

/// `states`: how many of them the update has. `update`: of a part.
template <class Update>
void update_logged(const UpdateArrays& arrays, const UpdateLog& log, int states, const Update& update) {
  for (std::int64_t start = 0; start < arrays.count; start += kGrain) {
    const std::int64_t size = arrays.count - start < kGrain ? arrays.count - start : kGrain;
    const UpdateArrays part = part_of(arrays, start, size);
    log_master(from(log.p, start), part.p, size);
    for (int k = 0; k < states; ++k) log_state(from(log.states[k], start), part.states[k], size);
    update(part);
  }
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace spillway::kernels
