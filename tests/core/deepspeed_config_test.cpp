// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "spillway/core/config_file.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// Everything that a test does not look at, in the quietest form.
LoadedConfig read(const std::string& json) {
  return parse_config(json, "ds.json");
}

std::string deepspeed_refusal(const std::string& json) {
  try {
    read(json);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

std::string warnings(const std::string& json) {
  std::string all;
  for (const std::string& warning : read(json).warnings) all += warning + "\n";
  return all;
}

using Pairs = std::vector<std::pair<const char*, const char*>>;

void expect_refusals(const Pairs& cases) {
  for (const auto& [json, part] : cases) {
    const std::string text = deepspeed_refusal(json);
    EXPECT_NE(text.find(part), std::string::npos) << json << "\n" << text;
    EXPECT_EQ(text.rfind("ds.json", 0), 0u) << text;
  }
}

TEST(DeepSpeedConfig, AWholeFileReachesItsFields) {
  const LoadedConfig loaded = read(R"({
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 3e-6, "warmup_max_lr": 3e-5,
                  "warmup_num_steps": 20, "warmup_type": "linear", "total_num_steps": 400}},
    "fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
             "min_loss_scale": 2},
    "bf16": {"enabled": false},
    "data_types": {"grad_accum_dtype": "fp16"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
    "gradient_clipping": 0.5, "steps_per_print": 100})");
  const Config& config = loaded.config;
  EXPECT_EQ(loaded.micro_batch, 4);
  EXPECT_EQ(config.accumulation, 8);
  EXPECT_EQ(config.optimizer, OptimizerKind::adamw);
  EXPECT_EQ(config.hyperparameters, (Hyperparameters{3e-5, 0.8, 0.95, 1e-6, 0.1}));
  EXPECT_EQ(config.lr_schedule.kind, LrScheduleConfig::Kind::linear);
  EXPECT_EQ(config.lr_schedule.warmup, LrScheduleConfig::Warmup::linear);
  EXPECT_EQ(config.lr_schedule.warmup_steps, 20);
  EXPECT_EQ(config.lr_schedule.total_steps, 400);
  EXPECT_DOUBLE_EQ(config.lr_schedule.warmup_start, 0.1);
  EXPECT_DOUBLE_EQ(config.lr_schedule.final_factor, 0.1);
  EXPECT_EQ(config.precision, DType::f16);
  EXPECT_EQ(config.loss_scale.initial, 4096);
  EXPECT_EQ(config.loss_scale.growth_interval, 500);
  EXPECT_EQ(config.loss_scale.hysteresis, 3);
  EXPECT_EQ(config.loss_scale.minimum, 2);
  EXPECT_TRUE(config.low_memory_accumulation);
  EXPECT_EQ(config.schedule, "zero_offload");
  EXPECT_EQ(config.clip_norm, 0.5);
  EXPECT_EQ(loaded.origins.at("optimizer.lr"), "ds.json: scheduler.params.warmup_max_lr");
  EXPECT_EQ(loaded.origins.at("clip_norm"), "ds.json: gradient_clipping");
  ASSERT_EQ(loaded.warnings.size(), 1u);
  EXPECT_EQ(loaded.warnings[0],
            "ds.json: without effect here: steps_per_print, zero_optimization.offload_optimizer.pin_memory");
  EXPECT_NO_THROW(config.validate());
}

TEST(DeepSpeedConfig, WhatIsNotGivenIsDeepSpeedsDefaultAndAutoIsSpillways) {
  const std::string rest = R"(, "optimizer": {"type": "Adam", "params": {}}, "scheduler": {"type": "WarmupLR"}})";
  const LoadedConfig absent = read(R"({"fp16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2)" + rest);
  EXPECT_EQ(absent.config.clip_norm, 1.0);
  EXPECT_EQ(absent.config.optimizer, OptimizerKind::adamw);
  EXPECT_EQ(absent.config.hyperparameters, (Hyperparameters{0.001, 0.9, 0.999, 1e-8, 0}));
  EXPECT_EQ(absent.config.lr_schedule.warmup, LrScheduleConfig::Warmup::logarithmic);
  EXPECT_EQ(absent.config.lr_schedule.warmup_steps, 1000);
  EXPECT_EQ(absent.config.lr_schedule.warmup_start, 0);
  EXPECT_EQ(absent.config.loss_scale.growth_interval, 1000);
  EXPECT_EQ(absent.config.loss_scale.hysteresis, 2);
  EXPECT_EQ(absent.config.schedule, "resident");
  EXPECT_EQ(absent.config.accumulation, 1);
  ASSERT_EQ(absent.warnings.size(), 1u);
  EXPECT_NE(absent.warnings[0].find("gradient_clipping is not given: 1.0"), std::string::npos);
  EXPECT_EQ(absent.origins.at("clip_norm"), "ds.json: gradient_clipping (not given: DeepSpeed's default)");

  const LoadedConfig automatic = read(R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                  "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}})");
  const Config defaults;
  EXPECT_EQ(automatic.config.hyperparameters, defaults.hyperparameters);
  EXPECT_EQ(automatic.config.clip_norm, defaults.clip_norm);
  EXPECT_EQ(automatic.config.precision, defaults.precision);
  EXPECT_EQ(automatic.config.accumulation, 0);
  EXPECT_EQ(automatic.micro_batch, std::nullopt);
  EXPECT_EQ(automatic.config.lr_schedule.kind, LrScheduleConfig::Kind::linear);
  EXPECT_EQ(automatic.config.lr_schedule.warmup_steps, 0);
  EXPECT_EQ(automatic.config.lr_schedule.total_steps, 0);
  EXPECT_FALSE(automatic.origins.contains("optimizer.lr"));
  EXPECT_THROW(automatic.config.validate(), InvalidArgument) << "the program has to give the end of the schedule";
}

TEST(DeepSpeedConfig, AdamMeansAdamWUnlessItSaysOtherwise) {
  const auto kind = [](const std::string& optimizer) {
    return read(R"({"gradient_clipping": 0, "optimizer": )" + optimizer + "}").config;
  };
  EXPECT_EQ(kind(R"({"type": "Adam"})").optimizer, OptimizerKind::adamw);
  EXPECT_EQ(kind(R"({"type": "Adam", "params": {"adam_w_mode": true}})").optimizer, OptimizerKind::adamw);
  EXPECT_EQ(kind(R"({"type": "adam", "params": {"adam_w_mode": false}})").optimizer, OptimizerKind::adam);
  EXPECT_EQ(kind(R"({"type": "AdamW"})").hyperparameters.weight_decay, 0);
  EXPECT_EQ(kind(R"({"type": "AdamW", "params": {"torch_adam": true}})").hyperparameters.weight_decay, 0.01);
  expect_refusals(
      {{R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})", "use the type \"Adam\""},
       {R"({"optimizer": {"type": "Lion", "params": {}}})", "\"Lion\" is not available; use \"AdamW\" or \"Adam\""},
       {R"({"optimizer": {"params": {"lr": 1}}})", "optimizer.type: \"none\" is not available"},
       {R"({"optimizer": {"type": "Adam", "params": {"bias_correction": false}}})", "bias correction"},
       {R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})", "optimizer.params.amsgrad: true would"},
       {R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}})", "use \"gradient_clipping\""},
       {R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}})", "expected two numbers, found [0.9]"},
       {R"({"optimizer": {"type": "Adam", "params": {"lr": -1}}})", "the learning rate is -1"}});
}

TEST(DeepSpeedConfig, NumbersMayStandInStringsAndWholeOnesInExponents) {
  const Config config = read(R"({"train_micro_batch_size_per_gpu": "2", "gradient_accumulation_steps": 4e0,
    "gradient_clipping": "1e-1", "optimizer": {"type": "Adam", "params": {"lr": "1e-5", "betas": ["0.5", 0.75]}},
    "zero_optimization": {"stage": "1", "cpu_offload": "true", "reduce_bucket_size": 5e8}})")
                            .config;
  EXPECT_EQ(config.accumulation, 4);
  EXPECT_EQ(config.clip_norm, 0.1);
  EXPECT_EQ(config.hyperparameters.lr, 1e-5);
  EXPECT_EQ(config.hyperparameters.beta1, 0.5);
  EXPECT_EQ(config.schedule, "zero_offload");
  expect_refusals({{R"({"gradient_clipping": "1e-5x"})", "expected a number, found \"1e-5x\""},
                   {R"({"gradient_clipping": ""})", "expected a number"},
                   {R"({"gradient_clipping": "inf"})", "expected a number"},
                   {R"({"gradient_clipping": true})", "expected a number, found true"},
                   {R"({"gradient_accumulation_steps": 1.5})", "expected a whole number from 1 to"},
                   {R"({"gradient_accumulation_steps": 0})", "expected a whole number from 1 to"},
                   {R"({"train_batch_size": 1e300})", "expected a whole number from 1 to"},
                   {R"({"train_batch_size": 1e999})", "not valid JSON"},
                   {R"({"zero_optimization": {"cpu_offload": 2}})", "expected true or false, found 2"}});
}

TEST(DeepSpeedConfig, BatchSizesMultiplyOrTellTheThird) {
  const auto sizes = [](const std::string& json) {
    const LoadedConfig loaded = read("{" + json + R"(, "gradient_clipping": 1})");
    return std::pair(loaded.micro_batch.value_or(0), loaded.config.accumulation);
  };
  using Sizes = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(sizes(R"("train_batch_size": 12, "train_micro_batch_size_per_gpu": 4)"), Sizes(4, 3));
  EXPECT_EQ(sizes(R"("train_batch_size": 12, "gradient_accumulation_steps": 4)"), Sizes(3, 4));
  EXPECT_EQ(sizes(R"("train_batch_size": 12)"), Sizes(12, 1));
  EXPECT_EQ(sizes(R"("train_micro_batch_size_per_gpu": 4)"), Sizes(4, 1));
  EXPECT_EQ(sizes(R"("train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto")"), Sizes(4, 0));
  EXPECT_EQ(sizes(R"("gradient_accumulation_steps": 4)"), Sizes(0, 4));
  expect_refusals(
      {{R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})",
        "train_batch_size 64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 8 x 1 rank = 32"},
       {R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})", "10 is not"},
       {R"({"train_batch_size": 10, "gradient_accumulation_steps": 4})", "it must divide"}});
}

TEST(DeepSpeedConfig, PrecisionIsOneOfThree) {
  const auto precision = [](const std::string& json) { return read(json).config.precision; };
  EXPECT_EQ(precision(R"({"bf16": {"enabled": true}, "fp16": {"enabled": false}})"), DType::bf16);
  EXPECT_EQ(precision(R"({"bfloat16": {"enabled": true}})"), DType::bf16);
  EXPECT_EQ(precision(R"({"bf16": true})"), DType::bf16);
  EXPECT_EQ(precision(R"({"fp16": true, "bf16": false})"), DType::f16);
  EXPECT_EQ(precision(R"({"fp16.enabled": true})"), DType::f16);
  EXPECT_EQ(precision(R"({"fp16": {}})"), DType::f32);
  EXPECT_EQ(precision(R"({"fp16": null, "bf16": false})"), DType::f32);
  const LossScaleConfig fixed = read(R"({"fp16": {"enabled": true, "loss_scale": 128}})").config.loss_scale;
  EXPECT_EQ(fixed.initial, 128);
  EXPECT_EQ(fixed.minimum, 128);
  EXPECT_GT(fixed.growth_interval, 1'000'000'000'000);
  expect_refusals(
      {{R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "fp16 and bf16 are both enabled"},
       {R"({"fp16": true, "bfloat16": true})", "fp16 and bf16 are both enabled"},
       {R"({"bf16": {}, "bfloat16": {}})", "both given"},
       {R"({"fp16": {"enabled": true, "consecutive_hysteresis": true}})", "fp16.consecutive_hysteresis: true would"},
       {R"({"fp16": {"enabled": true, "loss_scale": -1}})", "fp16.loss_scale: expected 0 (dynamic)"},
       {R"({"fp16": {"enabled": true, "initial_scale_power": 2, "min_loss_scale": 8}})", "fp16.min_loss_scale: 8"},
       {R"({"fp16": [true]})", "fp16: expected an object, found [true]"},
       {R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})", "the working type bf16"},
       {R"({"data_types": {"grad_accum_dtype": "int8"}})", "neither fp32 nor the working type"},
       {R"({"amp": {"enabled": true}})", "use \"fp16\""}});
}

TEST(DeepSpeedConfig, ZeroSaysWhereTheOptimizerIs) {
  const auto schedule = [](const std::string& zero) {
    return read(R"({"gradient_clipping": 1, "zero_optimization": )" + zero + "}").config.schedule;
  };
  for (const char* zero :
       {"true", "false", "null", "{}", R"({"stage": 0})", R"({"stage": 2, "offload_optimizer": {"device": "none"}})",
        R"({"stage": 1, "cpu_offload": false})", R"({"stage": 2, "offload_param": {"device": "none"}})"}) {
    EXPECT_EQ(schedule(zero), "resident") << zero;
  }
  for (const char* zero : {R"({"stage": 1, "cpu_offload": true})", R"({"stage": 2, "offload_optimizer.device": "cpu"})",
                           R"({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}})"}) {
    EXPECT_EQ(schedule(zero), "zero_offload") << zero;
  }
  EXPECT_EQ(read(R"({"zero_optimization.cpu_offload": true})").config.schedule, "zero_offload");
  EXPECT_EQ(read(R"({"zero_optimization.offload_optimizer.device": "cpu"})").config.schedule, "zero_offload");
  expect_refusals(
      {{R"({"zero_optimization": {"stage": 3}})", "zero_optimization.stage: 3 divides parameters"},
       {R"({"zero_optimization": {"stage": 4}})", "from 0 to 3, found 4"},
       {R"({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})",
        "\"nvme\" is not available; use \"cpu\""},
       {R"({"zero_optimization": {"offload_param": {"device": "cpu"}}})", "parameters stay on the device"},
       {R"({"zero_optimization": {"cpu_offload_params": true}})", "cpu_offload_params: true would change"},
       {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}})", "ratio"},
       {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": true}}})", "super_offload"},
       {R"({"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "none"}}})", "different things"},
       {R"({"zero_optimization": {"zero_quantized_gradients": true}})", "zero_quantized_gradients"},
       {R"({"zero_optimization": {"stage": 1}, "zero_optimization.stage": 2})", "is given twice"},
       {R"({"zero_optimization": 2})", "expected an object, found 2"}});
}

TEST(DeepSpeedConfig, SchedulersMapOrAreRefused) {
  const LrScheduleConfig cosine = read(R"({"scheduler": {"type": "WarmupCosineLR", "params": {
      "total_num_steps": 100, "warmup_num_steps": 10, "warmup_min_ratio": 0.25}}})")
                                      .config.lr_schedule;
  EXPECT_EQ(cosine.kind, LrScheduleConfig::Kind::cosine);
  EXPECT_EQ(cosine.warmup, LrScheduleConfig::Warmup::logarithmic);
  EXPECT_EQ(cosine.warmup_start, 0.25);
  EXPECT_EQ(cosine.final_factor, 0.0001);
  const auto scheduled = [](const std::string& scheduler) {
    return read(R"({"gradient_clipping": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "scheduler": )" +
                scheduler + "}");
  };
  const LoadedConfig falling = scheduled(R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}})");
  EXPECT_EQ(falling.config.hyperparameters.lr, 0.001);
  ASSERT_EQ(falling.warnings.size(), 1u);
  EXPECT_NE(falling.warnings[0].find("warmup_max_lr: 0.001 replaces the optimizer's lr 0.0001"), std::string::npos);
  const LoadedConfig steady = scheduled(R"({"type": "WarmupLR", "params": {"warmup_min_lr": 5e-5}})");
  EXPECT_EQ(steady.config.hyperparameters.lr, 1e-4) << "WarmupLR keeps the optimizer's rate where it is given none";
  EXPECT_EQ(steady.config.lr_schedule.warmup_start, 0.5);
  EXPECT_TRUE(steady.warnings.empty());
  expect_refusals(
      {{R"({"scheduler": {"type": "OneCycle"}})", "WarmupLR, WarmupDecayLR, WarmupCosineLR"},
       {R"({"scheduler": {"type": "LRRangeTest", "params": {}}})", "\"LRRangeTest\" is not available"},
       {R"({"scheduler": {}})", "scheduler.type: none is not available"},
       {R"({"scheduler": {"type": "WarmupDecayLR", "params": {}}})", "total_num_steps: is needed"},
       {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}})", "\"log\", \"linear\""},
       {R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}})", "has no such parameter"},
       {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1, "warmup_max_lr": 0.5}}})",
        "warmup_min_lr"},
       {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": "auto"}}})",
        "the lower end of a rate that the file does not say"},
       {R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}}})", "1000 warm-up steps"}});
}

TEST(DeepSpeedConfig, KeysWithoutEffectAreNamedInOneWarningAndOthersRefused) {
  EXPECT_EQ(warnings(R"({"gradient_clipping": 1, "wall_clock_breakdown": false, "tensorboard": {"enabled": true},
                        "zero_optimization": {"stage": 1, "overlap_comm": true, "allgather_bucket_size": 2e8}})"),
            "ds.json: without effect here: tensorboard, wall_clock_breakdown, zero_optimization.allgather_bucket_size, "
            "zero_optimization.overlap_comm\n");
  EXPECT_EQ(warnings(R"({"gradient_clipping": 1, "curriculum_learning": {"enabled": false}, "amp": {},
                        "data_types": {"keep_in_fp32_modules": "auto"}})"),
            "");
  EXPECT_EQ(
      warnings(R"({"gradient_clipping": 1, "elasticity": {"max_train_batch_size": 64}, "data_efficiency": {"seed": 3},
                        "tensor_parallel": {"autotp_size": 1}, "compression_training": {
                          "weight_quantization": {"shared_parameters": {"enabled": false, "rounding": "nearest"},
                                                  "different_groups": {}},
                          "layer_reduction": {"enabled": false, "keep_number_layer": 5}}})"),
      "");
  expect_refusals({{R"({"curriculum_learning": {"enabled": true}})", "curriculum_learning"},
                   {R"({"progressive_layer_drop": {"enabled": "true"}})", "progressive_layer_drop"},
                   {R"({"sequence_parallel_size": 2})", "sequence_parallel_size"},
                   {R"({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}})", "torch_autocast"},
                   {R"({"data_types": {"keep_in_fp32_modules": ["norm"]}})", "keep_in_fp32_modules"},
                   {R"({"elasticity": {"enabled": true}})", "elasticity"},
                   {R"({"tensor_parallel": {"autotp_size": 2}})", "tensor_parallel"},
                   {R"({"compression_training": {"layer_reduction": {"enabled": true}}})", "compression_training"},
                   {R"({"zero_optimisation": {}})", "did you mean \"zero_optimization\""},
                   {R"({"fp16": {}, "gradient_cliping": 1})", "did you mean \"gradient_clipping\""},
                   {R"({"zero_optimization": {"overlap_com": true}})", "did you mean \"overlap_comm\""},
                   {R"({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}})", "ds.json: optimizer.params"},
                   {R"({"fp16": {"enable": true}})", "did you mean \"enabled\""},
                   {R"({"clip_norm": 1, "fp16": {}})", "write all in one of the two"}});
}

}  // namespace
}  // namespace spillway
