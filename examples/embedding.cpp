// SPDX-License-Identifier: Apache-2.0
//
// Every call of the engine, in one small program: what docs/embedding.md explains. Its code blocks are pieces of this
// file.
#include <spillway/core/error.h>
#include <spillway/train/engine.h>
#include <spillway/train/metrics.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

// ---- your model: any module, nothing of Spillway in it but the gate -------------------------------------------------
struct Layer : torch::nn::Module {
  explicit Layer(std::int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>(64)));
    }
    head = register_module("head", torch::nn::Linear(64, 10));
  }
  // With an engine, each layer goes through the gate; without one, the model is an ordinary one.
  torch::Tensor forward(torch::Tensor x, spillway::Engine* engine = nullptr) {
    for (auto& layer : layers) x = engine != nullptr ? engine->call(layer, x) : layer->forward(x);
    return head(x);
  }
  std::vector<std::shared_ptr<Layer>> layers;
  torch::nn::Linear head{nullptr};
};

struct Batch {
  torch::Tensor inputs, targets;
  double weight = 0;
};

// Made on the host: a device's memory is not for data that waits.
Batch next_batch(std::int64_t number) {
  const spillway::HostScope host;
  torch::Tensor inputs = torch::sin(torch::arange(16 * 64, torch::kFloat) * 0.1 + static_cast<double>(number));
  return {inputs.reshape({16, 64}), (torch::arange(16) + number) % 10, 16};
}

torch::Tensor loss_of(Model& model, const Batch& batch, spillway::Engine& engine) {
  return torch::nn::functional::cross_entropy(model.forward(batch.inputs, &engine), batch.targets);
}

spillway::Config make_config() {
  spillway::Config config;
  config.schedule = "zero_offload";
  config.precision = spillway::DType::f32;
  config.hyperparameters = {.lr = 1e-3, .weight_decay = 0.1};
  config.clip_norm = 1.0;
  config.device.memory = spillway::parse_bytes("8MiB");
  spillway::GroupConfig no_decay;
  no_decay.match = "*.bias";
  no_decay.weight_decay = 0;
  config.groups.push_back(no_decay);
  return config;
}

spillway::EngineOptions make_options() {
  spillway::EngineOptions options;
  // A group by what only code can say.
  spillway::GroupConfig slow;
  slow.lr = 1e-4;
  options.groups.push_back(
      {[](const std::string&, const torch::Tensor& p) { return p.dim() == 2 && p.size(0) == 10; }, slow});
  // An update rule of your own for one parameter: sign descent.
  options.updates.push_back({[](const std::string& name, const torch::Tensor&) { return name == "head.bias"; },
                             [](spillway::ParameterUpdate& update) {
                               update.master.sub_(update.gradient.sign(), update.hyperparameters.lr);
                             }});
  // Where messages go, and how much of a timeline is kept.
  options.log = [](spillway::LogLevel, const std::string& text) { std::printf("spillway: %s\n", text.c_str()); };
  options.trace_events = 1 << 16;
  return options;
}

void train(Model& model, spillway::Engine& engine, int steps) {
  for (int step = 0; step < steps; ++step) {
    for (int m = 0; m < 2; ++m) {
      const Batch batch = next_batch(step * 2 + m);
      const torch::Tensor loss = loss_of(model, batch, engine);
      engine.backward(loss, {.weight = batch.weight, .last = m == 1});
    }
    const spillway::StepResult result = engine.step();
    if (result.status != spillway::StepStatus::updated) continue;  // nothing was changed; the log says why
    std::printf("step %lld: norm %.4f, lr %.1e\n", static_cast<long long>(result.step), result.grad_norm, result.lr);
  }
}

// With several ranks (EngineOptions::communicator) each has rows of its own; with one these calls cost nothing.
void train_on_ranks(Model& model, spillway::Engine& engine, int steps) {
  for (int step = 0; engine.all_ranks(step < steps); ++step) {  // all stop where the first has no more
    const Batch batch = next_batch(step * engine.rank_count() + engine.rank());
    const torch::Tensor loss = loss_of(model, batch, engine);
    engine.backward(loss, {.weight = batch.weight, .last = true});
    engine.step();
    const double mean = engine.mean_over_ranks(loss.item<double>(), batch.weight);
    if (engine.rank() == 0) std::printf("loss %.4f\n", mean);
  }
}

void look_inside(Model& model, spillway::Engine& engine) {
  // States by parameter name: copies in ordinary memory, fp32.
  torch::Tensor weight = engine.weight("head.weight");
  torch::Tensor first_moment = engine.optimizer_state("head.weight", 0);
  const std::int64_t updates = engine.updates("head.weight");
  engine.set_weight("head.weight", weight * 0.99);
  engine.set_optimizer_state("head.weight", 0, torch::zeros_like(first_moment));
  engine.set_updates("head.weight", updates);

  // Between backward and step: the step's gradient, before clipping. What is set is what step() uses.
  const Batch batch = next_batch(99);
  engine.backward(loss_of(model, batch, engine), {.weight = batch.weight, .last = true});
  const torch::Tensor gradient = engine.gradient("head.weight");
  engine.set_gradient("head.weight", gradient * 0.5);
  engine.step();

  // A step that is not to count: its micro-batches are forgotten.
  engine.backward(loss_of(model, batch, engine), {.weight = batch.weight});
  engine.discard_step();

  // Groups change from the next step on: 0 is the optimizer's own, then the configuration's, then those in code.
  engine.set_lr(5e-4);
  spillway::Hyperparameters slower = engine.hyperparameters(engine.group_of("head.weight"));
  slower.beta1 = 0.95;
  engine.set_hyperparameters(slower, engine.group_of("head.weight"));

  // Parameters read or written outside of a gate: first wait for uploads that may be pending.
  engine.wait_parameters();
  std::printf("head.weight is %.6f on average\n", model.head->weight.mean().item<double>());
}

void evaluate(Model& model, spillway::Engine& engine) {
  const torch::NoGradGuard no_grad;  // the gate works without gradients too
  const Batch batch = next_batch(1000);
  std::printf("loss %.4f\n", loss_of(model, batch, engine).item<double>());
}

int main() {
  torch::manual_seed(1);
  Model model;

  // What a run would hold, before anything is made.
  const spillway::MemoryPlan plan = spillway::plan_memory(model, make_config());
  std::printf("states: %s on the device, %s pinned\n", to_string(plan[spillway::Tier::device].total()).c_str(),
              to_string(plan[spillway::Tier::pinned].total()).c_str());
  try {
    spillway::Config small = make_config();
    small.device.memory = spillway::parse_bytes("100KiB");
    spillway::Engine refused(model, small);
  } catch (const spillway::OutOfMemory& error) {
    std::printf("refused, %lld bytes are missing\n", static_cast<long long>(error.missing()));
  }

  spillway::Engine engine(model, make_config(), make_options());

  // Activations are measured with one forward and backward of your own; their gradients are dropped.
  const Batch largest = next_batch(0);
  const spillway::MemoryPlan whole = engine.profile([&] { return loss_of(model, largest, engine); });
  std::printf("with activations: %s on the device\n", to_string(whole[spillway::Tier::device].total()).c_str());

  train(model, engine, 3);
  look_inside(model, engine);
  evaluate(model, engine);

  // A block whose activations are computed again in backward, and one that is called as it is.
  torch::Tensor x = engine.call(model.layers[0], {.recompute = true}, next_batch(5).inputs);
  x = engine.call(model.layers[1], x);
  engine.backward(x.square().mean(), {.last = true});
  engine.step();

  // Everything that a bit-equal resume needs, under any placement; what is given as `program` comes back.
  const std::filesystem::path checkpoints = std::filesystem::temp_directory_path() / "spillway_embedding";
  engine.save(checkpoints, {.keep = 2, .program = "next batch: 5"});
  const std::string program = engine.load(checkpoints);  // the newest of the folder
  std::printf("resumed; the program left word: %s\n", program.c_str());
  std::filesystem::remove_all(checkpoints);

  // Between phases all device and pinned memory can be given back; the module is an ordinary one meanwhile.
  engine.release();
  std::printf("released: %s in use on the device\n",
              to_string(engine.memory_in_use(spillway::Tier::device).total()).c_str());
  engine.restore();
  train(model, engine, 1);
  train_on_ranks(model, engine, 2);

  std::printf("%s", spillway::describe(engine.summary()).c_str());
  engine.write_trace(std::filesystem::temp_directory_path() / "spillway_embedding.json");
  return 0;
}
