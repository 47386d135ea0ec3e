// SPDX-License-Identifier: Apache-2.0
// Layer blocks: every computation of a model goes through its BlockCall, and a block is a function of its inputs and
// its own parameters.
#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

std::vector<torch::Tensor> gradients(CausalLM& model) {
  for (torch::Tensor& parameter : model.parameters()) parameter.mutable_grad().reset();
  const torch::Tensor tokens = some_tokens(2, 16);
  next_token_loss(model.forward(tokens), tokens.roll(-1, 1), tokens.numel()).backward();
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& parameter : model.parameters()) result.push_back(parameter.grad().clone());
  return result;
}

// Runs the forward without a graph and again in backward, as a trainer that saves memory does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& input,
                               const torch::Tensor&, const BlockForward& block, CausalLM* model) {
    context->save_for_backward({input});
    context->saved_data["state"] = model->dropout_state();
    recompute = [block, model](const torch::Tensor& state, const torch::Tensor& x) {
      model->set_dropout_state(state);
      return block({x}).at(0);
    };
    steps.push_back(recompute);
    return block({input}).at(0);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list outputs) {
    const torch::Tensor saved = context->get_saved_variables().at(0);
    const torch::Tensor input = saved.is_floating_point() ? saved.detach().requires_grad_() : saved;
    const auto again = steps.back();
    steps.pop_back();
    {
      const torch::AutoGradMode grad(true);
      again(context->saved_data["state"].toTensor(), input).backward(outputs.at(0));
    }
    return {saved.is_floating_point() ? input.grad() : torch::Tensor(), torch::Tensor(), torch::Tensor(),
            torch::Tensor()};
  }

  using Step = std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>;
  static inline Step recompute;
  static inline std::vector<Step> steps;
};

class Blocks : public testing::TestWithParam<ModelFamily> {
 protected:
  void SetUp() override {
    ModelConfig config = small_model(GetParam());
    config.tied_head = true;
    config.attention_dropout = 0.25;
    model = make_causal_lm(config, 9);
    perturb(*model);
  }

  std::shared_ptr<CausalLM> model;
};

TEST_P(Blocks, AreAllRunThroughTheBoundCall) {
  std::vector<torch::nn::Module*> seen, expected;
  for (const Block& block : model->blocks()) expected.push_back(block.module);
  model->set_block_call([&](torch::nn::Module& block, const BlockForward& forward, const auto& inputs) {
    seen.push_back(&block);
    return forward(inputs);
  });
  model->set_dropout_seed(1);
  const auto bound = gradients(*model);
  EXPECT_EQ(seen, expected);
  model->set_block_call({});
  model->set_dropout_seed(1);
  const auto direct = gradients(*model);
  EXPECT_EQ(seen.size(), expected.size());
  for (std::size_t i = 0; i < direct.size(); ++i) EXPECT_TRUE(torch::equal(bound[i], direct[i]));
}

TEST_P(Blocks, ReadNothingButTheirOwnParameters) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor expected = (model->eval(), model->forward(some_tokens(2, 16)));
  // Outside its own call every parameter is NaN, so reading another block's would show.
  std::vector<torch::Tensor> kept;
  for (torch::Tensor& parameter : model->parameters()) {
    kept.push_back(parameter.clone());
    parameter.fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const auto all = model->parameters();
  model->set_block_call([&](torch::nn::Module& block, const BlockForward& forward, const auto& inputs) {
    for (torch::Tensor& parameter : block.parameters()) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].is_same(parameter)) parameter.copy_(kept[i]);
      }
    }
    const auto outputs = forward(inputs);
    for (torch::Tensor& parameter : block.parameters()) parameter.fill_(std::numeric_limits<float>::quiet_NaN());
    return outputs;
  });
  EXPECT_TRUE(torch::equal(model->forward(some_tokens(2, 16)), expected));
}

TEST_P(Blocks, CanBeComputedAgainInBackward) {
  model->set_dropout_seed(4);
  const auto expected = gradients(*model);
  const torch::Tensor anchor = torch::zeros({1}, torch::requires_grad());
  model->set_block_call([&](torch::nn::Module&, const BlockForward& forward, const auto& inputs) {
    return std::vector{Recomputed::apply(inputs.at(0), anchor, forward, model.get())};
  });
  model->set_dropout_seed(4);
  const auto recomputed = gradients(*model);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(recomputed[i], expected[i])) << i;
}

TEST_P(Blocks, RefuseWhatIsNotRowsOfTokens) {
  EXPECT_THROW(model->forward(torch::zeros({4}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(model->forward(torch::zeros({1, 4})), InvalidArgument);
  EXPECT_THROW(model->forward(torch::zeros({1, 33}, torch::kLong)), InvalidArgument);
  EXPECT_EQ(model->forward(torch::zeros({1, 32}, torch::kLong)).sizes(), (std::vector<std::int64_t>{1, 32, 64}));
}

INSTANTIATE_TEST_SUITE_P(Models, Blocks, testing::ValuesIn(kAllFamilies),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace spillway::test
