// SPDX-License-Identifier: Apache-2.0
//
// What models make of prompts, for a program in another language to compare (tools/check_transformers.py):
//   model_answers PROMPTS NEW_TOKENS {FOLDER ANSWERS SAVED}...
// PROMPTS is a safetensors file of int32 rows [batch, length], a tensor for each length. Of each, the file ANSWERS gets
// `NAME.logits` in fp32, and the rows continued by the likeliest tokens: `NAME.tokens` row by row with generate, and
// `NAME.batch` with all rows in one Decoder. SAVED becomes the model's folder with a config.json written from the
// model.
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "spillway/formats/safetensors.h"
#include "spillway/models/causal_lm.h"
#include "spillway/models/generate.h"

namespace {

using spillway::DType;
using torch::Tensor;

using Named = std::vector<std::pair<std::string, Tensor>>;

Named read_prompts(const std::filesystem::path& file) {
  const spillway::SafetensorsReader reader(file);
  Named prompts;
  for (const std::string& name : reader.names()) {
    const spillway::TensorView view = reader.tensor(name);
    const Tensor rows = torch::empty(view.shape, torch::kInt);
    std::memcpy(rows.data_ptr(), view.bytes.data(), view.bytes.size());
    prompts.emplace_back(name, rows.to(torch::kLong));
  }
  return prompts;
}

// Row by row, as programs generate.
Tensor continued(spillway::CausalLM& model, const Tensor& rows, std::int64_t count) {
  std::vector<Tensor> texts;
  for (const Tensor& row : rows.unbind()) {
    const std::int64_t* first = row.const_data_ptr<std::int64_t>();
    texts.push_back(torch::tensor(spillway::generate_greedy(model, {first, first + row.numel()}, count)));
  }
  return torch::stack(texts);
}

// All rows in one cache.
Tensor continued_together(spillway::CausalLM& model, Tensor rows, std::int64_t count) {
  spillway::Decoder decoder(model, rows.size(0), rows.size(1) + count - 1);
  Tensor logits = decoder.start(rows);
  for (std::int64_t i = 1;; ++i) {
    const Tensor tokens = logits.argmax(-1, /*keepdim=*/true);
    rows = torch::cat({rows, tokens}, 1);
    if (i == count) return rows;
    logits = decoder.next(tokens);
  }
}

void write(const std::filesystem::path& file, const Named& tensors) {
  std::vector<spillway::TensorSource> sources;
  for (const auto& [name, values] : tensors) {
    sources.push_back({.name = name,
                       .dtype = values.is_floating_point() ? DType::f32 : DType::i32,
                       .shape = values.sizes().vec(),
                       .fill = [values = values](std::span<std::byte> target) {
                         std::memcpy(target.data(), values.const_data_ptr(), target.size());
                       }});
  }
  spillway::write_safetensors(file, sources);
}

void answer(const Named& prompts, std::int64_t count, const std::filesystem::path& folder,
            const std::filesystem::path& answers, const std::filesystem::path& saved) {
  const torch::NoGradGuard no_grad;
  const auto model = spillway::load_causal_lm(folder);
  model->eval();
  Named tensors;
  for (const auto& [name, rows] : prompts) {
    tensors.emplace_back(name + ".logits", model->forward(rows).to(torch::kFloat).contiguous());
    tensors.emplace_back(name + ".tokens", continued(*model, rows, count).to(torch::kInt).contiguous());
    tensors.emplace_back(name + ".batch", continued_together(*model, rows, count).to(torch::kInt).contiguous());
  }
  write(answers, tensors);
  spillway::save_causal_lm(*model, saved, {.max_shard = spillway::Bytes{40'000}});
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 5 || words.size() % 3 != 2) {
    std::fputs("usage: model_answers PROMPTS NEW_TOKENS {FOLDER ANSWERS SAVED}...\n", stderr);
    return 2;
  }
  try {
    const Named prompts = read_prompts(words[0]);
    for (std::size_t i = 2; i < words.size(); i += 3) {
      answer(prompts, std::stoll(words[1]), words[i], words[i + 1], words[i + 2]);
    }
  } catch (const std::exception& error) {
    std::fputs(fmt::format("model_answers: {}\n", error.what()).c_str(), stderr);
    return 1;
  }
  return 0;
}
