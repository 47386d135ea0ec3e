// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace spillway::kernels {

/// Keeps denormal numbers as they are for as long as it lives, on the thread that makes it: a framework may have asked
/// the processor to flush them, which would change bits. Threads: made and destroyed on one thread.
class KeepDenormals {
 public:
  KeepDenormals() : saved_(mode()) { set_mode(saved_ & ~kFlush); }
  ~KeepDenormals() { set_mode(saved_); }
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr std::uint64_t kFlush = 0x8000 | 0x0040;  // results, operands
  static std::uint64_t mode() {
    return __builtin_ia32_stmxcsr();
  }
  static void set_mode(std::uint64_t bits) {
    __builtin_ia32_ldmxcsr(static_cast<unsigned>(bits));
  }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlush = std::uint64_t{1} << 24;
  static std::uint64_t mode() {
    std::uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void set_mode(std::uint64_t bits) {
    asm volatile("msr fpcr, %0" ::"r"(bits) : "memory");
  }
#else
  static constexpr std::uint64_t kFlush = 0;
  static std::uint64_t mode() {
    return 0;
  }
  static void set_mode(std::uint64_t) {}
#endif

  std::uint64_t saved_;
};

}  // namespace spillway::kernels
