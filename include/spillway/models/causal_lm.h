// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/dtype.h"
#include "spillway/core/units.h"
#include "spillway/state/lora_options.h"
#include "spillway/state/model_config.h"

namespace spillway {

/// What one layer block computes. Everything that depends on the batch comes in through the argument, so the block can
/// be computed again from it; nothing but the block's own parameters, constants and the dropout generator is captured.
using BlockForward = std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>;

/// How a model runs one of its layer blocks: must return what `forward(inputs)` returns. Whoever trains binds it, to
/// await, fetch, release or recompute what the block reads around the call. `block.parameters()` is exactly that.
using BlockCall = std::function<std::vector<torch::Tensor>(torch::nn::Module& block, const BlockForward& forward,
                                                           const std::vector<torch::Tensor>& inputs)>;

/// One layer block of a model.
/// Owns: nothing; valid as long as the model.
struct Block {
  std::string name;                     // "embedding", "layers.0", ..., "head"
  torch::nn::Module* module = nullptr;  // what a BlockCall is given; its parameters() are those the forward reads
  std::vector<std::string> parameters;  // their names in the model, in the order of module->parameters()
};

class AttentionConstants;
class Decoder;
class DropoutGenerator;
class LoraEditor;
struct BlockInputs;

/// A decoder-only language model made of layer blocks: the embedding, each layer, the final norm with the head.
///
/// Parameters have Hugging Face's names, in the order of parameter_shapes(config()). A tied head has no parameter of
/// its own: the embedding's weight belongs to the first block and is read by the last one too, which lists it.
/// Dropout acts in training mode only and draws from a generator of the model's own, so that LibTorch's global one
/// neither changes results nor is changed by them.
/// Threads: one at a time.
class CausalLM : public torch::nn::Module {
 public:
  ~CausalLM() override;

  /// Shapes: tokens [batch, length] int64 -> logits [batch, length, vocabulary] in the parameters' type. Token numbers
  /// are not checked here (that would wait for the device): TokenFile does.
  ///
  /// `documents`, where given, has the shape and type of tokens, is on any device, and numbers each position's
  /// document: a position sees those of its own document alone, and positions count up from zero in each. Equal numbers
  /// of a row are one document. -1 is padding: no document sees it, and its logits mean nothing (its target is
  /// kIgnoredTarget). Throws: InvalidArgument for another shape or type, or a length over config().max_position.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& documents = {});

  /// Binds how blocks are run; an empty function goes back to calling them directly.
  /// `newer_weights`: who calls the blocks may have newer values than the parameters, so that saving asks for them.
  void set_block_call(BlockCall call, bool newer_weights = false) {
    block_call_ = std::move(call);
    newer_weights_ = newer_weights;
  }
  bool has_newer_weights() const { return newer_weights_; }
  /// Frees the tables of positions and masks that forward keeps for inputs of one shape; the next one makes them again.
  void forget_tables();

  /// In the order in which forward runs them.
  const std::vector<Block>& blocks() const { return blocks_; }
  const ModelConfig& config() const { return config_; }
  /// What the model's adapters were made with (lora.h); empty where it has none.
  const std::optional<LoraOptions>& lora() const { return lora_; }

  /// Whether any dropout probability is above zero: where none is, the state below never moves.
  bool uses_dropout() const;
  void set_dropout_seed(std::uint64_t seed);
  /// The generator's state, a small byte tensor in host memory: taken before a block and set again, the block draws the
  /// same masks. The state of one kind of device is not valid on another.
  torch::Tensor dropout_state() const;
  void set_dropout_state(const torch::Tensor& state);

 protected:
  /// What a block computes from its inputs (src/models/block_inputs.h) and its parameters.
  using BlockBody = std::function<torch::Tensor(const BlockInputs&)>;

  explicit CausalLM(ModelConfig config);

  /// Adds the next block, which reads the parameters of `parts` (registered in this model already) and nothing else.
  void add_block(std::string name, std::vector<std::shared_ptr<torch::nn::Module>> parts, BlockBody body);
  /// Fills in the parameters' names of the blocks; called last by a model's constructor.
  void name_blocks();
  const std::shared_ptr<DropoutGenerator>& dropout() const { return dropout_; }
  const std::shared_ptr<AttentionConstants>& constants() const { return constants_; }

 private:
  friend class Decoder;
  friend class LoraEditor;

  /// Runs all blocks; `before` may change what a block is given.
  torch::Tensor run(BlockInputs inputs, const std::function<void(std::size_t block, BlockInputs& inputs)>& before);

  ModelConfig config_;
  std::optional<LoraOptions> lora_;
  std::vector<Block> blocks_;
  std::vector<std::shared_ptr<torch::nn::Module>> block_modules_;
  std::vector<BlockBody> bodies_;
  BlockCall block_call_;
  bool newer_weights_ = false;
  std::shared_ptr<DropoutGenerator> dropout_;
  std::shared_ptr<AttentionConstants> constants_;
};

/// A model with random parameters, drawn as its family does, from a generator of its own: the same seed gives the same
/// bits whatever else draws numbers; a 16-bit model is the rounded fp32 one. Throws: InvalidArgument for a `dtype`
/// other than fp32, bf16, fp16.
std::shared_ptr<CausalLM> make_causal_lm(const ModelConfig& config, std::uint64_t seed, DType dtype = DType::f32);

/// A model whose parameters are allocated and not initialised. Throws: as make_causal_lm.
std::shared_ptr<CausalLM> empty_causal_lm(const ModelConfig& config, DType dtype = DType::f32);

/// A model of shapes alone (torch::kMeta): it takes no memory and computes no values, only the shapes of results.
std::shared_ptr<CausalLM> meta_causal_lm(const ModelConfig& config, DType dtype = DType::f32);

struct LoadOptions {
  DType dtype = DType::f32;  // of the parameters; the file's are converted on the way
};

/// Reads a Hugging Face folder (config.json, weights in safetensors), each tensor straight from the mapped file into
/// its parameter. Names may lack the base model's prefix (`transformer.`, `model.`); buffers that files of these
/// families are known to carry are skipped; a stored head of a tied model must equal the embedding bit for bit. Throws:
/// FileError listing every tensor that is missing, unexpected or of another shape or type; what ModelConfig::load and
/// SafetensorsReader throw.
std::shared_ptr<CausalLM> load_causal_lm(const std::filesystem::path& folder, const LoadOptions& options = {});

/// The weights of a Hugging Face folder, tensor by tensor, for a model that does not hold them yet: what
/// EngineOptions::weights takes. Everything is checked here; each tensor is a copy in the file's type, made when asked
/// for; a name that the model did not have when this was called (an adapter's) gives an undefined tensor. Throws: as
/// load_causal_lm.
std::function<torch::Tensor(const std::string& name)> folder_weights(const CausalLM& model,
                                                                     const std::filesystem::path& folder);

struct SaveOptions {
  /// A Hugging Face folder: its config.json (with the element type brought up to date), generation_config.json and
  /// tokenizer files are taken over. Empty: config.json is written from the model's configuration.
  std::filesystem::path source_folder{};
  std::optional<DType> dtype{};  // of the file; empty: the parameters'
  Bytes max_shard{std::int64_t{5} << 30};
  /// Where a parameter's values come from instead of the model: for weights that are elsewhere (a higher-precision
  /// copy, parameters that were released). Asked once a parameter, in order, when its turn to be written comes.
  std::function<torch::Tensor(const std::string& name)> weights{};
  /// A model with adapters is written as the plain model that computes the same: each adapted weight W becomes
  /// W + scaling B A, computed in fp32 and rounded once. The model stays as it is.
  bool merge_lora = false;
  /// False: nothing is written, but `weights` is asked as when it is: for the ranks that take part in what one writes.
  bool write = true;
};

/// Writes a folder that load_causal_lm and transformers read. A tied head is stored once, as the embedding.
/// `folder` may be the source folder: nothing there is half-written at any time. One tensor is in memory at a time
/// beside the model. Throws: InvalidArgument where the source's configuration is not the model's, or the model has
/// adapters and is not to be merged; StateError where no `weights` was given and a parameter's memory is released, or
/// an engine has newer weights (set_block_call); FileError.
void save_causal_lm(const CausalLM& model, const std::filesystem::path& folder, const SaveOptions& options = {});

/// The element that is not a target.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// How many of `targets` count. Blocks: waits for the device where they are on one.
std::int64_t count_targets(const torch::Tensor& targets);

/// The sum of the cross-entropies of all targets that count, in fp32.
/// Shapes: logits [..., vocabulary], targets [...] int64.
torch::Tensor next_token_loss_sum(const torch::Tensor& logits, const torch::Tensor& targets);

/// Their mean: what backward is given, with weight = `valid_targets` (count_targets(targets), known from the data).
/// 0 where none counts.
torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets, std::int64_t valid_targets);

/// `generate` (generate.h) with the likeliest token each time.
std::vector<std::int64_t> generate_greedy(CausalLM& model, std::vector<std::int64_t> prompt,
                                          std::int64_t max_new_tokens,
                                          std::optional<std::int64_t> stop_token = std::nullopt);

}  // namespace spillway
