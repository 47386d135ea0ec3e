// SPDX-License-Identifier: Apache-2.0
//
// Spillway in a program of one's own: any torch::nn::Module, any loop. Learns to multiply by a fixed random matrix,
// with the states on the host and a device that only holds the weights.
//
// Expected output: a loss that falls from about 2 to about 0.01, then the bytes by tier.
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "spillway/train/engine.h"
#include "spillway/train/metrics.h"

namespace {

/// A residual block: what the engine's gate waits for and, with other schedules, fetches and releases.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct Network : torch::nn::Module {
  Network(std::int64_t width, int depth) {
    for (int i = 0; i < depth; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(width)));
  }
  std::vector<Block> blocks;
};

}  // namespace

int main() {
  torch::manual_seed(1);
  constexpr std::int64_t kWidth = 64;
  const torch::Tensor target_matrix = torch::randn({kWidth, kWidth}) / std::sqrt(static_cast<double>(kWidth));
  Network network(kWidth, 4);

  spillway::Config config;  // or spillway::Config::load("offload.json")
  config.schedule = "zero_offload";
  config.device.memory = spillway::Bytes{4 << 20};  // 4 MiB
  config.hyperparameters.lr = 3e-3;
  config.clip_norm = 1.0;
  spillway::Engine engine(network, config);

  for (int step = 1; step <= 300; ++step) {
    torch::Tensor x = torch::randn({64, kWidth});
    const torch::Tensor target = torch::matmul(x, target_matrix);
    for (Block& block : network.blocks) x = engine.call(block, x);  // instead of block(x): uploads overlap this forward
    const torch::Tensor loss = torch::mse_loss(x, target);
    engine.backward(loss, {.last = true});
    const spillway::StepResult result = engine.step();
    if (step == 1 || step % 100 == 0) {
      std::printf("step %d  loss %.4f  gradient norm %.3f\n", step, loss.item<double>(), result.grad_norm);
    }
  }
  std::printf("%s", spillway::describe(engine.summary()).c_str());
}
