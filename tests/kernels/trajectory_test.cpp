// SPDX-License-Identifier: Apache-2.0
// Twelve steps of PyTorch's optimizers: each kernel ends as close to the float64 run as PyTorch's own float32 run does,
// within a factor of two.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/bit_equality.h"
#include "spillway/formats/safetensors.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;
using nlohmann::json;

const std::string kFolder = std::string(SPILLWAY_SOURCE_DIR) + "/tests/golden/optimizers/";

std::vector<json> recorded_cases() {
  return json::parse(std::ifstream(kFolder + "reference.json")).at("cases");
}

template <class T>
std::vector<T> read(const SafetensorsReader& reader, const std::string& name) {
  const TensorView view = reader.tensor(name);
  std::vector<T> values(static_cast<std::size_t>(view.numel()));
  if (view.bytes.size() != values.size() * sizeof(T)) throw std::runtime_error(name + " has another type");
  std::memcpy(values.data(), view.bytes.data(), view.bytes.size());
  return values;
}

Hyper hyper_of(const json& entry) {
  Hyper hyper;
  hyper.lr = entry.at("lr");
  hyper.beta1 = entry.contains("betas") ? entry["betas"][0].get<double>() : 0;
  hyper.beta2 = entry.contains("betas") ? entry["betas"][1].get<double>() : 0;
  hyper.eps = entry.value("eps", 0.0);
  hyper.weight_decay = entry.value("weight_decay", 0.0);
  hyper.momentum = entry.value("momentum", 0.0);
  return hyper;
}

const Optimizer& optimizer_of(const json& entry) {
  const std::map<std::string, std::string> names{{"AdamW", "adamw"}, {"Adam", "adam"}, {"Adagrad", "adagrad"}};
  const std::string type = entry.at("optimizer");
  const std::string name = type == "SGD" ? (entry.value("nesterov", false) ? "nesterov" : "momentum") : names.at(type);
  for (const Optimizer& optimizer : optimizers()) {
    if (optimizer.name == name) return optimizer;
  }
  throw std::runtime_error("no optimizer for " + type);
}

Problem run(const CpuKernels& set, const json& entry, const SafetensorsReader& reader) {
  Problem state{read<float>(reader, "p0"), {}, {}, read<float>(reader, "grads")};
  state.s0.resize(state.p.size());
  state.s1.resize(state.p.size());
  const Hyper hyper = hyper_of(entry);
  const int steps = entry.at("steps");
  for (int step = 1; step <= steps; ++step) {
    const float* g = state.g.data() + static_cast<std::size_t>(step - 1) * state.p.size();
    optimizer_of(entry).kernel(set, hyper, step, 1, state.p.data(), state.s0.data(), state.s1.data(), g, Element::f32,
                               nullptr, Element::none, static_cast<std::int64_t>(state.p.size()));
  }
  return state;
}

double largest_error(const std::vector<float>& values, const std::vector<double>& exact) {
  double largest = 0;
  for (std::size_t i = 0; i < values.size(); ++i) largest = std::max(largest, std::fabs(values[i] - exact[i]));
  return largest;
}

// States are kept in the order of their use; PyTorch's float32 states differ from ours by rounding alone.
void expect_close(const std::vector<float>& actual, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  float scale = 0;
  for (float value : expected) scale = std::max(scale, std::fabs(value));
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 1e-6f * (std::fabs(expected[i]) + scale)) << what << ", element " << i;
  }
}

TEST(Trajectory, AsCloseToTheFloat64RunAsPyTorch) {
  const SafetensorsReader reader(kFolder + "reference.safetensors");
  const auto entries = recorded_cases();
  ASSERT_EQ(entries.size(), 7u);
  for (const json& entry : entries) {
    const std::string name = entry.at("name");
    const auto exact = read<double>(reader, name + ".p.f64");
    const double allowed = 2 * largest_error(read<float>(reader, name + ".p"), exact);
    ASSERT_GT(allowed, 0);
    for (const CpuKernels* set : kernel_sets()) {
      EXPECT_LE(largest_error(run(*set, entry, reader).p, exact), allowed) << name << " on " << set->name;
    }
  }
}

TEST(Trajectory, StatesAreThoseOfPyTorch) {
  const SafetensorsReader reader(kFolder + "reference.safetensors");
  const std::map<std::string, std::pair<std::string, std::string>> states{{"AdamW", {"exp_avg", "exp_avg_sq"}},
                                                                          {"Adam", {"exp_avg", "exp_avg_sq"}},
                                                                          {"Adagrad", {"sum", ""}},
                                                                          {"SGD", {"momentum_buffer", ""}}};
  for (const json& entry : recorded_cases()) {
    const std::string name = entry.at("name");
    const auto& [first, second] = states.at(entry.at("optimizer"));
    for (const CpuKernels* set : kernel_sets()) {
      const Problem state = run(*set, entry, reader);
      expect_close(state.s0, read<float>(reader, name + "." + first), name + "." + first);
      if (!second.empty()) expect_close(state.s1, read<float>(reader, name + "." + second), name + "." + second);
    }
  }
}

}  // namespace
}  // namespace spillway::test
