// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>

#include "spillway/plan/record_run.h"

namespace spillway {
namespace {

// Modules in the order in which a layer of the Llama family uses them; it registers the norms last. GPT-2's layers
// register their modules in the order of use.
constexpr std::array<std::string_view, 13> kLlamaOrder{"input_layernorm",
                                                       "q_proj",
                                                       "q_norm",
                                                       "k_proj",
                                                       "k_norm",
                                                       "v_proj",
                                                       "o_proj",
                                                       "post_attention_layernorm",
                                                       "pre_feedforward_layernorm",
                                                       "gate_proj",
                                                       "up_proj",
                                                       "down_proj",
                                                       "post_feedforward_layernorm"};

std::size_t place_in_layer(std::string_view parameter) {
  for (std::size_t i = 0; i < kLlamaOrder.size(); ++i) {
    if (parameter.find(kLlamaOrder[i]) != std::string_view::npos) return i;
  }
  return 0;
}

// Backward brings a layer norm's weight before its bias, and a linear layer's bias before its weight. Registered are
// weights first.
bool used_before_its_weight(std::string_view parameter) {
  return parameter.find("ln_") != std::string_view::npos && parameter.ends_with(".bias");
}

std::vector<std::int64_t> order_of_use(const std::vector<ParameterShape>& shapes) {
  std::vector<std::int64_t> order(shapes.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto key = [&](std::int64_t i) {
    const ParameterShape& shape = shapes[static_cast<std::size_t>(i)];
    const std::int64_t weight = 2 * (i - 1);  // the number that a bias's weight has here
    return std::tuple(shape.block, place_in_layer(shape.name), used_before_its_weight(shape.name) ? weight - 1 : 2 * i);
  };
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return key(a) < key(b); });
  return order;
}

}  // namespace

ModelEvents declared_events(const ModelConfig& model) {
  const std::vector<ParameterShape> shapes = parameter_shapes(model);
  ModelEvents events;
  events.gates.resize(static_cast<std::size_t>(model.layers + 2));
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    ForwardGate& gate = events.gates[static_cast<std::size_t>(shapes[i].block)];
    gate.parameters.push_back(static_cast<std::int64_t>(i));
    gate.elements += static_cast<double>(shapes[i].numel());
  }
  if (model.tied_head) {  // the token embedding, registered first, is used again
    events.gates.back().parameters.push_back(0);
    events.gates.back().elements += static_cast<double>(shapes.front().numel());
  }
  std::vector<std::int64_t> gradients = order_of_use(shapes);
  std::reverse(gradients.begin(), gradients.end());
  events.gradients = {std::move(gradients)};
  return events;
}

}  // namespace spillway
