// SPDX-License-Identifier: Apache-2.0
#include "spillway/core/config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {
namespace {

std::string config_refusal(const std::string& json) {
  try {
    Config::parse(json, "run.json");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(Config, EveryKeyReachesItsField) {
  const Config config = Config::parse(R"({
    "schedule": "resident", "precision": "bf16",
    "device": {"kind": "emulated", "ordinal": 1, "memory": "48 MiB", "link_bandwidth": "16 GB/s",
               "download_bandwidth": 1e9, "latency_us": 5, "compute_rate": 2e9},
    "optimizer": {"type": "adam", "lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.25},
    "groups": [{"match": "*.bias", "max_dims": 1, "lr": 0.125, "betas": [0.1, 0.2], "eps": 1e-3, "weight_decay": 0}],
    "lr_schedule": {"type": "cosine", "warmup_steps": 3, "total_steps": 40, "final_factor": 0.5},
    "loss_scale": {"initial": 64, "growth": 4, "growth_interval": 7, "backoff": 0.25, "hysteresis": 2, "minimum": 2,
                   "most_skips_at_minimum": 9},
    "low_memory_accumulation": true, "recompute": true, "clip_norm": 1.5, "accumulation": 6, "chunk_elements": 2048,
    "staging_slots": 4, "threads": 5, "host_memory": 1000000})",
                                      "run.json");
  EXPECT_EQ(config.schedule, "resident");
  EXPECT_EQ(config.precision, DType::bf16);
  EXPECT_EQ(config.device.ordinal, 1);
  EXPECT_EQ(config.device.memory->value, 48 << 20);
  EXPECT_EQ(config.device.upload_bandwidth, 16e9);
  EXPECT_EQ(config.device.download_bandwidth, 1e9);
  EXPECT_DOUBLE_EQ(config.device.latency.value, 5e-6);
  EXPECT_EQ(config.device.compute_rate, 2e9);
  EXPECT_EQ(config.optimizer, OptimizerKind::adam);
  const std::vector<Hyperparameters> expected = {{0.5, 0.8, 0.9, 1e-6, 0.25}, {0.125, 0.1, 0.2, 1e-3, 0}};
  EXPECT_EQ(config.group_hyperparameters(), expected);
  EXPECT_EQ(config.groups.at(0).match, "*.bias");
  EXPECT_EQ(config.groups.at(0).max_dims, 1);
  EXPECT_EQ(config.lr_schedule.kind, LrScheduleConfig::Kind::cosine);
  EXPECT_EQ(config.lr_schedule.warmup_steps, 3);
  EXPECT_EQ(config.lr_schedule.total_steps, 40);
  EXPECT_EQ(config.lr_schedule.final_factor, 0.5);
  EXPECT_EQ(config.loss_scale.initial, 64);
  EXPECT_EQ(config.loss_scale.growth, 4);
  EXPECT_EQ(config.loss_scale.growth_interval, 7);
  EXPECT_EQ(config.loss_scale.backoff, 0.25);
  EXPECT_EQ(config.loss_scale.hysteresis, 2);
  EXPECT_EQ(config.loss_scale.minimum, 2);
  EXPECT_EQ(config.loss_scale.most_skips_at_minimum, 9);
  EXPECT_EQ(config.gradient_type(), DType::bf16);
  EXPECT_TRUE(config.recompute);
  EXPECT_EQ(config.clip_norm, 1.5);
  EXPECT_EQ(config.accumulation, 6);
  EXPECT_EQ(config.chunk_elements, 2048);
  EXPECT_EQ(config.staging_slots, 4);
  EXPECT_EQ(config.threads, 5);
  EXPECT_EQ(config.host_memory->value, 1000000);
}

TEST(Config, UnknownKeysAreRefusedWithTheNearestName) {
  // A type of states that runs do not have, too: never taken for the one they have.
  for (const char* key : {"state_format", "optimizer_state_dtype", "master_dtype"}) {
    EXPECT_NE(config_refusal(std::string("{\"") + key + "\": \"bf16\"}").find(key), std::string::npos);
  }
  for (const auto& [json, where, nearest] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {R"({"clip_nrom": 1})", "run.json", "clip_norm"},
           {R"({"device": {"memroy": 5}})", "run.json: device", "memory"},
           {R"({"optimizer": {"weight_decya": 0}})", "run.json: optimizer", "weight_decay"},
           {R"({"groups": [{}, {"mach": "*"}]})", "run.json: groups[1]", "match"},
           {R"({"lr_schedule": {"warmup_step": 1}})", "run.json: lr_schedule", "warmup_steps"},
           {R"({"loss_scale": {"minimun": 1}})", "run.json: loss_scale", "minimum"}}) {
    const std::string text = config_refusal(json);
    EXPECT_EQ(text.rfind(std::string(where) + ": unknown key", 0), 0u) << text;
    EXPECT_NE(text.find(std::string("did you mean \"") + nearest + "\""), std::string::npos) << text;
  }
  // Another word is no slip of any: nothing is suggested.
  EXPECT_EQ(config_refusal(R"({"zebra_crossing": 1})"), "run.json: unknown key \"zebra_crossing\"");
}

TEST(Config, ValuesThatNoRunCouldUseAreRefusedByName) {
  for (const auto& [json, part] : std::vector<std::pair<const char*, const char*>>{
           {"[1]", "not a JSON object"},
           {"{\"clip_norm\": 1", "not valid JSON"},
           {R"({"clip_norm": "1"})", "clip_norm: expected a number"},
           {R"({"clip_norm": -1})", "clip_norm is -1"},
           {R"({"accumulation": 2.5})", "accumulation: expected an integer"},
           {R"({"recompute": 1})", "recompute: expected true or false"},
           {R"({"device": {"upload_bandwidth": -1}})", "device.upload_bandwidth is -1; expected"},
           {R"({"device": {"latency_us": -2}})", "device.latency_us is -2; expected"},
           {R"({"device": {"memory": 0}})", "device.memory is 0 bytes; expected more than zero"},
           {R"({"instruction_set": "sse"})", "instruction_set \"sse\" is not one of baseline"},
           {R"({"precision": "fp8"})", "fp32, bf16, fp16"},
           {R"({"optimizer": {"type": "lion"}})", "\"adamw\", \"adam\""},
           {R"({"optimizer": {"betas": [0.9]}})", "betas: expected two numbers"},
           {R"({"optimizer": {"betas": [0.9, 1]}})", "expected 0 <= beta < 1"},
           {R"({"groups": [{"lr": -1}]})", "learning rate is -1"},
           {R"({"device": {"kind": "gpu"}})", "\"emulated\", \"cuda\""},
           {R"({"staging_slots": 0})", "staging_slots is 0"},
           {R"({"lr_schedule": {"type": "linear"}})", "total_steps"},
           {R"({"lr_schedule": {"warmup_type": "log"}})", "\"linear\", \"logarithmic\""},
           {R"({"lr_schedule": {"warmup_start": 2}})", "warmup_start must be from 0 to 1"},
           {R"({"loss_scale": {"backoff": 2}})", "backoff"},
           {R"({"threads": -1})", "threads: expected 0 to 4096"}}) {
    const std::string text = config_refusal(json);
    EXPECT_NE(text.find(part), std::string::npos) << json << "\n" << text;
  }
}

}  // namespace
}  // namespace spillway
