// SPDX-License-Identifier: Apache-2.0
#include "lane/affinity.h"

#include <sched.h>

#include <cerrno>
#include <memory>

namespace spillway {
namespace {

/// A set that may be larger than cpu_set_t, which ends at 1024 processors.
class ProcessorSet {
 public:
  explicit ProcessorSet(std::size_t count) : size_(CPU_ALLOC_SIZE(count)), set_(CPU_ALLOC(count), free) {
    if (set_) CPU_ZERO_S(size_, set_.get());
  }
  bool made() const { return set_ != nullptr; }
  cpu_set_t* get() const { return set_.get(); }
  std::size_t size() const { return size_; }

 private:
  static void free(cpu_set_t* set) { CPU_FREE(set); }

  std::size_t size_;
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set_;
};

}  // namespace

std::vector<int> allowed_processors() {
  // The system refuses a set that is smaller than its own, whose size it does not tell.
  for (std::size_t count = CPU_SETSIZE; count <= std::size_t{kMostProcessors}; count *= 2) {
    const ProcessorSet set(count);
    if (!set.made()) return {};
    if (sched_getaffinity(0, set.size(), set.get()) != 0) {
      if (errno != EINVAL) return {};
      continue;
    }
    std::vector<int> processors;
    for (std::size_t i = 0; i < count; ++i) {
      if (CPU_ISSET_S(i, set.size(), set.get())) processors.push_back(static_cast<int>(i));
    }
    return processors;
  }
  return {};
}

bool stay_on(int processor) {
  if (processor < 0 || processor >= kMostProcessors) return false;
  const auto place = static_cast<std::size_t>(processor);
  const ProcessorSet set(place + 1);
  if (!set.made()) return false;
  CPU_SET_S(place, set.size(), set.get());
  return sched_setaffinity(0, set.size(), set.get()) == 0;
}

}  // namespace spillway
