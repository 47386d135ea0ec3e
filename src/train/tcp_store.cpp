// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/tcp_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "spillway/core/error.h"

namespace spillway {
namespace {

std::vector<std::uint8_t> to_numbers(std::span<const std::byte> bytes) {
  std::vector<std::uint8_t> numbers(bytes.size());
  std::transform(bytes.begin(), bytes.end(), numbers.begin(),
                 [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  return numbers;
}

class TcpStore final : public Store {
 public:
  TcpStore(const Launch& launch, Seconds timeout) : launch_(launch) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(launch.master_port);
    options.isServer = launch.rank == 0 && !launch.store_runs;
    options.numWorkers = launch.size;
    options.waitWorkers = false;  // the communicator waits for ranks itself, and says for which
    options.timeout =
        std::chrono::milliseconds(std::max<std::int64_t>(1, static_cast<std::int64_t>(timeout.value * 1e3)));
    guarded([&] { store_ = c10::make_intrusive<c10d::TCPStore>(launch.master_address, options); });
  }

  void set(const std::string& key, std::span<const std::byte> value) override {
    guarded([&] { store_->set(key, to_numbers(value)); });
  }
  std::optional<std::vector<std::byte>> find(const std::string& key) override {
    std::optional<std::vector<std::byte>> found;
    guarded([&] {
      if (!store_->check({key})) return;
      const std::vector<std::uint8_t> value = store_->get(key);
      found.emplace(value.size());
      std::transform(value.begin(), value.end(), found->begin(), [](std::uint8_t n) { return std::byte{n}; });
    });
    return found;
  }
  void erase(const std::string& key) override {
    guarded([&] { static_cast<void>(store_->deleteKey(key)); });
  }

 private:
  template <class Body>
  void guarded(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      throw RankError(fmt::format("the store of rank 0 at {}:{} does not answer rank {}: {}", launch_.master_address,
                                  launch_.master_port, launch_.rank, text.substr(0, text.find('\n'))));
    }
  }

  const Launch launch_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

}  // namespace

std::unique_ptr<Store> make_tcp_store(const Launch& launch, Seconds timeout) {
  require(!launch.master_address.empty(),
          fmt::format(
              "{} started ranks on several hosts, and the environment variable MASTER_ADDR, which names the host of "
              "rank 0, is missing: set it on all of them (mpirun -x MASTER_ADDR=HOST, srun --export=ALL)",
              to_string(launch.launcher)));
  return std::make_unique<TcpStore>(launch, timeout);
}

}  // namespace spillway
