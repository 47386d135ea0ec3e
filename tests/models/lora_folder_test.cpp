// SPDX-License-Identifier: Apache-2.0
// PEFT's adapter folders: what PEFT wrote computes what PEFT computed, what is written is read again bit for bit, and
// what does not fit is named before the model is touched.
#include <algorithm>

#include "models/model_support.h"
#include "spillway/core/error.h"
#include "spillway/models/lora.h"

namespace spillway::test {
namespace {

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";

// A small model with adapters whose B is not zero.
std::shared_ptr<CausalLM> moved_after_adapting(const ModelConfig& config, const LoraOptions& options,
                                               DType dtype = DType::f32) {
  const auto model = make_causal_lm(config, 5, dtype);
  add_lora(*model, options, 3);
  perturb(*model);
  return model;
}

// The same base without adapters: perturb moved it too.
std::shared_ptr<CausalLM> base_of(const ModelConfig& config, DType dtype = DType::f32) {
  const auto model = make_causal_lm(config, 5, dtype);
  perturb(*model);
  return model;
}

std::vector<std::string> file_names(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

struct Stored {
  std::string name;
  torch::Tensor values;
  DType dtype = DType::f32;
};

// The tensors of an adapter folder, to be changed and written into it again.
std::vector<Stored> read_all(const fs::path& folder) {
  const SafetensorsReader reader(folder / kWeights);
  std::vector<Stored> all;
  for (const std::string& name : reader.names()) all.push_back({name, read_tensor(reader, name)});
  return all;
}

void write_all(const fs::path& folder, const std::vector<Stored>& all) {
  std::vector<TensorSource> sources;
  for (const Stored& one : all) {
    sources.push_back({one.name, one.dtype, one.values.sizes().vec(), [values = one.values](auto target) {
                         std::memcpy(target.data(), values.contiguous().data_ptr(), target.size());
                       }});
  }
  write_safetensors(folder / kWeights, sources);
}

class PeftGolden : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, PeftGolden, testing::Values("gpt2", "llama"),
                         [](const auto& info) { return info.param; });

TEST_P(PeftGolden, LogitsAreThoseOfPeft) {
  const fs::path folder = golden(GetParam() + "-lora");
  const SafetensorsReader reader(folder / "logits.safetensors");
  const torch::Tensor tokens = read_tensor(reader, "tokens").to(torch::kLong);
  const torch::Tensor expected = read_tensor(reader, "logits");
  const torch::NoGradGuard no_grad;
  const auto model = load_causal_lm(golden(GetParam()));
  model->eval();
  EXPECT_GT(largest_difference(model->forward(tokens), expected), 1e-2) << "the adapters do something";
  load_lora(*model, folder);
  EXPECT_LT(largest_difference(model->forward(tokens), expected), 1e-5);
  merge_lora(*model);
  EXPECT_LT(largest_difference(model->forward(tokens), expected), 1e-5);
}

TEST_P(PeftGolden, IsWrittenAgainWithTheNamesAndValuesThatPeftGave) {
  const fs::path source = golden(GetParam() + "-lora");
  const auto model = load_causal_lm(golden(GetParam()));
  load_lora(*model, source);
  const TempFolder folder;
  save_lora(*model, folder.path(), {.base_model = GetParam()});
  EXPECT_EQ(file_names(folder.path()), (std::vector<std::string>{kConfig, kWeights}));
  const SafetensorsReader written(folder / kWeights), read(source / kWeights);
  EXPECT_EQ(written.names().size(), read.names().size());
  for (const std::string& name : read.names()) {
    ASSERT_TRUE(written.contains(name)) << name;
    EXPECT_TRUE(torch::equal(read_tensor(written, name), read_tensor(read, name))) << name;
  }
  const auto ours = nlohmann::json::parse(read_text(folder / kConfig));
  const auto theirs = nlohmann::json::parse(read_text(source / kConfig));
  for (const auto& [key, value] : ours.items()) {
    if (key == "target_modules") continue;  // said shorter
    EXPECT_EQ(value, theirs.at(key)) << key;
  }
  EXPECT_EQ(written.metadata().at("format"), "pt");
}

TEST(LoraFolders, SaveAndLoadAreExact) {
  const std::vector<LoraOptions> variants{
      {},
      {.rank = 2, .alpha = 3.5, .dropout = 0.25, .rank_stabilized = true, .targets = {"all-linear"}},
      {.rank = 1, .targets = {"*.1.mlp.*"}},
  };
  for (const ModelConfig& config : {small_gpt2(), small_llama()}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const LoraOptions& options : variants) {
        const auto model = moved_after_adapting(config, options, dtype), read = base_of(config, dtype);
        const TempFolder folder;
        save_lora(*model, folder.path());
        load_lora(*read, folder.path());
        EXPECT_TRUE(equal_parameters(*read, *model));
        EXPECT_EQ(lora_modules(config, *read->lora()).size(), lora_modules(config, options).size());
        EXPECT_EQ(read->lora()->scaling(), options.scaling());
        EXPECT_EQ(read->lora()->dropout, options.dropout);
        const torch::NoGradGuard no_grad;
        model->eval();
        read->eval();
        EXPECT_TRUE(torch::equal(read->forward(some_tokens(1, 9)), model->forward(some_tokens(1, 9))));
        for (const auto& item : read->named_parameters()) {
          EXPECT_EQ(item.value().requires_grad(), item.key().find(".lora_") != std::string::npos);
        }
      }
    }
  }
}

TEST(LoraFolders, TargetsAreWrittenAsPeftMatchesThem) {
  const auto targets = [](const ModelConfig& config, const std::vector<std::string>& given) {
    const TempFolder folder;
    save_lora(*moved_after_adapting(config, {.targets = given}), folder.path());
    return nlohmann::json::parse(read_text(folder / kConfig)).at("target_modules").get<std::vector<std::string>>();
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(targets(small_llama(), {"*.v_proj", "model.layers.?.self_attn.q_proj"}), (Names{"q_proj", "v_proj"}));
  EXPECT_EQ(targets(small_llama(), {"*.1.*.q_proj"}), Names{"model.layers.1.self_attn.q_proj"});
  EXPECT_EQ(targets(small_gpt2(), {"mlp.c_proj"}), (Names{"transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj"}));
  EXPECT_EQ(targets(small_gpt2(), {"all-linear"}), (Names{"c_attn", "c_fc", "c_proj"}));
}

TEST(LoraFolders, WeightsMayComeFromElsewhereAndBeOfAnotherType) {
  const auto exact = moved_after_adapting(small_llama(), {}),
             model = moved_after_adapting(small_llama(), {}, DType::bf16);
  std::vector<std::string> asked;
  const TempFolder folder;
  save_lora(*model, folder.path(), {.dtype = DType::f32, .weights = [&](const std::string& name) {
                                      asked.push_back(name);
                                      return exact->named_parameters()[name];
                                    }});
  std::vector<std::string> expected;
  for (const ParameterShape& shape : lora_parameter_shapes(small_llama(), {})) expected.push_back(shape.name);
  EXPECT_EQ(asked, expected);
  const auto read = base_of(small_llama());
  load_lora(*read, folder.path());
  EXPECT_TRUE(equal_parameters(*read, *exact));
}

TEST(LoraFolders, AFailedSaveLeavesTheEarlierOne) {
  const auto model = moved_after_adapting(small_llama(), {.rank = 2});
  const TempFolder folder;
  save_lora(*model, folder.path());
  const std::string config = read_text(folder / kConfig), weights = read_text(folder / kWeights);
  const auto other = moved_after_adapting(small_llama(), {.rank = 4});
  int calls = 0;
  EXPECT_THROW(save_lora(*other, folder.path(),
                         {.weights =
                              [&](const std::string& name) {
                                if (++calls == 3) throw StateError("the third cannot be had");
                                return other->named_parameters()[name];
                              }}),
               StateError);
  EXPECT_EQ(read_text(folder / kConfig), config);
  EXPECT_EQ(read_text(folder / kWeights), weights);
  EXPECT_EQ(file_names(folder.path()).size(), 2U);
  save_lora(*other, folder.path());
  load_lora(*base_of(small_llama()), folder.path());
}

TEST(LoraFolders, WhatCannotBeSavedIsRefused) {
  const TempFolder folder;
  const auto plain = base_of(small_llama());
  EXPECT_NE(message_of([&] { save_lora(*plain, folder / "new"); }).find("no LoRA adapters"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder / "new"));
  const auto model = moved_after_adapting(small_llama(), {});
  auto parameter = model->named_parameters()["model.layers.1.self_attn.v_proj.lora_A.weight"];
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, torch::kCPU));
  const std::string message = message_of([&] { save_lora(*model, folder.path()); });
  EXPECT_NE(message.find("v_proj.lora_A.weight is released"), std::string::npos) << message;
  std::ofstream(folder / "file") << "x";
  EXPECT_THROW(save_lora(*moved_after_adapting(small_llama(), {}), folder / "file"), FileError);
}

// A folder of good adapters, to be spoilt.
class HostileFolder : public testing::Test {
 protected:
  void SetUp() override { save_lora(*moved_after_adapting(small_llama(), {.rank = 2}), folder_.path()); }

  // The refusal of the folder as it is now; the model must not be touched by it.
  std::string refusal() {
    const auto model = base_of(small_llama());
    std::string message = message_of([&] { load_lora(*model, folder_.path()); });
    EXPECT_TRUE(equal_parameters(*model, *base_of(small_llama())));
    EXPECT_FALSE(model->lora().has_value());
    EXPECT_TRUE(model->parameters().front().requires_grad());
    return message;
  }
  void change_config(const std::string& key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(read_text(folder_ / kConfig));
    json[key] = value;
    std::ofstream(folder_ / kConfig) << json.dump();
  }

  const TempFolder folder_;
};

TEST_F(HostileFolder, EverythingThatDoesNotFitIsListed) {
  std::vector<Stored> all = read_all(folder_.path());
  const std::string prefix = "base_model.model.model.layers.";
  std::erase_if(all, [&](const Stored& one) { return one.name == prefix + "0.self_attn.q_proj.lora_A.weight"; });
  for (Stored& one : all) {
    if (one.name == prefix + "1.self_attn.v_proj.lora_B.weight") one.values = torch::zeros({2, 16});
    if (one.name == prefix + "1.self_attn.q_proj.lora_B.weight") {
      one.values = torch::zeros({32, 2}, torch::kInt);
      one.dtype = DType::i32;
    }
  }
  all.push_back({prefix + "0.self_attn.o_proj.lora_A.weight", torch::zeros({2, 32})});
  all.push_back({"lora_A.weight", torch::zeros({2, 32})});
  write_all(folder_.path(), all);
  const std::string message = refusal();
  for (const char* part :
       {"Missing (1): base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "Unexpected (2): base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight; lora_A.weight",
        "1.self_attn.v_proj.lora_B.weight [2, 16], expected [16, 2]", "1.self_attn.q_proj.lora_B.weight of type"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << "\nin: " << message;
  }
}

TEST_F(HostileFolder, AConfigurationThatDoesNotGoWithTheWeights) {
  change_config("r", 1 << 20);  // sizes of terabytes are compared, never allocated
  EXPECT_NE(refusal().find("expected [1048576, 32]"), std::string::npos);
  change_config("r", 2);
  change_config("target_modules", nlohmann::json::array({"q_proj"}));
  EXPECT_NE(refusal().find("Unexpected (4)"), std::string::npos);
  change_config("target_modules", nlohmann::json::array({"q_proj", "v_proj", "lm_head"}));
  EXPECT_NE(refusal().find("\"lm_head\" matches no linear layer"), std::string::npos);
  change_config("target_modules", nlohmann::json::array({"q_proj", "../../etc"}));
  EXPECT_NE(refusal().find("matches no linear layer"), std::string::npos);
  change_config("target_modules", nlohmann::json::array({"q_proj", "v_proj"}));
  change_config("use_dora", true);
  EXPECT_NE(refusal().find("\"use_dora\""), std::string::npos);
  change_config("use_dora", false);
  EXPECT_EQ(message_of([&] { load_lora(*base_of(small_llama()), folder_.path()); }), "nothing was thrown");
  EXPECT_NE(message_of([&] { load_lora(*base_of(small_gpt2()), folder_.path()); }).find("c_attn"), std::string::npos);
}

TEST_F(HostileFolder, WeightsTruncatedOrChangedAnywhere) {
  const std::string whole = read_text(folder_ / kWeights);
  for (std::size_t size = 0; size < whole.size(); size += 1 + size / 16) {
    std::ofstream(folder_ / kWeights, std::ios::binary) << whole.substr(0, size);
    EXPECT_NE(refusal().find(kWeights), std::string::npos) << size;
  }
  std::uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (std::size_t at = 0; at < 8 + header; at += 3) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x15);
    std::ofstream(folder_ / kWeights, std::ios::binary) << changed;
    const std::string message = message_of([&] { load_lora(*base_of(small_llama()), folder_.path()); });
    EXPECT_TRUE(message == "nothing was thrown" || message.find(kWeights) != std::string::npos) << message;
  }
}

TEST_F(HostileFolder, FilesThatAreMissing) {
  fs::remove(folder_ / kWeights);
  EXPECT_NE(refusal().find(kWeights), std::string::npos);
  fs::create_directory(folder_ / kWeights);
  EXPECT_NE(refusal().find(kWeights), std::string::npos);
  fs::remove(folder_ / kConfig);
  EXPECT_NE(refusal().find(kConfig), std::string::npos);
}

TEST_F(HostileFolder, AModelWithAdaptersTakesNoOthers) {
  const auto model = moved_after_adapting(small_llama(), {});
  EXPECT_NE(message_of([&] { load_lora(*model, folder_.path()); }).find("adapters already"), std::string::npos);
  EXPECT_EQ(model->lora(), LoraOptions{});
}

}  // namespace
}  // namespace spillway::test
