// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "spillway/device/gpu.h"

namespace spillway::test {

/// The base of tests that need a GPU: skipped, with the reason, where there is none.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_no_gpu(0);
    if (!reason.empty()) GTEST_SKIP() << "no usable GPU: " << reason;
  }
};

/// An array on the GPU, at any offset from an aligned address.
template <class T>
class GpuArray {
 public:
  GpuArray(const std::vector<T>& values, std::int64_t offset) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(&memory_, (count_ + static_cast<std::size_t>(offset) + 1) * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(memory_) + offset;
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~GpuArray() { cudaFree(memory_); }
  GpuArray(const GpuArray&) = delete;
  GpuArray& operator=(const GpuArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> out(count_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  const std::size_t count_;
  void* memory_ = nullptr;
  T* data_ = nullptr;
};

}  // namespace spillway::test
