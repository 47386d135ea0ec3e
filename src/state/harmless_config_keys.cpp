// SPDX-License-Identifier: Apache-2.0
#include "state/model_config_parts.h"

namespace spillway {

const std::set<std::string_view>& harmless_config_keys() {
  static const std::set<std::string_view> keys{
      // Where a model comes from and what wrote its file.
      "_commit_hash", "_name_or_path", "auto_map", "name_or_path", "original_model", "tokenizer_class",
      "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
      // Token numbers.
      "bos_token_id", "decoder_start_token_id", "sep_token_id",
      // How another program runs or returns things.
      "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "_flash_attn_2_enabled",
      "attn_implementation", "cache_implementation", "gradient_checkpointing", "is_decoder", "is_llama_config",
      "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "return_dict",
      "tie_last_hidden_states", "torchscript", "use_bfloat16", "use_cache",
      // Heads for other tasks than language modelling.
      "classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type",
      "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
      "task_specific_params",
      // What transformers no longer reads.
      "_num_labels", "max_sequence_length", "n_ctx", "n_special", "predict_special_tokens",
      // Text generation.
      "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
      "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
      "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
      "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_assistant_tokens",
      "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
      "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
      "target_lookbehind", "temperature", "top_k", "top_p", "typical_p"};
  return keys;
}

}  // namespace spillway
