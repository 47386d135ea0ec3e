// SPDX-License-Identifier: Apache-2.0
#include "kernels/allocation_counter.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SPILLWAY_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SPILLWAY_SANITIZED 1
#endif
#endif

namespace {
std::atomic<std::int64_t> allocations{0}, locks{0};
}

namespace spillway::test {
std::int64_t allocation_count() {
  return allocations.load();
}
std::int64_t lock_count() {
  return locks.load();
}
bool locks_are_counted() {
#if defined(SPILLWAY_SANITIZED)
  return false;
#else
  return true;
#endif
}
}  // namespace spillway::test

// All forms are replaced together: under the address sanitizer each has one of its own, and memory must go back the way
// it came.
namespace {
void* counted(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size == 0 ? 1 : size);
}
void* checked(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t size) {
  return checked(counted(size));
}
void* operator new[](std::size_t size) {
  return checked(counted(size));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return counted(size);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return counted(size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

#if !defined(SPILLWAY_SANITIZED)
// In front of the C library's, which does the work.
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  using Lock = int (*)(pthread_mutex_t*);
  static const auto next = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  locks.fetch_add(1, std::memory_order_relaxed);
  return next(mutex);
}
#if defined(__GLIBC__)
extern "C" void* __libc_malloc(std::size_t size);
extern "C" void* malloc(std::size_t size) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
#endif
#endif
