// SPDX-License-Identifier: Apache-2.0
// PEFT's adapter_config.json: what is read, and what is refused by name.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "formats/format_support.h"
#include "spillway/core/error.h"
#include "spillway/state/lora_options.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::message_of;
using test::read_file;
using test::TempFolder;
using test::write_file;
using Json = nlohmann::json;

Json written_by_peft() {
  return Json::parse(read_file(golden("llama-lora") / "adapter_config.json"));
}

// The configuration with one key changed.
LoraOptions with(const std::string& key, const std::string& value) {
  Json json = written_by_peft();
  json[key] = Json::parse(value);
  return LoraOptions::parse(json.dump(), "here/adapter_config.json");
}

std::string refusal(const std::string& key, const std::string& value) {
  return message_of<InvalidArgument>([&] { with(key, value); });
}

std::string text_refusal(const std::string& text) {
  return message_of<InvalidArgument>([&] { LoraOptions::parse(text, "here/adapter_config.json"); });
}

TEST(LoraConfig, ReadsWhatPeftWrites) {
  const LoraOptions llama = LoraOptions::load(golden("llama-lora"));
  EXPECT_EQ(llama.rank, 4);
  EXPECT_EQ(llama.alpha, 6);
  EXPECT_EQ(llama.dropout, 0.1);
  EXPECT_TRUE(llama.rank_stabilized);
  EXPECT_EQ(llama.targets.size(), 14U);
  EXPECT_EQ(llama.targets.front(), "model.layers.0.mlp.down_proj");
  const LoraOptions gpt2 = LoraOptions::load(golden("gpt2-lora") / "adapter_config.json");
  EXPECT_EQ(gpt2, (LoraOptions{.rank = 3, .alpha = 12, .targets = {"c_attn", "mlp.c_proj"}}));
}

TEST(LoraConfig, MissingKeysMeanPeftsDefaults) {
  EXPECT_EQ(LoraOptions::parse(R"({"peft_type":"LORA"})", "here"), LoraOptions{});
  EXPECT_TRUE(with("target_modules", "null").targets.empty());
  EXPECT_EQ(with("target_modules", R"("all-linear")").targets, std::vector<std::string>{"all-linear"});
  EXPECT_EQ(with("lora_alpha", "2.5").alpha, 2.5);
  EXPECT_EQ(with("task_type", "null").rank, 4);
  EXPECT_EQ(with("init_lora_weights", R"("gaussian")").rank, 4);
  EXPECT_EQ(with("fan_in_fan_out", "true").rank, 4);
}

TEST(LoraConfig, WhatWouldComputeSomethingElseIsRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"peft_type", R"("LOHA")"},
      {"peft_type", "null"},
      {"task_type", R"("SEQ_CLS")"},
      {"bias", R"("all")"},
      {"bias", R"("lora_only")"},
      {"use_dora", "true"},
      {"use_qalora", "true"},
      {"lora_bias", "true"},
      {"modules_to_save", R"(["lm_head"])"},
      {"rank_pattern", R"({"q_proj": 2})"},
      {"alpha_pattern", R"({"q_proj": 2})"},
      {"layers_to_transform", "[0]"},
      {"layers_to_transform", "0"},
      {"layers_pattern", R"("layers")"},
      {"layer_replication", "[[0, 2], [0, 2]]"},
      {"exclude_modules", R"(["v_proj"])"},
      {"target_parameters", R"(["mlp.experts.down_proj"])"},
      {"trainable_token_indices", "[1, 2]"},
      {"init_lora_weights", R"("pissa")"},
      {"init_lora_weights", R"("loftq")"},
      {"loftq_config", R"({"loftq_bits": 4})"},
      {"alora_invocation_tokens", "[1]"},
      {"use_bdlora", R"({"nblocks": 2})"},
      {"velora_config", R"({"rank": 1})"},
      {"invented_next_year", "true"},
  };
  for (const auto& [key, value] : cases) {
    EXPECT_TRUE(holds(refusal(key, value), {"here/adapter_config.json", fmt::format("\"{}\"", key)}))
        << key << " " << value;
  }
  EXPECT_EQ(with("invented_next_year", "false").rank, 4) << "a new key that is off does nothing";
}

TEST(LoraConfig, NumbersThatCannotBeAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"r", "0"},
      {"r", "-8"},
      {"r", "1e3"},
      {"r", "null"},
      {"r", "\"8\""},
      {"r", "9223372036854775807"},
      {"r", "18446744073709551615"},
      {"lora_alpha", "0"},
      {"lora_alpha", "-1"},
      {"lora_alpha", "1e300"},
      {"lora_alpha", "null"},
      {"lora_dropout", "-0.1"},
      {"lora_dropout", "1.5"},
      {"lora_dropout", "\"0.1\""},
      {"use_rslora", "1"},
      {"fan_in_fan_out", "0"},
      {"target_modules", "[]"},
      {"target_modules", "[1]"},
      {"target_modules", R"(["q_proj", "*"])"},
      {"target_modules", R"(".*\\.(q|v)_proj")"},
  };
  for (const auto& [key, value] : cases) {
    EXPECT_TRUE(holds(refusal(key, value), {fmt::format("\"{}\"", key)})) << key << " " << value;
  }
  EXPECT_TRUE(holds(refusal("lora_dropout", "1"), {"here/adapter_config.json", "dropout of 1"}));
}

TEST(LoraConfig, TextThatIsNoneIsRefused) {
  const std::string whole = written_by_peft().dump();
  for (const std::string& text :
       {std::string(), std::string("null"), std::string("[]"), whole + "x", whole + std::string(1, '\0'),
        std::string(R"({"peft_type":"LORA","r":4,"r":8})"), std::string(100'000, '['), std::string(100'000, '{')}) {
    EXPECT_TRUE(holds(text_refusal(text), {"here/adapter_config.json"})) << text.substr(0, 40);
  }
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_TRUE(holds(text_refusal(whole.substr(0, size)), {"not a configuration of adapters"})) << size;
  }
  EXPECT_TRUE(holds(refusal("target_modules", Json(std::vector<std::string>(10'001, "q_proj")).dump()),
                    {"10001 LoRA targets"}));
}

TEST(LoraConfig, FilesThatCannotBeReadAreNamed) {
  const TempFolder folder;
  const auto message = [&] { return message_of<FileError>([&] { LoraOptions::load(folder.path()); }); };
  EXPECT_TRUE(holds(message(), {"adapter_config.json"}));
  write_file(folder / "adapter_config.json", std::string((16 << 20) + 1, ' '));
  EXPECT_TRUE(holds(message(), {"adapter_config.json", "16777217 bytes"}));
  std::filesystem::remove(folder / "adapter_config.json");
  std::filesystem::create_directory(folder / "adapter_config.json");
  EXPECT_TRUE(holds(message(), {"adapter_config.json"}));
}

}  // namespace
}  // namespace spillway
