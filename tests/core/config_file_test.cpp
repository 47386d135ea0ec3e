// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/config_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {
namespace {

std::string refusal(const std::string& json) {
  try {
    parse_config(json, "run.json");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

Config everything() {
  return Config::parse(R"({
    "schedule": "resident", "precision": "bf16",
    "device": {"kind": "cuda", "ordinal": 1, "memory": "48 MiB", "upload_bandwidth": 3e9, "download_bandwidth": 1e9,
               "latency_us": 5, "compute_rate": 2e9},
    "optimizer": {"type": "adam", "lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.25},
    "groups": [{"match": "*.bias", "max_dims": 1, "lr": 0.3, "betas": [0.1, 0.2], "eps": 1e-3, "weight_decay": 0}, {}],
    "lr_schedule": {"type": "cosine", "warmup_steps": 3, "warmup_type": "logarithmic", "warmup_start": 0.25,
                    "total_steps": 40, "final_factor": 0.5},
    "loss_scale": {"initial": 64, "growth": 4, "growth_interval": 7, "backoff": 0.25, "hysteresis": 2, "minimum": 2,
                   "most_skips_at_minimum": 9},
    "low_memory_accumulation": true, "recompute": true, "clip_norm": 1.5, "accumulation": 6, "chunk_elements": 2048,
    "staging_slots": 4, "threads": 5, "cores": "0-4", "instruction_set": "avx2", "host_memory": 1000000})",
                       "run.json");
}

TEST(ConfigFile, WhatIsWrittenIsReadBack) {
  for (const Config& config : {Config{}, everything()}) {
    const std::string text = to_json(config, {});
    EXPECT_EQ(to_json(parse_config(text, "again.json").config, {}), text);
  }
  const std::string text = to_json(everything(), {});
  for (const char* part :
       {"\"schedule\": \"resident\"", "\"kind\": \"cuda\"", "\"memory\": 50331648",
        "\"upload_bandwidth\": 3000000000.0", "\"latency_us\": 5.0", "\"betas\": [0.8,0.9]", "\"match\":\"*.bias\"",
        "\"warmup_type\": \"logarithmic\"", "\"warmup_start\": 0.25", "\"type\": \"adam\"", "\"backoff\": 0.25",
        "\"cores\": \"0-4\"", "\"instruction_set\": \"avx2\"", "\"host_memory\": 1000000"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  }
}

TEST(ConfigFile, EachValueSaysWhereItCameFrom) {
  LoadedConfig loaded = parse_config(
      R"({"clip_norm": 2, "optimizer": {"lr": 0.5}, 
          "device": {"link_bandwidth": "1GB/s", "upload_bandwidth": "2GB/s"}})",
      "run.json");
  loaded.origins["threads"] = "--threads\nsecond line";
  const std::string text = to_json(loaded.config, loaded.origins);
  const auto expect_line = [&](const std::string& value, const std::string& origin) {
    const std::size_t begin = text.find(value);
    ASSERT_NE(begin, std::string::npos) << value << "\n" << text;
    EXPECT_NE(text.substr(begin, text.find('\n', begin) - begin).find("// " + origin), std::string::npos) << text;
  };
  expect_line("\"clip_norm\": 2", "run.json: clip_norm");
  expect_line("\"lr\": 0.5", "run.json: optimizer.lr");
  expect_line("\"upload_bandwidth\": 2", "run.json: device.upload_bandwidth");
  expect_line("\"download_bandwidth\": 1", "run.json: device.link_bandwidth");
  expect_line("\"eps\": 1e-08", "default");
  expect_line("\"threads\": 0", "--threads?second line");
}

TEST(ConfigFile, CommentsAndTrailingCommasAreSkipped) {
  const LoadedConfig loaded = parse_config(R"(// a comment
{ # another
  "schedule": "res//ident#, /*no comment*/",  /* of
  two lines, } */ "groups": [{"match": "a\"//,]",}, ],
  "clip_norm": 3, // the end
})",
                                           "run.json");
  EXPECT_EQ(loaded.config.schedule, "res//ident#, /*no comment*/");
  EXPECT_EQ(loaded.config.groups.at(0).match, "a\"//,]");
  EXPECT_EQ(loaded.config.clip_norm, 3);
  for (const char* wrong : {"{,}", "{\"groups\": [,]}", "{\"clip_norm\": 1,,}", "{\"clip_norm\":,}", "{} /* no end",
                            "{} / ", "{\"schedule\": \"no end", "{\"schedule\": \"no end\\"}) {
    EXPECT_NE(refusal(wrong).find("run.json: "), std::string::npos) << wrong;
  }
}

TEST(ConfigFile, HostileTextIsRefusedWithoutHarm) {
  const std::string deep = "{\"groups\": " + std::string(100000, '[') + std::string(100000, ']') + "}";
  EXPECT_NE(refusal(deep).find("nests deeper"), std::string::npos);
  EXPECT_NE(refusal(std::string("{\"clip_norm\": 1}\0", 17)).find("NUL"), std::string::npos);
  EXPECT_NE(refusal(R"({"clip_norm": 1, "clip_norm": 2})").find("stands twice"), std::string::npos);
  EXPECT_NE(refusal(R"({"fp16": {"enabled": true, "enabled": false}})").find("stands twice"), std::string::npos);
  EXPECT_NE(refusal(R"({"clip_norm": 1e999})").find("not valid JSON"), std::string::npos);
  EXPECT_NE(refusal(R"({"accumulation": 99999999999999999999999})").find("expected an integer"), std::string::npos);
  EXPECT_NE(refusal(R"({"threads": 9223372036854775807})").find("threads"), std::string::npos);
  EXPECT_NE(refusal("").find("not valid JSON"), std::string::npos);
  EXPECT_NE(refusal("[]").find("not a JSON object"), std::string::npos);
  std::string dots = "zero_optimization";
  for (int i = 0; i < 100000; ++i) dots += ".a";
  const std::string many_dots = refusal("{\"fp16\": {}, \"" + dots + "\": 1}");
  EXPECT_NE(many_dots.find("unknown key"), std::string::npos);
  EXPECT_LT(many_dots.size(), 1000u);
  EXPECT_LT(refusal("{\"schedule\": [\"" + std::string(100000, 'x') + "\"]}").size(), 1000u);
}

TEST(ConfigFile, TheEndOfAScheduleMayBeLeftToTheProgram) {
  const LoadedConfig loaded = parse_config(R"({"lr_schedule": {"type": "cosine", "warmup_steps": 5}})", "run.json");
  EXPECT_EQ(loaded.config.lr_schedule.total_steps, 0);
  EXPECT_THROW(loaded.config.validate(), InvalidArgument) << "the program has to give it";
  EXPECT_THROW(Config::parse(R"({"lr_schedule": {"type": "cosine"}})", "run.json"), InvalidArgument);
}

TEST(ConfigFile, FaultsOfValuesNameFileAndKey) {
  for (const auto& [json, part] : std::initializer_list<std::pair<const char*, const char*>>{
           {R"({"device": {"memory": "8 gigs"}})", "run.json: device: memory: "},
           {R"({"device": {"link_bandwidth": "12Gb/s"}})", "run.json: device: link_bandwidth: "},
           {R"({"clip_norm": -1})", "run.json: clip_norm is -1"},
           {R"({"optimizer": {"betas": [1, 1]}})", "run.json: optimizer: a beta is 1"}}) {
    try {
      parse_config(json, "run.json");
      FAIL() << json << " was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

TEST(ConfigFile, AFileIsReadAndAMissingOneNamed) {
  const auto file = std::filesystem::temp_directory_path() / "spillway_config_file_test.json";
  std::ofstream(file) << R"({"zero_optimization": {"stage": 2, "cpu_offload": true}, "gradient_clipping": 2})";
  EXPECT_EQ(Config::load(file).schedule, "zero_offload");
  EXPECT_EQ(load_config(file).origins.at("clip_norm"), file.string() + ": gradient_clipping");
  std::filesystem::remove(file);
  EXPECT_THROW(load_config(file), FileError);
}

}  // namespace
}  // namespace spillway
