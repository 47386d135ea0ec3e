# SPDX-License-Identifier: Apache-2.0
"""Makes the Gemma folders of tests/golden: small random models, their logits, and twenty steps of training by
transformers and PyTorch (float32, eager attention). Kept so that anyone can see how each number was obtained.
Run: pip install torch==2.11.0 transformers==5.24.0 && python make_curves.py OUT
"""
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

BATCH, LENGTH, STEPS = 4, 32, 20
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
TINY = dict(vocab_size=64, max_position_embeddings=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=24)
MODELS = {
    "gemma2": transformers.Gemma2Config(**TINY, sliding_window=7, attn_logit_softcapping=2.0,
                                        final_logit_softcapping=4.0),
    "gemma3": transformers.Gemma3TextConfig(
        **TINY, sliding_window=5, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                             sliding_attention=dict(rope_type="default", rope_theta=1e4))),
}


def rows_of(seed):
    """Noisy arithmetic sequences, so that a loss curve falls."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 64, (STEPS, BATCH, 1), generator=g)
    stride = torch.randint(1, 5, (STEPS, BATCH, 1), generator=g)
    noise = torch.randint(0, 64, (STEPS, BATCH, LENGTH + 1), generator=g)
    noise *= torch.rand(STEPS, BATCH, LENGTH + 1, generator=g) < 0.02
    return (start + stride * torch.arange(LENGTH + 1) + noise) % 64


def train(model, rows):
    parameters = list(model.parameters())
    groups = [dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=ADAMW["weight_decay"]),
              dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"])
    losses, norms = [], []
    for tokens in rows:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, norms


def make(folder, config, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default leaves norms at zero
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    rows = rows_of(seed)
    with torch.no_grad():
        logits = model(rows[0][:, :-1]).logits.contiguous()
    losses, norms = train(model, rows)
    final = {"final." + name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file({"tokens": rows.flatten(0, 1).to(torch.int32)}, folder / "rows.safetensors")
    save_file({"logits": logits, **final}, folder / "reference.safetensors")
    (folder / "reference.json").write_text(json.dumps(dict(
        made_with=dict(torch=torch.__version__, transformers=transformers.__version__), dtype="float32", batch=BATCH,
        sequence=LENGTH, steps=STEPS, accumulation=1,
        optimizer=dict(name="AdamW", **ADAMW, decayed="parameters of two or more dimensions"), clip_norm=1.0,
        losses=losses, gradient_norms_before_clipping=norms), indent=1) + "\n")
    print(folder.name, sum(p.numel() for p in model.parameters()), f"loss {losses[0]:.4f} -> {losses[-1]:.4f},",
          f"norms {min(norms):.3f} to {max(norms):.3f}, logits up to {float(logits.abs().max()):.3f}")


if __name__ == "__main__":
    for i, (name, config) in enumerate(MODELS.items()):
        make(pathlib.Path(sys.argv[1]) / name, config, 60 + i)
