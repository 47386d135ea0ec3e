// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace spillway::kernels {

/// Keeps denormal numbers as they are for as long as it lives, on the thread that makes it: a framework may have asked
/// the processor to flush them, which would change bits.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ & ~(kFlushToZero | kDenormalsAreZero));
  }
  ~KeepDenormals() {
    _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned saved_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kFlushToZero));
  }
  ~KeepDenormals() {
    asm volatile("msr fpcr, %0" ::"r"(saved_));
  }

 private:
  static constexpr std::uint64_t kFlushToZero = std::uint64_t{1} << 24;
  std::uint64_t saved_;
#else
  KeepDenormals() = default;
  ~KeepDenormals() {}

 private:
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
};

}  // namespace spillway::kernels
