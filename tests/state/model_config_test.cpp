// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/model_config.h"

#include <gtest/gtest.h>

#include <map>

#include "spillway/formats/safetensors.h"
#include "state/model_config_support.h"

namespace spillway {
namespace {

using test::golden;
using test::holds;
using test::parse_config;
using test::refusal;
using test::small;
using Shape = std::vector<std::int64_t>;

std::int64_t total(const ModelConfig& config) {
  std::int64_t sum = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) sum += parameter.numel();
  return sum;
}

class GoldenModel : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenModel, ShapesEqualThoseOfItsWeights) {
  const ModelConfig config = ModelConfig::load(golden(GetParam()));
  const SafetensorsReader weights(golden(GetParam()));
  const auto shapes = parameter_shapes(config);
  EXPECT_EQ(shapes.size(), weights.names().size());
  for (const ParameterShape& parameter : shapes) {
    ASSERT_TRUE(weights.contains(parameter.name)) << parameter.name;
    EXPECT_EQ(weights.tensor(parameter.name).shape, parameter.shape) << parameter.name;
    EXPECT_EQ(weights.tensor(parameter.name).numel(), parameter.numel()) << parameter.name;
  }
  EXPECT_EQ(config.stored_dtype, DType::f32);
  const bool gemma = config.norm_plus_one;
  EXPECT_EQ(config.eos_token, gemma ? 1 : 0);
  EXPECT_EQ(config.norm_eps, gemma ? 1e-6 : 1e-5);
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel,
                         ::testing::Values("gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "gemma2", "gemma3"));

TEST(ModelConfig, GoldenGemma) {
  const ModelConfig second = ModelConfig::load(golden("gemma2")), third = ModelConfig::load(golden("gemma3"));
  for (const ModelConfig& config : {second, third}) {
    EXPECT_EQ(config.head_dim, 16);
    EXPECT_EQ(config.query_pre_attn_scalar, 24);
    EXPECT_EQ(config.padding_token, 0);
    EXPECT_TRUE(config.tied_head && config.branch_norms && config.scale_embedding);
    EXPECT_EQ(config.activation, Activation::gelu_tanh);
  }
  EXPECT_EQ(second.attention_softcap, 2.0);
  EXPECT_EQ(second.logit_softcap, 4.0);
  EXPECT_EQ(second.layer_slides, (std::vector<bool>{true, false, true}));
  EXPECT_EQ(second.sliding_rope_theta, std::nullopt);
  EXPECT_FALSE(second.qk_norm);
  EXPECT_EQ(third.logit_softcap, std::nullopt);
  EXPECT_EQ(third.layer_slides, (std::vector<bool>{true, true, false}));
  EXPECT_EQ(third.sliding_rope_theta, 1e4);
  EXPECT_EQ(third.rope_theta, 1e6);
  EXPECT_EQ(third.rope.type, RopeScaling::Type::linear);
  EXPECT_EQ(third.rope.factor, 8.0);
  EXPECT_TRUE(third.qk_norm);
}

TEST(ModelConfig, GoldenGpt2) {
  const ModelConfig config = ModelConfig::load(golden("gpt2") / "config.json");
  EXPECT_EQ(config.family, ModelFamily::gpt2);
  EXPECT_EQ(config.intermediate, 256);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.activation, Activation::gelu_tanh);
  EXPECT_TRUE(config.tied_head);
  EXPECT_EQ(config.attention_dropout + config.residual_dropout + config.embedding_dropout, 0.0);
}

TEST(ModelConfig, GoldenScaledRope) {
  const ModelConfig config = ModelConfig::load(golden("llama-tied-scaled-rope"));
  EXPECT_EQ(config.rope.type, RopeScaling::Type::llama3);
  EXPECT_EQ(config.rope_theta, 500000.0);
  EXPECT_EQ(config.rope.factor, 8.0);
  EXPECT_EQ(config.rope.low_freq_factor, 1.0);
  EXPECT_EQ(config.rope.high_freq_factor, 4.0);
  EXPECT_EQ(config.rope.original_max_position, 64);
  EXPECT_TRUE(config.tied_head);
}

TEST(ModelConfig, MissingKeysMeanTheFamilysDefaults) {
  const ModelConfig gpt2 = parse_config(R"({"model_type":"gpt2"})");
  EXPECT_EQ(gpt2.vocabulary, 50257);
  EXPECT_EQ(gpt2.max_position, 1024);
  EXPECT_EQ(gpt2.layers, 12);
  EXPECT_EQ(gpt2.norm_eps, 1e-5);
  EXPECT_EQ(gpt2.residual_dropout, 0.1);
  EXPECT_EQ(gpt2.eos_token, 50256);
  EXPECT_TRUE(gpt2.tied_head);
  EXPECT_EQ(total(gpt2), 124'439'808);

  const ModelConfig llama = parse_config(R"({"model_type":"llama"})");
  EXPECT_EQ(llama.kv_heads, 32);
  EXPECT_EQ(llama.head_dim, 128);
  EXPECT_EQ(llama.max_position, 2048);
  EXPECT_EQ(llama.norm_eps, 1e-6);
  EXPECT_EQ(llama.rope_theta, 10000.0);
  EXPECT_EQ(llama.eos_token, 2);
  EXPECT_FALSE(llama.tied_head);
  EXPECT_EQ(llama.sliding_window, std::nullopt);
  EXPECT_EQ(total(llama), 6'738'415'616);

  const ModelConfig mistral = parse_config(R"({"model_type":"mistral"})");
  EXPECT_EQ(mistral.kv_heads, 8);
  EXPECT_EQ(mistral.intermediate, 14336);
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_TRUE(mistral.layer_slides.empty());
  EXPECT_EQ(mistral.max_position, 131072);
  EXPECT_EQ(total(mistral), 7'241'732'096);

  const ModelConfig qwen2 = parse_config(R"({"model_type":"qwen2"})");
  EXPECT_EQ(qwen2.vocabulary, 151936);
  EXPECT_EQ(qwen2.kv_heads, 32);
  EXPECT_EQ(qwen2.intermediate, 22016);
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.attention_output_bias);
  EXPECT_EQ(qwen2.sliding_window, std::nullopt);
  EXPECT_EQ(qwen2.eos_token, std::nullopt);

  const ModelConfig qwen3 = parse_config(R"({"model_type":"qwen3","hidden_size":1024,"num_attention_heads":16,)"
                                         R"("num_key_value_heads":8})");
  EXPECT_EQ(qwen3.head_dim, 128);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.attention_bias);
}

TEST(ModelConfig, PublishedModelsHaveTheirPublishedSizes) {
  const ModelConfig llama31 = parse_config(
      R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,"bos_token_id":128000,
      "eos_token_id":[128001,128008,128009],"hidden_act":"silu","hidden_size":4096,"initializer_range":0.02,
      "intermediate_size":14336,"max_position_embeddings":131072,"mlp_bias":false,"model_type":"llama",
      "num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":8,"pretraining_tp":1,"rms_norm_eps":1e-05,
      "rope_scaling":{"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
      "original_max_position_embeddings":8192,"rope_type":"llama3"},"rope_theta":500000.0,"tie_word_embeddings":false,
      "torch_dtype":"bfloat16","transformers_version":"4.42.3","use_cache":true,"vocab_size":128256})");
  EXPECT_EQ(total(llama31), 8'030'261'248);
  EXPECT_EQ(llama31.stored_dtype, DType::bf16);
  EXPECT_EQ(llama31.eos_token, 128001);
  EXPECT_EQ(llama31.rope.original_max_position, 8192);

  const ModelConfig qwen25 = parse_config(
      R"({"architectures":["Qwen2ForCausalLM"],"hidden_size":896,"intermediate_size":4864,"max_window_layers":24,
      "model_type":"qwen2","num_attention_heads":14,"num_hidden_layers":24,"num_key_value_heads":2,"rms_norm_eps":1e-06,
      "rope_theta":1000000,"sliding_window":32768,"tie_word_embeddings":true,"use_mrope":false,
      "use_sliding_window":false,"vocab_size":151936,"eos_token_id":151643})");
  EXPECT_EQ(total(qwen25), 494'032'768);
  EXPECT_EQ(qwen25.rope_theta, 1e6);

  const ModelConfig qwen3 = parse_config(
      R"({"architectures":["Qwen3ForCausalLM"],"attention_bias":false,"head_dim":128,"hidden_size":1024,
      "intermediate_size":3072,"max_position_embeddings":40960,"max_window_layers":28,"model_type":"qwen3",
      "num_attention_heads":16,"num_hidden_layers":28,"num_key_value_heads":8,"rope_scaling":null,"rope_theta":1000000,
      "sliding_window":null,"tie_word_embeddings":true,"use_sliding_window":false,"vocab_size":151936})");
  EXPECT_EQ(total(qwen3), 596'049'920);
  EXPECT_EQ(qwen3.head_dim, 128);

  const ModelConfig gemma2 = parse_config(
      R"({"architectures":["Gemma2ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
      "attn_logit_softcapping":50.0,"bos_token_id":2,"cache_implementation":"hybrid","eos_token_id":1,
      "final_logit_softcapping":30.0,"head_dim":256,"hidden_act":"gelu_pytorch_tanh",
      "hidden_activation":"gelu_pytorch_tanh","hidden_size":2304,"initializer_range":0.02,"intermediate_size":9216,
      "max_position_embeddings":8192,"model_type":"gemma2","num_attention_heads":8,"num_hidden_layers":26,
      "num_key_value_heads":4,"pad_token_id":0,"query_pre_attn_scalar":256,"rms_norm_eps":1e-06,"rope_theta":10000.0,
      "sliding_window":4096,"torch_dtype":"float32","use_cache":true,"vocab_size":256000})");
  EXPECT_EQ(total(gemma2), 2'614'341'888);
  EXPECT_EQ(gemma2.layer_slides.size(), 26U);
  EXPECT_TRUE(gemma2.layer_slides[0] && !gemma2.layer_slides[1] && gemma2.layer_slides[24]);

  const ModelConfig gemma3 = parse_config(
      R"({"architectures":["Gemma3ForCausalLM"],"attention_bias":false,"attn_logit_softcapping":null,
      "cache_implementation":"hybrid","eos_token_id":[1,106],"final_logit_softcapping":null,"head_dim":256,
      "hidden_activation":"gelu_pytorch_tanh","hidden_size":1152,"intermediate_size":6912,
      "max_position_embeddings":32768,"model_type":"gemma3_text","num_attention_heads":4,"num_hidden_layers":26,
      "num_key_value_heads":1,"pad_token_id":0,"query_pre_attn_scalar":256,"rms_norm_eps":1e-06,
      "rope_local_base_freq":10000,"rope_scaling":null,"rope_theta":1000000,"sliding_window":512,
      "sliding_window_pattern":6,"torch_dtype":"bfloat16","vocab_size":262144})");
  EXPECT_EQ(total(gemma3), 999'885'952);
  EXPECT_EQ(gemma3.sliding_window, 512);
  EXPECT_TRUE(gemma3.layer_slides[4] && !gemma3.layer_slides[5] && gemma3.layer_slides[6]);
}

TEST(ModelConfig, NullIsNotMissing) {
  EXPECT_EQ(parse_config(R"({"model_type":"mistral","sliding_window":null})").sliding_window, std::nullopt);
  EXPECT_EQ(parse_config(R"({"model_type":"mistral","num_key_value_heads":null})").kv_heads, 32);
  EXPECT_EQ(parse_config(R"({"model_type":"llama","head_dim":null,"pretraining_tp":null})").head_dim, 128);
  EXPECT_EQ(parse_config(R"({"model_type":"gpt2","n_inner":null})").intermediate, 3072);
  EXPECT_EQ(parse_config(R"({"model_type":"llama","eos_token_id":null})").eos_token, std::nullopt);
  EXPECT_TRUE(holds(refusal(R"({"model_type":"qwen3","head_dim":null})"), {"\"head_dim\" is null", "integer"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"llama","hidden_size":null})"), {"\"hidden_size\" is null"}));
  EXPECT_TRUE(holds(refusal(R"({"model_type":"llama","rope_theta":null})"), {"\"rope_theta\" is null"}));
}

TEST(ModelConfig, BothFormsOfRopeMeanTheSame) {
  const std::string inner = R"("factor":4.0,"low_freq_factor":1,"high_freq_factor":4,)"
                            R"("original_max_position_embeddings":32)";
  const std::vector<std::string> forms{
      R"("rope_theta":5e5,"rope_scaling":{"rope_type":"llama3",)" + inner + "}",
      R"("rope_theta":500000,"rope_scaling":{"type":"llama3",)" + inner + "}",
      R"("rope_parameters":{"rope_type":"llama3","rope_theta":500000.0,)" + inner + "}",
      R"("rope_theta":500000.0,"rope_parameters":{"type":"llama3","rope_type":"llama3",)" + inner + "}"};
  for (const std::string& form : forms) {
    const ModelConfig config = parse_config(small("llama", form));
    EXPECT_EQ(config.rope_theta, 500000.0) << form;
    EXPECT_EQ(config.rope, (RopeScaling{RopeScaling::Type::llama3, 4.0, 1.0, 4.0, 32})) << form;
  }
  const ModelConfig linear = parse_config(small("qwen2", R"("rope_scaling":{"type":"linear","factor":2.5})"));
  EXPECT_EQ(linear.rope.type, RopeScaling::Type::linear);
  EXPECT_EQ(linear.rope.factor, 2.5);
  EXPECT_EQ(linear.rope_theta, 10000.0);
  for (const char* plain : {R"("rope_scaling":null)", R"("rope_scaling":{})", R"("rope_parameters":null)",
                            R"("rope_parameters":{"rope_type":"default","rope_theta":10000})"}) {
    EXPECT_EQ(parse_config(small("llama", plain)).rope, RopeScaling{}) << plain;
  }
}

TEST(ModelConfig, Llama3RopeTakesItsOriginalLengthFromWhereItStands) {
  const auto with = [](const std::string& outer, const std::string& in) {
    return small("llama", outer +
                              R"("rope_scaling":{"rope_type":"llama3","factor":2,"low_freq_factor":1,)"
                              R"("high_freq_factor":4)" +
                              in + "}");
  };
  EXPECT_EQ(parse_config(with("", "")).rope.original_max_position, 128);
  EXPECT_EQ(parse_config(with(R"("original_max_position_embeddings":64,)", "")).rope.original_max_position, 64);
  EXPECT_TRUE(
      holds(refusal(with(R"("original_max_position_embeddings":64,)", R"(,"original_max_position_embeddings":32)")),
            {"rope_scaling.original_max_position_embeddings", "64"}));
}

TEST(ModelConfig, QwenWindows) {
  const auto qwen = [](const std::string& more) { return parse_config(small("qwen2", more)); };
  EXPECT_EQ(qwen(R"("use_sliding_window":true)").sliding_window, std::nullopt);  // from layer 28 on, of 3
  const ModelConfig last = qwen(R"("use_sliding_window":true,"max_window_layers":2)");
  EXPECT_EQ(last.sliding_window, 4096);
  EXPECT_EQ(last.layer_slides, (std::vector<bool>{false, false, true}));
  const ModelConfig all = qwen(R"("use_sliding_window":true,"max_window_layers":0,"sliding_window":7)");
  EXPECT_EQ(all.sliding_window, 7);
  EXPECT_TRUE(all.layer_slides.empty());
  const ModelConfig listed =
      qwen(R"("use_sliding_window":true,"layer_types":["sliding_attention","full_attention","sliding_attention"])");
  EXPECT_EQ(listed.layer_slides, (std::vector<bool>{true, false, true}));
  EXPECT_EQ(qwen(R"("use_sliding_window":true,"max_window_layers":0,"sliding_window":null)").sliding_window,
            std::nullopt);

  const std::string sliding = R"("layer_types":["sliding_attention","full_attention","full_attention"])";
  EXPECT_TRUE(holds(refusal(small("qwen2", sliding)), {"layer_types", "use_sliding_window"}));
  EXPECT_TRUE(holds(refusal(small("qwen3", R"("layer_types":["full_attention"])")), {"layer_types", "3 strings"}));
  EXPECT_TRUE(holds(refusal(small("qwen2", R"("layer_types":["full_attention","full_attention","chunked_attention"])")),
                    {"layer_types", "chunked_attention"}));
}

TEST(ModelConfig, GemmaWindows) {
  const auto slides = [](const char* type, const std::string& more) { return parse_config(small(type, more)); };
  EXPECT_EQ(slides("gemma2", "").layer_slides, (std::vector<bool>{true, false, true}));
  EXPECT_EQ(slides("gemma3_text", R"("sliding_window_pattern":2)").layer_slides,
            (std::vector<bool>{true, false, true}));
  const ModelConfig all = slides("gemma3_text", "");  // the sixth would not
  EXPECT_EQ(all.sliding_window, 4096);
  EXPECT_TRUE(all.layer_slides.empty());
  EXPECT_EQ(slides("gemma3_text", R"("sliding_window_pattern":1)").sliding_window, std::nullopt);
  const std::string full = R"("layer_types":["full_attention","full_attention","full_attention"])";
  EXPECT_EQ(slides("gemma3_text", R"("sliding_window_pattern":3,)" + full).sliding_window, std::nullopt);
  EXPECT_TRUE(holds(refusal(small("gemma2", R"("sliding_window":null)")), {"sliding_window", "some layers slide"}));
  EXPECT_EQ(slides("gemma2", R"("sliding_window":8,"sliding_window_size":8)").sliding_window, 8);
  EXPECT_TRUE(holds(refusal(small("gemma2", R"("sliding_window_size":8)")),
                    {"\"sliding_window_size\" is 8", "\"sliding_window\" is what counts"}));
  EXPECT_TRUE(holds(refusal(small("gemma2", R"("sliding_window_pattern":2)")), {"sliding_window_pattern"}));
}

TEST(ModelConfig, GemmaHasTwoRotaryBases) {
  const auto gemma = [](const std::string& more) { return parse_config(small("gemma3_text", more)); };
  EXPECT_EQ(gemma("").rope_theta, 1e6);
  EXPECT_EQ(gemma("").sliding_rope_theta, 1e4);
  const std::string scaled = R"("rope_theta":5e5,"rope_type":"linear","factor":8)";
  for (const std::string& form :
       {std::string(R"("rope_theta":5e5,"rope_local_base_freq":2e3,"rope_scaling":{"rope_type":"linear","factor":8})"),
        R"("rope_parameters":{"full_attention":{)" + scaled + R"(},"sliding_attention":{"rope_theta":2000}})"}) {
    const ModelConfig config = gemma(form);
    EXPECT_EQ(config.rope_theta, 5e5) << form;
    EXPECT_EQ(config.sliding_rope_theta, 2e3) << form;
    EXPECT_EQ(config.rope, (RopeScaling{.type = RopeScaling::Type::linear, .factor = 8})) << form;
  }
  const auto refused = [](const std::string& more) { return refusal(small("gemma3_text", more)); };
  EXPECT_TRUE(holds(refused(R"("rope_parameters":{"rope_theta":1e4})"), {"rope_parameters.rope_theta"}));
  EXPECT_TRUE(holds(refused(R"("rope_parameters":{"sliding_attention":{"rope_type":"linear","factor":2}})"),
                    {"rope_parameters.sliding_attention"}));
  EXPECT_TRUE(holds(refused(R"("rope_theta":1,"rope_parameters":{"full_attention":{"rope_theta":2}})"),
                    {"rope_theta", "keep one"}));
  EXPECT_TRUE(holds(refused(R"("rope_parameters":{"full_attention":{"rope_type":"yarn"}})"),
                    {"rope_parameters.full_attention.rope_type", "yarn"}));
  EXPECT_TRUE(holds(refused(R"("rope_scaling":{"type":"linear","factor":2},)"
                            R"("rope_parameters":{"full_attention":{"rope_type":"default"}})"),
                    {"rope_scaling", "keep one"}));
}

TEST(ModelConfig, MistralLayerTypesMustAgreeWithItsWindow) {
  const std::string full = R"("layer_types":["full_attention","full_attention","full_attention"])";
  EXPECT_EQ(parse_config(small("mistral", full + R"(,"sliding_window":null)")).sliding_window, std::nullopt);
  EXPECT_TRUE(holds(refusal(small("mistral", full)), {"layer_types", "sliding_window"}));
}

TEST(ModelConfig, BiasesOfEachFamily) {
  const ModelConfig llama = parse_config(small("llama", R"("attention_bias":true,"mlp_bias":true)"));
  const auto shapes = parameter_shapes(llama);
  std::map<std::string, Shape> by_name;
  for (const ParameterShape& parameter : shapes) by_name[parameter.name] = parameter.shape;
  EXPECT_EQ(by_name.at("model.layers.2.self_attn.o_proj.bias"), (Shape{64}));
  EXPECT_EQ(by_name.at("model.layers.2.self_attn.k_proj.bias"), (Shape{32}));
  EXPECT_EQ(by_name.at("model.layers.2.mlp.gate_proj.bias"), (Shape{160}));
  EXPECT_EQ(by_name.at("model.layers.2.mlp.down_proj.bias"), (Shape{64}));
  EXPECT_TRUE(holds(refusal(small("mistral", R"("attention_bias":true)")), {"attention_bias", "only false"}));
  EXPECT_FALSE(parse_config(small("mistral", R"("attention_bias":false)")).attention_bias);
  EXPECT_TRUE(parse_config(small("qwen3", R"("attention_bias":true)")).attention_output_bias);
  EXPECT_TRUE(parse_config(small("gemma2", R"("attention_bias":true)")).attention_output_bias);
}

TEST(ModelConfig, ParametersStandInRegistrationOrder) {
  const auto names_of = [](const ModelConfig& config, std::int64_t block) {
    std::vector<std::string> names;
    for (const ParameterShape& parameter : parameter_shapes(config)) {
      if (parameter.block == block) names.push_back(parameter.name);
    }
    return names;
  };
  const ModelConfig qwen3 = parse_config(small("qwen3"));
  EXPECT_EQ(names_of(qwen3, 0), (std::vector<std::string>{"model.embed_tokens.weight"}));
  std::vector<std::string> layer;
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                           "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                           "input_layernorm", "post_attention_layernorm"}) {
    layer.push_back("model.layers.0." + std::string(name) + ".weight");
  }
  EXPECT_EQ(names_of(qwen3, 1), layer);
  EXPECT_EQ(names_of(qwen3, 4), (std::vector<std::string>{"model.norm.weight", "lm_head.weight"}));

  const ModelConfig gemma = parse_config(small("gemma3_text"));
  EXPECT_EQ(names_of(gemma, 1).size(), 13U);
  EXPECT_EQ(names_of(gemma, 1).back(), "model.layers.0.post_feedforward_layernorm.weight");
  EXPECT_EQ(names_of(gemma, 1)[11], "model.layers.0.pre_feedforward_layernorm.weight");
  EXPECT_EQ(names_of(gemma, 4), (std::vector<std::string>{"model.norm.weight"}));

  const ModelConfig gpt2 = ModelConfig::load(golden("gpt2"));
  EXPECT_EQ(names_of(gpt2, 0), (std::vector<std::string>{"transformer.wte.weight", "transformer.wpe.weight"}));
  EXPECT_EQ(names_of(gpt2, 2).front(), "transformer.h.1.ln_1.weight");
  EXPECT_EQ(names_of(gpt2, 2)[2], "transformer.h.1.attn.c_attn.weight");
  EXPECT_EQ(names_of(gpt2, 2).back(), "transformer.h.1.mlp.c_proj.bias");
  EXPECT_EQ(names_of(gpt2, 3), (std::vector<std::string>{"transformer.ln_f.weight", "transformer.ln_f.bias"}));
}

TEST(ModelConfig, Gpt2SizesMayHaveTheirGeneralNames) {
  const ModelConfig config = parse_config(R"({"model_type":"gpt2","hidden_size":48,"num_attention_heads":3,)"
                                          R"("num_hidden_layers":5,"max_position_embeddings":64,"vocab_size":256})");
  EXPECT_EQ(config.hidden, 48);
  EXPECT_EQ(config.heads, 3);
  EXPECT_EQ(config.layers, 5);
  EXPECT_EQ(config.max_position, 64);
  EXPECT_TRUE(holds(refusal(R"({"model_type":"gpt2","hidden_size":48,"n_embd":96})"), {"hidden_size", "n_embd", "96"}));
}

TEST(ModelConfig, PaddingTokensThatStopAGradient) {
  EXPECT_EQ(parse_config(small("llama", R"("pad_token_id":5)")).padding_token, 5);
  EXPECT_EQ(parse_config(small("llama", R"("pad_token_id":-1)")).padding_token, 255);
  EXPECT_EQ(parse_config(small("llama", R"("pad_token_id":null)")).padding_token, std::nullopt);
  EXPECT_EQ(parse_config(small("gemma2")).padding_token, 0);
  EXPECT_EQ(parse_config(small("gemma2", R"("pad_token_id":null)")).padding_token, std::nullopt);
  EXPECT_EQ(parse_config(R"({"model_type":"gpt2","pad_token_id":7})").padding_token, std::nullopt);
  EXPECT_TRUE(holds(refusal(small("llama", R"("pad_token_id":256)")), {"pad_token_id", "256"}));
}

}  // namespace
}  // namespace spillway
