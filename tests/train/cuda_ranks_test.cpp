// SPDX-License-Identifier: Apache-2.0
// Ranks with a GPU each, through NCCL: as many as this machine has, which may be one. Skipped without a GPU.
#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>

#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "device/cuda_api.h"
#include "spillway/comm/transports.h"
#include "spillway/device/gpu.h"
#include "train/training_runs.h"

namespace spillway::test {
namespace {

/// A store for ranks that are threads of one process.
class SharedStore final : public Store {
 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    const std::scoped_lock lock(mutex_);
    values_[key] = {value.begin(), value.end()};
  }
  std::optional<std::vector<std::byte>> find(const std::string& key) override {
    const std::scoped_lock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  void erase(const std::string& key) override {
    const std::scoped_lock lock(mutex_);
    values_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>> values_;
};

class NcclRanks : public testing::Test {
 protected:
  void SetUp() override {
    while (count_ < 8 && why_no_gpu(count_).empty()) ++count_;
    if (count_ == 0) GTEST_SKIP() << "no usable GPU: " << why_no_gpu(0);
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no usable GPU: LibTorch finds none";
    if (!why_no_nccl().empty()) GTEST_SKIP() << why_no_nccl();
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  /// Calls body(communicator, GPU) on a thread for each GPU.
  void on_gpus(const std::function<void(Communicator&, int)>& body) const {
    SharedStore store;
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count_));
    std::vector<std::thread> threads;
    for (int r = 0; r < count_; ++r) {
      threads.emplace_back([&, r] {
        try {
          const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(r));
          Launch launch;
          launch.launcher = Launcher::torchrun;
          launch.rank = launch.local_rank = r;
          launch.size = launch.local_size = count_;
          const auto ranks = make_nccl_communicator(launch, store, r, {.timeout = {60}, .check_calls = true});
          body(*ranks, r);
        } catch (...) {
          errors[static_cast<std::size_t>(r)] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }

  int count_ = 0;
};

TEST_F(NcclRanks, VerbsDoWhatTheirContractSays) {
  on_gpus([](Communicator& ranks, int gpu) {
    const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(gpu));
    const int n = ranks.size(), me = ranks.rank();
    constexpr std::int64_t kLength = 5000;
    const auto options = torch::TensorOptions().dtype(torch::kFloat).device(device);
    const StreamRef stream = cuda::named_stream(c10::cuda::getCurrentCUDAStream().stream());
    const torch::Tensor mine = torch::arange(kLength, options) + me;

    torch::Tensor from_before = torch::zeros({kLength}, options);
    const Send send{mine.data_ptr(), {kLength * 4}, (me + 1) % n};
    const Receive receive{from_before.data_ptr(), {kLength * 4}, (me + n - 1) % n};
    ranks.exchange({"ring"}, std::span(&send, 1), std::span(&receive, 1), stream);
    EXPECT_TRUE(torch::equal(from_before, torch::arange(kLength, options) + (me + n - 1) % n));

    torch::Tensor all = torch::zeros({n * kLength}, options);
    const std::vector<Bytes> sizes(static_cast<std::size_t>(n), Bytes{kLength * 4});
    const GatherChunk gather{mine.data_ptr(), all.data_ptr(), sizes};
    ranks.all_gather({"gather"}, std::span(&gather, 1), stream);
    EXPECT_TRUE(torch::equal(all.slice(0, (n - 1) * kLength), torch::arange(kLength, options) + (n - 1)));

    torch::Tensor part = torch::zeros({kLength}, options);
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(n), kLength);
    const ScatterChunk scatter{all.data_ptr(), part.data_ptr(), counts};
    ranks.reduce_scatter({"scatter"}, std::span(&scatter, 1), DType::f32, stream);
    EXPECT_TRUE(torch::allclose(part, (torch::arange(kLength, options) + me) * n));

    const std::vector<int> told = ranks.gather_all({"host"}, me);
    for (int r = 0; r < n; ++r) EXPECT_EQ(told[static_cast<std::size_t>(r)], r);
  });
}

TEST_F(NcclRanks, StagesEndInTheBitsOfTheResidentRun) {
  const auto train_all = [this](const char* schedule, int stage, std::int64_t chunk) {
    std::vector<FinalState> states(static_cast<std::size_t>(count_));
    on_gpus([&](Communicator& ranks, int gpu) {
      Config config = tiny_config(schedule, 0.5, chunk, 1);
      config.device.kind = DeviceConfig::Kind::cuda;
      config.device.ordinal = gpu;
      config.precision = DType::bf16;
      config.stage = stage;
      RunOptions options{.steps = 6, .micro_batches = 2};
      options.engine.communicator = &ranks;
      states[static_cast<std::size_t>(gpu)] = train(tiny_llama(true), config, options);
    });
    return states;
  };
  const FinalState expected = train_all("resident", 0, 1 << 20).front();
  for (int stage : {0, 1, 2}) {
    for (const char* schedule : {"resident", "zero_offload"}) {
      for (FinalState& state : train_all(schedule, stage, 4096)) {
        state.losses = expected.losses;  // each rank's own
        expect_same_bits(expected, state);
      }
    }
  }
}

}  // namespace
}  // namespace spillway::test
