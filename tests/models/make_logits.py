# SPDX-License-Identifier: Apache-2.0
"""Makes the logits-only folders of tests/golden: small random models of the Llama family and what transformers
computes with them (float32, eager attention). Kept so that anyone can see how each number was obtained.
Run: pip install torch==2.11.0 transformers==5.24.0 && python make_logits.py OUT
"""
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

BATCH, LENGTH = 2, 24
TINY = dict(vocab_size=64, max_position_embeddings=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, use_cache=False)
MODELS = {
    "qwen3-logits": transformers.Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
    "qwen3-sliding-logits": transformers.Qwen3Config(
        **TINY, head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "mistral-logits": transformers.MistralConfig(**TINY, sliding_window=7, head_dim=8),
    "llama-bias-logits": transformers.LlamaConfig(
        **dict(TINY, num_key_value_heads=4), attention_bias=True, mlp_bias=True, hidden_act="gelu",
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
}


def make(folder, config, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default leaves norms at one and biases at zero
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
        logits = model(tokens).logits
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    save_file({"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}, folder / "logits.safetensors")
    print(folder.name, sum(p.numel() for p in model.parameters()), float(logits.abs().max()))


if __name__ == "__main__":
    for i, (name, config) in enumerate(MODELS.items()):
        make(pathlib.Path(sys.argv[1]) / name, config, 40 + i)
