// SPDX-License-Identifier: Apache-2.0
// Hugging Face folders: what is read equals what was written, and what does not fit is named.
#include <algorithm>

#include "models/model_support.h"
#include "spillway/core/error.h"

namespace spillway::test {
namespace {

const char* const kFolders[] = {"gpt2",   "llama", "llama-tied-scaled-rope", "qwen2", "qwen3-logits", "mistral-logits",
                                "gemma2", "gemma3"};

std::int64_t shard_count(const fs::path& folder) {
  return std::count_if(fs::directory_iterator(folder), fs::directory_iterator(),
                       [](const auto& entry) { return entry.path().extension() == ".safetensors"; });
}

// The tensors of a golden folder, to be changed and written as a folder of its own.
struct Folder {
  explicit Folder(const std::string& name) : name(name) {
    const SafetensorsReader reader(golden(name));
    for (const std::string& tensor : reader.names()) tensors.emplace_back(tensor, read_tensor(reader, tensor));
  }

  torch::Tensor& operator[](const std::string& wanted) {
    for (auto& [tensor, values] : tensors) {
      if (tensor == wanted) return values;
    }
    return tensors.emplace_back(wanted, torch::Tensor()).second;
  }

  void remove(const std::string& wanted) {
    std::erase_if(tensors, [&](const auto& item) { return item.first == wanted; });
  }

  void write(const fs::path& folder) const {
    std::vector<TensorSource> sources;
    for (const auto& [tensor, values] : tensors) {
      sources.push_back({tensor, DType::f32, values.sizes().vec(), [values = values](std::span<std::byte> target) {
                           std::memcpy(target.data(), values.contiguous().data_ptr(), target.size());
                         }});
    }
    write_safetensors_folder(folder, sources, Bytes{1 << 30});
    fs::copy_file(golden(name) / "config.json", folder / "config.json", fs::copy_options::overwrite_existing);
  }

  std::string name;
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
};

TEST(Folders, SaveAndLoadAreExact) {
  for (const char* name : kFolders) {
    const auto model = load_causal_lm(golden(name));
    for (const std::int64_t max_shard : {1 << 30, 50'000}) {
      const TempFolder folder;
      save_causal_lm(*model, folder.path(), {.source_folder = golden(name), .max_shard = Bytes{max_shard}});
      EXPECT_EQ(shard_count(folder.path()) > 1, max_shard == 50'000) << name;
      EXPECT_TRUE(equal_parameters(*model, *load_causal_lm(folder.path()))) << name;
      const auto written = nlohmann::json::parse(read_text(folder / "config.json"));
      EXPECT_EQ(written, nlohmann::json::parse(read_text(golden(name) / "config.json"))) << name;
    }
  }
}

TEST(Folders, AConfigurationIsWrittenWhereThereIsNoSource) {
  for (const char* name : {"gpt2", "llama", "llama-tied-scaled-rope", "qwen2", "qwen3-logits", "qwen3-sliding-logits",
                           "mistral-logits", "llama-bias-logits", "gemma2", "gemma3"}) {
    const auto model = load_causal_lm(golden(name));
    const TempFolder folder;
    save_causal_lm(*model, folder.path());
    const auto read = load_causal_lm(folder.path());
    EXPECT_TRUE(equal_parameters(*model, *read)) << name;
    EXPECT_EQ(read->config().stored_dtype, DType::f32) << name;
    const torch::NoGradGuard no_grad;
    const torch::Tensor tokens = some_tokens(2, 24);
    EXPECT_TRUE(torch::equal(model->forward(tokens), read->forward(tokens))) << name;
  }
}

TEST(Folders, TypesAreConvertedOnTheWay) {
  const TempFolder folder;
  const auto wide = load_causal_lm(golden("llama"));
  save_causal_lm(*wide, folder.path(), {.source_folder = golden("llama"), .dtype = DType::bf16});
  EXPECT_EQ(nlohmann::json::parse(read_text(folder / "config.json")).at("dtype"), "bfloat16");
  const auto stored = load_causal_lm(folder.path());
  const auto direct = load_causal_lm(golden("llama"), {.dtype = DType::bf16});
  for (const auto& item : wide->named_parameters()) {
    const torch::Tensor rounded = item.value().detach().to(torch::kBFloat16);
    EXPECT_TRUE(torch::equal(direct->named_parameters()[item.key()], rounded)) << item.key();
    EXPECT_TRUE(torch::equal(stored->named_parameters()[item.key()], rounded.to(torch::kFloat))) << item.key();
  }
  const TempFolder again;
  save_causal_lm(*direct, again.path());
  EXPECT_EQ(SafetensorsReader(again.path()).tensor("lm_head.weight").dtype, DType::bf16);
}

TEST(Folders, WritingOverTheSourceIsSafe) {
  const TempFolder folder;
  const Folder source("llama");
  source.write(folder.path());
  std::ofstream(folder / "tokenizer.json") << "{}";
  const auto model = load_causal_lm(folder.path());
  perturb(*model);
  save_causal_lm(*model, folder.path(), {.source_folder = folder.path(), .max_shard = Bytes{50'000}});
  EXPECT_TRUE(equal_parameters(*model, *load_causal_lm(folder.path())));
  EXPECT_EQ(read_text(folder / "tokenizer.json"), "{}");
  EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
  const TempFolder copy;
  save_causal_lm(*model, copy.path(), {.source_folder = folder.path()});
  EXPECT_EQ(read_text(copy / "tokenizer.json"), "{}");
}

TEST(Folders, ASourceOfAnotherModelIsRefused) {
  const auto model = load_causal_lm(golden("llama"));
  const TempFolder folder;
  EXPECT_THROW(save_causal_lm(*model, folder.path(), {.source_folder = golden("qwen2")}), InvalidArgument);
  EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
}

TEST(Folders, WeightsMayComeFromElsewhere) {
  const auto model = load_causal_lm(golden("gpt2"), {.dtype = DType::bf16});
  const auto masters = load_causal_lm(golden("gpt2"));
  std::vector<std::string> asked;
  const TempFolder folder;
  save_causal_lm(*model, folder.path(), {.dtype = DType::f32, .weights = [&](const std::string& name) {
                                           asked.push_back(name);
                                           return masters->named_parameters()[name].t().contiguous().t();
                                         }});
  EXPECT_TRUE(equal_parameters(*masters, *load_causal_lm(folder.path())));
  EXPECT_EQ(asked, model->named_parameters().keys());
}

TEST(Folders, ReleasedParametersAreNotSaved) {
  const auto model = load_causal_lm(golden("gpt2"));
  auto parameter = model->named_parameters()["transformer.h.1.ln_1.weight"];
  parameter.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, torch::kCPU));
  const TempFolder folder;
  const std::string message = message_of([&] { save_causal_lm(*model, folder.path()); });
  EXPECT_NE(message.find("transformer.h.1.ln_1.weight is released"), std::string::npos) << message;
}

TEST(Folders, ATiedModelStoresTheEmbeddingOnce) {
  const TempFolder folder;
  save_causal_lm(*load_causal_lm(golden("gpt2")), folder.path());
  const SafetensorsReader reader(folder.path());
  EXPECT_TRUE(reader.contains("transformer.wte.weight"));
  EXPECT_FALSE(reader.contains("lm_head.weight"));
}

TEST(Folders, AStoredHeadOfATiedModelMustBeTheEmbedding) {
  const TempFolder folder;
  Folder source("qwen2");
  source["lm_head.weight"] = source["model.embed_tokens.weight"].clone();
  source.write(folder.path());
  EXPECT_TRUE(equal_parameters(*load_causal_lm(folder.path()), *load_causal_lm(golden("qwen2"))));
  source["lm_head.weight"][200][3] += 1e-6;
  source.write(folder.path());
  const std::string message = message_of([&] { load_causal_lm(folder.path()); });
  EXPECT_NE(message.find("tie_word_embeddings"), std::string::npos) << message;
}

TEST(Folders, KnownBuffersAndBaseModelNamesAreRead) {
  for (const auto& [name, prefix] : {std::pair("gpt2", "transformer."), std::pair("qwen2", "model.")}) {
    Folder source(name);
    for (auto& [tensor, values] : source.tensors) {
      ASSERT_TRUE(tensor.starts_with(prefix)) << tensor;
      tensor = tensor.substr(std::string(prefix).size());
    }
    source["h.0.attn.bias"] = torch::ones({1, 1, 128, 128});
    source["h.0.attn.masked_bias"] = torch::tensor(-1e4F);
    source["layers.0.self_attn.rotary_emb.inv_freq"] = torch::ones({8});
    const TempFolder folder;
    source.write(folder.path());
    EXPECT_TRUE(equal_parameters(*load_causal_lm(folder.path()), *load_causal_lm(golden(name)))) << name;
  }
}

TEST(Folders, EverythingThatDoesNotFitIsListed) {
  const TempFolder folder;
  Folder source("llama");
  source.remove("model.norm.weight");
  source.remove("lm_head.weight");
  source["model.layers.0.mlp.up_proj.weight"] = torch::zeros({64, 160});
  source["model.layers.2.mlp.up_proj.weight"] = torch::zeros({160, 64});
  source.write(folder.path());
  const std::string message = message_of([&] { load_causal_lm(folder.path()); });
  for (const char* part :
       {"Missing (2): model.norm.weight; lm_head.weight", "Unexpected (1): model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight [64, 160], expected [160, 64]"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << "\nin: " << message;
  }
}

}  // namespace
}  // namespace spillway::test
