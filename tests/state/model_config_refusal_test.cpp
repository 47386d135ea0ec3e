// SPDX-License-Identifier: Apache-2.0
// Configurations that are refused: each by the name of the key at fault.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "spillway/state/model_config.h"
#include "state/model_config_support.h"

namespace spillway {
namespace {

using test::holds;
using test::message_of;
using test::parse_config;
using test::refusal;
using test::small;
using test::TempFolder;
using test::write_file;

TEST(ModelConfigRefusal, RopeThatIsNotSupportedIsRefusedByName) {
  const auto rope = [](const std::string& text) { return refusal(small("llama", text)); };
  for (const char* type : {"yarn", "dynamic", "longrope", "mrope"}) {
    EXPECT_TRUE(holds(rope(R"("rope_scaling":{"rope_type":")" + std::string(type) + R"(","factor":2})"),
                      {"rope_scaling.rope_type", type, "default, linear and llama3"}));
  }
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"linear"})"), {"rope_scaling.factor", "missing"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"linear","factor":0.5})"), {"rope_scaling.factor", "0.5"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"linear","factor":2,"beta":1})"), {"rope_scaling.beta"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"default","factor":2})"), {"rope_scaling.factor"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"linear","rope_type":"llama3","factor":2})"), {"rope_type"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"llama3","factor":2,"low_freq_factor":4,"high_freq_factor":4})"),
                    {"high_freq_factor", "above low_freq_factor"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":[1])"), {"rope_scaling", "object"}));
  EXPECT_TRUE(holds(rope(R"("rope_parameters":{"full_attention":{"rope_theta":1}})"), {"full_attention"}));
  EXPECT_TRUE(holds(rope(R"("rope_theta":1,"rope_parameters":{"rope_theta":2})"), {"rope_theta", "keep one"}));
  EXPECT_TRUE(holds(rope(R"("rope_scaling":{"type":"linear","factor":2},"rope_parameters":{"rope_type":"default"})"),
                    {"rope_scaling", "rope_parameters", "keep one"}));
  EXPECT_TRUE(holds(rope(R"("partial_rotary_factor":0.5)"), {"partial_rotary_factor", "0.5"}));
  EXPECT_TRUE(holds(rope(R"("rope_theta":0)"), {"rope_theta"}));
}

TEST(ModelConfigRefusal, ATypingErrorIsNamedWithTheNearestKeyBeforeItsConsequences) {
  // Without the misspelt key Qwen2 has 32 key and value heads, which 4 heads are no multiple of.
  const std::string message = refusal(R"({"model_type":"qwen2","hidden_size":64,"num_attention_heads":4,)"
                                      R"("num_key_value_head":2})");
  EXPECT_TRUE(
      holds(message, {"here/config.json", "\"num_key_value_head\"", "nearest known key is \"num_key_value_heads\""}));
}

TEST(ModelConfigRefusal, WhatChangesTheComputationIsRefusedByName) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"llama", R"("pretraining_tp":2)"},
      {"llama", R"("sliding_window":128)"},
      {"llama", R"("is_encoder_decoder":true)"},
      {"llama", R"("quantization_config":{"bits":4})"},
      {"qwen2", R"("use_mrope":true)"},
      {"llama", R"("hidden_act":"mish")"},
      {"llama", R"("rope_interleaved":true)"},
      {"llama", R"("pruned_heads":{"0":[1]})"},
      {"llama", R"("mlp_bias":1)"},
      {"llama", R"("num_experts":8)"},
      {"llama", R"("query_pre_attn_scalar":64)"},
      {"gemma2", R"("use_bidirectional_attention":true)"},
      {"gemma2", R"("hidden_act":"silu")"},
      {"gemma2", R"("hidden_activation":"mish")"},
      {"gemma2", R"("attn_logit_softcapping":0)"},
      {"gemma2", R"("rope_local_base_freq":10000)"},
      {"gemma3_text", R"("attn_logit_softcapping":50.0)"},
      {"gemma3_text", R"("mlp_bias":true)"},
      {"gemma3_text", R"("vision_config":{})"},
      {"llama", R"("architectures":["LlamaForSequenceClassification"])"}};
  for (const auto& [type, more] : cases) {
    const std::string key = more.substr(1, more.find('"', 1) - 1);
    EXPECT_TRUE(holds(refusal(small(type, more)), {"here/config.json", "\"" + key + "\""})) << more;
  }
  EXPECT_TRUE(holds(refusal(R"({"model_type":"gpt2","add_cross_attention":true})"), {"add_cross_attention"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"gpt2","reorder_and_upcast_attn":true})"), {"reorder_and_upcast_attn"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"bloom"})"), {"model_type", "bloom", "gpt2, llama"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"gemma3"})"), {"model_type", "gemma3_text"}));
  EXPECT_TRUE(holds(refusal("{}"), {"model_type", "missing"}));
}

TEST(ModelConfigRefusal, SizesThatDoNotDivideAreRefused) {
  EXPECT_TRUE(holds(refusal(R"({"model_type":"gpt2","n_embd":100,"n_head":12})"), {"n_head", "100"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"llama","num_key_value_heads":5})"), {"num_key_value_heads", "5"}));
  EXPECT_TRUE(
      holds(refusal(R"({"model_type":"llama","num_attention_heads":24,"head_dim":64})"), {"num_attention_heads"}));
  EXPECT_TRUE(
      holds(refusal(R"({"model_type":"mistral","hidden_size":72,"num_attention_heads":8})"), {"head_dim", "9"}));
  // Mistral and Qwen3 may have heads that do not divide the hidden size.
  EXPECT_EQ(
      parse_config(R"({"model_type":"mistral","hidden_size":5120,"num_attention_heads":32,"head_dim":128})").head_dim,
      128);
}

TEST(ModelConfigRefusal, SizesWhoseTotalCannotBeCountedAreRefused) {
  const std::string message =
      refusal(R"({"model_type":"llama","hidden_size":16777216,"intermediate_size":67108864,"num_hidden_layers":65536,)"
              R"("num_attention_heads":65536,"vocab_size":2147483647})");
  EXPECT_TRUE(holds(message, {"here/config.json", "parameters"}));
}

TEST(ModelConfigRefusal, FilesThatAreNoConfiguration) {
  EXPECT_TRUE(holds(refusal("[]"), {"here/config.json", "object"}));
  EXPECT_TRUE(holds(refusal(""), {"not valid JSON"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"llama","model_type":"gpt2"})"), {"\"model_type\" stands twice"}));
  EXPECT_TRUE(holds(refusal(R"({"id2label":)" + std::string(100, '[')), {"nests deeper"}));
  EXPECT_TRUE(holds(refusal(std::string("{\"model_type\":\"llama\"}\0{", 24)), {"NUL"}));
  const TempFolder folder;
  EXPECT_TRUE(holds(message_of<FileError>([&] { ModelConfig::load(folder.path()); }), {"config.json", "cannot open"}));
  write_file(folder / "config.json", R"({"model_type":"llama","hidden_size":"big"})");
  EXPECT_TRUE(holds(message_of<InvalidArgument>([&] { ModelConfig::load(folder.path()); }),
                    {(folder / "config.json").string(), "\"hidden_size\" is \"big\""}));
}

// Every key that a family reads, with values of other kinds: an error that names the key, or a value that was allowed.
TEST(ModelConfigRefusal, EveryKeyRefusesValuesOfAnotherKind) {
  const std::map<std::string, std::vector<std::string>> integers{
      {"gpt2", {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"}},
      {"qwen3",
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "max_window_layers"}},
      {"gemma3_text", {"head_dim", "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern"}}};
  const std::map<std::string, std::vector<std::string>> others{
      {"gpt2",
       {"layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range", "scale_attn_weights",
        "tie_word_embeddings", "activation_function", "scale_attn_by_inverse_layer_idx"}},
      {"qwen3",
       {"rms_norm_eps", "initializer_range", "attention_dropout", "rope_theta", "tie_word_embeddings", "hidden_act",
        "attention_bias", "use_sliding_window", "rope_parameters", "layer_types", "architectures", "dtype",
        "torch_dtype", "model_type"}},
      {"gemma2", {"attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "rope_theta"}},
      {"gemma3_text", {"final_logit_softcapping", "rope_local_base_freq", "rope_parameters", "layer_types"}}};
  const auto mutate = [](const std::string& family, const std::string& key, const std::string& value) {
    if (key == "model_type") return "{\"model_type\":" + value + "}";
    return R"({"model_type":")" + family + "\",\"" + key + "\":" + value + "}";
  };
  for (const auto& [family, keys] : integers) {
    for (const std::string& key : keys) {
      for (const char* value : {"\"12\"", "12.0", "-5", "true", "[]", "{}", "9223372036854775808",
                                "18446744073709551615", "99999999999", "1e300", "123456789012345678901234567890"}) {
        EXPECT_TRUE(holds(refusal(mutate(family, key, value)), {"\"" + key + "\""})) << key << " " << value;
      }
    }
  }
  for (const auto& [family, keys] : others) {
    for (const std::string& key : keys) {
      for (const char* value : {"-5", "[7]", "{\"a\":1}", "1e300", "\"nonsense\""}) {
        EXPECT_TRUE(holds(refusal(mutate(family, key, value)), {key})) << key << " " << value;
      }
    }
  }
}

// Whatever stands at a key of a real configuration, it is read or refused with the file's and the key's names.
TEST(ModelConfigRefusal, EveryKeyOfTheGoldenConfigurationsMayBeWrong) {
  const std::vector<nlohmann::json> values{nullptr,
                                           "text",
                                           "",
                                           -1,
                                           0,
                                           1,
                                           3,
                                           1LL << 40,
                                           ~0ULL,
                                           0.5,
                                           1e300,
                                           true,
                                           false,
                                           nlohmann::json::array(),
                                           nlohmann::json::object(),
                                           {1, "a"},
                                           {{"rope_type", 1}}};
  int refused = 0;
  for (const char* name : {"gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "gemma2", "gemma3"}) {
    const auto original = nlohmann::json::parse(test::read_file(test::golden(name) / "config.json"));
    for (const auto& [key, old] : original.items()) {
      for (const nlohmann::json& value : values) {
        auto changed = original;
        changed[key] = value;
        try {
          const ModelConfig config = parse_config(changed.dump());
          EXPECT_FALSE(parameter_shapes(config).empty());
        } catch (const InvalidArgument& error) {
          EXPECT_TRUE(holds(error.what(), {"here/config.json", "\""})) << key << " " << value;
          ++refused;
        }
      }
    }
  }
  EXPECT_GT(refused, 700);
}

TEST(ModelConfigRefusal, TheHarmlessKeysOfTheDocumentationMayHoldAnything) {
  std::string text = test::read_file(std::filesystem::path(SPILLWAY_SOURCE_DIR) / "docs/formats.md");
  const auto begin = text.find("<!-- harmless keys -->");
  ASSERT_NE(begin, std::string::npos);
  text = text.substr(begin, text.find("<!-- end -->", begin) - begin);
  int keys = 0;
  for (auto at = text.find('`'); at != std::string::npos; ++keys) {
    const auto end = text.find('`', at + 1);
    ASSERT_NE(end, std::string::npos);
    const std::string key = text.substr(at + 1, end - at - 1);
    for (const char* value : {"null", "-7", "[{\"a\":1}]"}) {
      EXPECT_EQ(parse_config(small("llama", fmt::format("\"{}\":{}", key, value))).layers, 3) << key;
    }
    at = text.find('`', end + 1);
  }
  EXPECT_GT(keys, 60);
}

}  // namespace
}  // namespace spillway
