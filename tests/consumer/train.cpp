// SPDX-License-Identifier: Apache-2.0
//
// The whole of an installed Spillway: trains a small module of its own through an engine.
#include <torch/torch.h>

#include <cstdio>

#include "spillway/train/engine.h"

int main() {
  torch::manual_seed(1);
  torch::nn::Sequential network(torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Linear(64, 4));
  const torch::Tensor x = torch::randn({32, 16});
  const torch::Tensor target = torch::randn({32, 4});

  spillway::Config config;
  config.schedule = "zero_offload";
  config.device.memory = spillway::Bytes{16 << 20};
  config.hyperparameters.lr = 1e-2;
  spillway::Engine engine(*network, config);
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    const torch::Tensor loss = torch::mse_loss(network->forward(x), target);
    engine.backward(loss, {.last = true});
    engine.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f, then %.3f\n", first, last);
  return last < 0.7 * first ? 0 : 1;
}
