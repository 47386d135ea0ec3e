// SPDX-License-Identifier: Apache-2.0
#include "train/recompute.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "spillway/core/error.h"
#include "train/engine_impl.h"
#include "train/random_numbers.h"

namespace spillway {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

void add_versions(const std::vector<torch::Tensor>& tensors, std::vector<std::int64_t>& out) {
  for (const torch::Tensor& tensor : tensors) {
    out.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
  }
}

std::vector<std::int64_t> versions_of(const std::vector<torch::Tensor>& tensors) {
  std::vector<std::int64_t> out;
  add_versions(tensors, out);
  return out;
}

// Of what the second forward reads beside the inputs that need a gradient, which LibTorch looks at itself.
std::vector<std::int64_t> versions_of(const RecomputedCall& call) {
  std::vector<std::int64_t> out = versions_of(call.inputs);
  add_versions(call.parameters, out);
  return out;
}

RecomputedCall& call_of(const AutogradContext& context) {
  return static_cast<RecomputedCall&>(*context.saved_data.at("call").toCapsule());
}

struct Recompute : torch::autograd::Function<Recompute> {
  /// `anchor` requires a gradient, so that backward comes here even where no input does.
  static variable_list forward(AutogradContext* context, c10::intrusive_ptr<RecomputedCall> call, const torch::Tensor&,
                               at::TensorList differentiable) {
    context->set_materialize_grads(false);  // an output that nothing came from stays without a gradient
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->save_for_backward(differentiable.vec());
    return call->forward(with_inputs(*call, differentiable.vec()));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    RecomputedCall& call = call_of(*context);
    require(versions_of(call) == call.versions,
            fmt::format("recompute of {}: an input or a parameter was written between its forward and its backward, so "
                        "that the second forward would compute something else",
                        call.block));
    variable_list inputs;
    for (const torch::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach().set_requires_grad(true));
    }
    call.with_same_random_numbers([&] {
      const at::AutoGradMode grad_mode(true);
      variable_list roots, seeds;
      const variable_list outputs = call.forward(with_inputs(call, inputs));
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
        roots.push_back(outputs[i]);
        seeds.push_back(gradients[i]);
      }
      if (!roots.empty()) torch::autograd::backward(roots, seeds);
    });
    variable_list out(2);  // of the call and the anchor: none
    for (torch::Tensor& input : inputs) out.push_back(input.mutable_grad());
    return out;
  }

  static std::vector<torch::Tensor> with_inputs(const RecomputedCall& call, const variable_list& differentiable) {
    std::vector<torch::Tensor> all = call.inputs;
    std::size_t next = 0;
    for (torch::Tensor& input : all) {
      if (!input.defined()) input = differentiable.at(next++);
    }
    return all;
  }
};

}  // namespace

std::vector<torch::Tensor> recompute_in_backward(c10::intrusive_ptr<RecomputedCall> call,
                                                 const std::vector<torch::Tensor>& inputs) {
  std::vector<torch::Tensor> differentiable;
  call->inputs = inputs;
  for (torch::Tensor& input : call->inputs) {
    if (input.defined() && input.requires_grad()) differentiable.push_back(std::exchange(input, torch::Tensor()));
  }
  const torch::Tensor anchor = torch::empty({0}, torch::TensorOptions().requires_grad(true));
  std::vector<torch::Tensor> outputs = Recompute::apply(call, anchor, at::TensorList(differentiable));
  call->versions = versions_of(*call);
  return outputs;
}

void for_gradient_events(const torch::Tensor& loss, const std::function<void(const torch::Tensor&)>& visit) {
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open{loss.grad_fn().get()};
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      visit(leaf->variable);
    } else if (const auto* again = dynamic_cast<torch::autograd::CppNode<Recompute>*>(node)) {
      for (const torch::Tensor& parameter : call_of(again->ctx_).parameters) visit(parameter);
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) open.push_back(edge.function.get());
  }
}

namespace {

struct ByAge {
  bool operator()(const Node* a, const Node* b) const { return a->sequence_nr() < b->sequence_nr(); }
};

// How many edges lead to each function, as LibTorch counts before it starts.
std::unordered_map<Node*, std::int64_t> count_edges(const std::vector<Node*>& roots) {
  std::unordered_map<Node*, std::int64_t> edges;
  std::unordered_set<Node*> seen(roots.begin(), roots.end());
  std::vector<Node*> open = roots;
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      Node* const next = edge.function.get();
      if (next == nullptr) continue;
      ++edges[next];
      if (seen.insert(next).second) open.push_back(next);
    }
  }
  return edges;
}

// Keeps the last of equal ones.
std::vector<torch::Tensor> last_of_each(const std::vector<torch::Tensor>& events) {
  std::unordered_set<const void*> seen;
  std::vector<torch::Tensor> out;
  for (auto event = events.rbegin(); event != events.rend(); ++event) {
    if (seen.insert(event->unsafeGetTensorImpl()).second) out.push_back(*event);
  }
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace

std::vector<torch::Tensor> gradient_order(const std::vector<torch::Tensor>& roots) {
  std::vector<Node*> starts;
  for (const torch::Tensor& root : roots) {
    Node* const start = torch::autograd::impl::gradient_edge(root).function.get();
    if (start != nullptr && std::find(starts.begin(), starts.end(), start) == starts.end()) starts.push_back(start);
  }
  std::unordered_map<Node*, std::int64_t> edges = count_edges(starts);
  std::priority_queue<Node*, std::vector<Node*>, ByAge> ready;
  for (Node* start : starts) {
    if (edges.count(start) == 0) ready.push(start);
  }
  std::vector<torch::Tensor> events;
  while (!ready.empty()) {
    Node* const node = ready.top();
    ready.pop();
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      events.push_back(leaf->variable);
    } else if (const auto* again = dynamic_cast<torch::autograd::CppNode<Recompute>*>(node)) {
      const RecomputedCall& call = call_of(again->ctx_);
      events.insert(events.end(), call.order.begin(), call.order.end());
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (edge.function && --edges[edge.function.get()] == 0) ready.push(edge.function.get());
    }
  }
  return last_of_each(events);
}

// ---- the engine's part ---------------------------------------------------------------------------------------------

void Engine::Impl::count_uses(const torch::Tensor& loss) {
  std::unordered_map<const void*, std::int64_t> index_of;
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    index_of.emplace(plan.trainable[i].tensor.unsafeGetTensorImpl(), static_cast<std::int64_t>(i));
  }
  uses_left.assign(plan.trainable.size(), 0);
  for_gradient_events(loss, [&](const torch::Tensor& leaf) {
    const auto found = index_of.find(leaf.unsafeGetTensorImpl());
    if (found != index_of.end()) ++uses_left[static_cast<std::size_t>(found->second)];
  });
}

void Engine::Impl::flush_gradients() {
  if (uses_left.empty()) return;
  // A use that was counted had no gradient after all (an output of a block that nothing came from).
  for (std::size_t i = 0; i < plan.trainable.size(); ++i) {
    uses_left[i] = 0;
    if (plan.trainable[i].tensor.mutable_grad().defined()) on_gradient(static_cast<std::int64_t>(i));
  }
}

// Ranks have to know the order of gradients before backward begins, but the graph of a recomputed block is made in it.
// So the block's first call is done once more, with a graph that is looked at and dropped.
std::vector<torch::Tensor> Engine::Impl::order_inside(const torch::nn::Module& block, const RecomputedCall& call,
                                                      const std::vector<torch::Tensor>& inputs) {
  const auto known = orders_inside.find(&block);
  if (known != orders_inside.end()) return known->second;
  std::vector<torch::Tensor> leaves = inputs, order;
  for (torch::Tensor& leaf : leaves) {
    if (leaf.defined()) leaf = leaf.detach().set_requires_grad(leaf.requires_grad());
  }
  call.with_same_random_numbers([&] {
    std::vector<torch::Tensor> roots = call.forward(leaves);
    std::erase_if(roots, [](const torch::Tensor& root) { return !root.defined() || !root.requires_grad(); });
    order = gradient_order(roots);
  });
  std::erase_if(order, [&](const torch::Tensor& tensor) {
    return std::none_of(call.parameters.begin(), call.parameters.end(),
                        [&](const torch::Tensor& parameter) { return parameter.is_same(tensor); });
  });
  return orders_inside[&block] = order;
}

bool Engine::recomputes(const CallOptions& options) const {
  return options.recompute.value_or(impl_->config.recompute) && torch::GradMode::is_enabled();
}

void Engine::refuse_recompute(const torch::nn::Module& block) {
  throw InvalidArgument("recompute of " + block.name() +
                        ": its forward returns something else than a tensor or a vector of tensors; call it with "
                        "{.recompute = false}");
}

namespace {

bool autocasts(torch::Device device) {
  return at::autocast::is_autocast_enabled(torch::kCPU) || at::autocast::is_autocast_enabled(device.type());
}

}  // namespace

std::vector<torch::Tensor> Engine::call_recomputed(torch::nn::Module& block, BlockForward forward,
                                                   std::vector<torch::Tensor> inputs, std::int64_t rows) {
  Impl& s = *impl_;
  const auto needs_gradient = [](const torch::Tensor& t) { return t.defined() && t.requires_grad(); };
  // Without an input that needs a gradient (an embedding's tokens) a block keeps little to be computed again.
  // Inside a block that is being recomputed, its own call frees what this one would.
  if (!torch::GradMode::is_enabled() || s.recomputing || std::none_of(inputs.begin(), inputs.end(), needs_gradient)) {
    const BlockScope scope(*this, block, rows);
    return forward(inputs);
  }
  const torch::Device device = torch_device(s.config.device);
  require(!autocasts(device), fmt::format("recompute of {} under autocast, which the second forward would not have: "
                                          "let the engine's precision choose the type instead",
                                          block.name()));
  auto call = c10::make_intrusive<RecomputedCall>();
  call->block = block.name();
  call->forward = std::move(forward);
  for (const torch::Tensor& parameter : block.parameters()) {
    if (parameter.requires_grad()) call->parameters.push_back(parameter);
  }
  const GatedBlock* const gate = &s.gated_block(block);
  call->with_same_random_numbers = [&s, gate, rows, device,
                                    first = RandomNumbers(s.causal_lms, device)](const std::function<void()>& body) {
    const RandomNumbers present(s.causal_lms, device);
    const std::int64_t begin = Trace::now();
    first.set();
    s.pace(2.0 * gate->elements * static_cast<double>(rows));  // the forward that is done again
    const bool outermost = !std::exchange(s.recomputing, true);
    try {
      body();
    } catch (...) {
      if (outermost) s.recomputing = false;
      present.set();
      throw;
    }
    if (outermost) s.recomputing = false;
    present.set();
    s.machine->trace().span(s.forward_track, s.machine->trace().label("recompute block"), begin, Trace::now(), 0,
                            gate->index);
  };
  s.recomputed = true;
  const BlockScope scope(*this, block, rows);
  if (s.ranks != nullptr) call->order = s.order_inside(block, *call, inputs);
  const std::vector<std::int64_t> before = versions_of(inputs);
  std::vector<torch::Tensor> outputs = recompute_in_backward(std::move(call), inputs);
  // The second forward would begin with what the first one left.
  require(versions_of(inputs) == before,
          fmt::format("recompute of {}: its forward changes an input in place; let it work on a copy, or call it with "
                      "{{.recompute = false}}",
                      block.name()));
  return outputs;
}

void Engine::refuse_tensors_inside(const torch::nn::Module& block) {
  throw InvalidArgument(fmt::format(
      "recompute of {}: an input holds tensors inside (a vector, an optional, a tuple); pass each tensor as "
      "an input of its own, or call it with {{.recompute = false}}",
      block.name()));
}

}  // namespace spillway
