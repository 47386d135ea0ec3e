#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the folders of tests/golden with 16-bit working parameters in plain PyTorch, and keeps the loss curves.

Usage: tools/reference_curves.py [--golden FOLDER] [--check] [NAME]...

For each folder the models' forward, written here once more, is first held against the folder's fp32 logits and fp32 loss
curve. Then it trains in bf16 and fp16, twice through the folder's rows: working parameters in that type, fp32 masters,
gradients summed in fp32, AdamW on the masters, no autocast. Variants:

  reference   products of fp32-widened tensors, rounded once, as units that add in fp32 do
  native      16-bit products as PyTorch's own CPU code does them: another legitimate order of rounding
  threads     as reference, with two threads
  no_masters  AdamW straight on the 16-bit parameters: what a run without masters would do
  fp32        everything in fp32

The first goes into FOLDER/NAME/low_precision.json with its distance from each of the others (the largest relative difference
of a step; null: not finite); --check compares with the file that is there instead of writing it. Needs torch alone.
"""

import argparse
import json
import math
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F

NAMES = ["gpt2", "llama", "llama-tied-scaled-rope", "qwen2"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STORED = {"F32": torch.float32, "I32": torch.int32}
EPOCHS = 2  # where masters are missing, small updates are lost: that shows in the second
LOSS_SCALE = {"bf16": 1.0, "fp16": 1024.0}  # never moves in so few steps


# ---- files ----------------------------------------------------------------------------------------------------------

def read_safetensors(file):
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=STORED[entry["dtype"]])
            out[name] = flat.reshape(entry["shape"]).clone()
    return out


class Folder:
    def __init__(self, path):
        self.path = path
        self.config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self.reference = json.loads((path / "reference.json").read_text(encoding="utf-8"))
        self.weights = {}
        for file in sorted(path.glob("model*.safetensors")):
            self.weights.update(read_safetensors(file))
        self.logits = read_safetensors(path / "reference.safetensors")["logits"]
        rows = read_safetensors(path / "rows.safetensors")
        tokens = rows["tokens"].long()
        labels = rows.get("labels", rows["tokens"]).long()
        batch = self.reference["batch"]
        self.batches = list(zip(tokens[:, :-1].split(batch), labels[:, 1:].split(batch)))


# ---- models ---------------------------------------------------------------------------------------------------------

class Wide(torch.autograd.Function):
    """a @ b of 16-bit matrices, each product (forward and backward) widened to fp32 and rounded once."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        g = g.float()
        return (g @ b.float().transpose(-1, -2)).to(a.dtype), (a.float().transpose(-1, -2) @ g).to(b.dtype)


class Model:
    """The forward passes of GPT-2 and the Llama family, over a dictionary of parameters."""

    def __init__(self, config, widened):
        self.config, self.widened = config, widened
        gpt2 = config["model_type"] == "gpt2"
        self.heads = config["n_head" if gpt2 else "num_attention_heads"]
        self.layers = config["n_layer" if gpt2 else "num_hidden_layers"]

    def product(self, a, b):
        return Wide.apply(a, b) if self.widened and a.dtype != torch.float32 else a @ b

    def linear(self, x, weight, bias=None):
        rows = self.product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
        return rows if bias is None else rows + bias

    def by_head(self, x, heads):
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    def attend(self, q, k, v):
        length = q.shape[2]
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = self.product(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
        return self.product(weights, v).transpose(1, 2).flatten(2)

    def __call__(self, p, tokens):
        return (self.gpt2 if self.config["model_type"] == "gpt2" else self.llama)(p, tokens)

    def gpt2(self, p, tokens):
        def norm(x, name):
            return F.layer_norm(x, x.shape[-1:], p[name + ".weight"], p[name + ".bias"], self.config["layer_norm_epsilon"])

        def dense(x, name):
            return self.linear(x, p[name + ".weight"], p[name + ".bias"])

        x = F.embedding(tokens, p["transformer.wte.weight"]) + p["transformer.wpe.weight"][:tokens.shape[1]]
        for i in range(self.layers):
            at = f"transformer.h.{i}."
            parts = dense(norm(x, at + "ln_1"), at + "attn.c_attn").split(x.shape[-1], -1)
            x = x + dense(self.attend(*(self.by_head(part, self.heads) for part in parts)), at + "attn.c_proj")
            inner = F.gelu(dense(norm(x, at + "ln_2"), at + "mlp.c_fc"), approximate="tanh")
            x = x + dense(inner, at + "mlp.c_proj")
        return self.linear(norm(x, "transformer.ln_f"), p["transformer.wte.weight"].t())

    def frequencies(self):
        rope = self.config["rope_parameters"]
        head = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        out = 1 / rope["rope_theta"] ** (torch.arange(0, head, 2).float() / head)
        if rope["rope_type"] == "default":
            return out
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        blend = ((context * out / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # 0: stretched, 1: kept
        return (1 - blend) * out / rope["factor"] + blend * out

    def llama(self, p, tokens):
        def norm(x, name):
            wide = x.float()
            return p[name + ".weight"] * (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + self.config["rms_norm_eps"])).to(x.dtype)

        def dense(x, name):
            return self.linear(x, p[name + ".weight"].t(), p.get(name + ".bias"))

        def rotate(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        x = F.embedding(tokens, p["model.embed_tokens.weight"])
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), self.frequencies())
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for i in range(self.layers):
            at = f"model.layers.{i}."
            y = norm(x, at + "input_layernorm")
            q, k, v = (self.by_head(dense(y, f"{at}self_attn.{name}_proj"), heads) for name, heads in
                       (("q", self.heads), ("k", self.config["num_key_value_heads"]), ("v", self.config["num_key_value_heads"])))
            x = x + dense(self.attend(rotate(q), rotate(k), v), at + "self_attn.o_proj")
            y = norm(x, at + "post_attention_layernorm")
            x = x + dense(F.silu(dense(y, at + "mlp.gate_proj")) * dense(y, at + "mlp.up_proj"), at + "mlp.down_proj")
        head = p["model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"]
        return self.linear(norm(x, "model.norm"), head.t())


# ---- training -------------------------------------------------------------------------------------------------------

def optimizer_of(parameters, settings):
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings["weight_decay"]},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings["lr"], betas=settings["betas"], eps=settings["eps"], foreach=False)


def accumulate(model, working, masters, micro_batches, scale):
    """The step's loss; leaves its gradient in the masters, summed in their type and not scaled."""
    valid = sum(int((targets != -100).sum()) for _, targets in micro_batches)
    total = 0.0
    for tokens, targets in micro_batches:
        logits = model(working, tokens).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid
        gradients = torch.autograd.grad(loss * scale, list(working.values()))
        for master, gradient in zip(masters, gradients):
            gradient = gradient.to(master.dtype) / scale
            master.grad = gradient if master.grad is None else master.grad + gradient
        total += loss.item()
    return total


def train(folder, dtype, scale=1.0, epochs=EPOCHS, widened=True, threads=1, with_masters=True):
    """The losses and gradient norms of all steps. Working parameters of `dtype`; without masters it is their only copy."""
    torch.set_num_threads(threads)
    model = Model(folder.config, widened)
    working = {name: value.to(dtype, copy=True).requires_grad_() for name, value in folder.weights.items()}
    masters = [value.clone() for value in folder.weights.values()] if with_masters else list(working.values())
    optimizer = optimizer_of(masters, folder.reference["optimizer"])
    each, losses, norms = folder.reference["accumulation"], [], []
    for step in range(epochs * folder.reference["steps"]):
        first = step % folder.reference["steps"] * each
        losses.append(accumulate(model, working, masters, folder.batches[first:first + each], scale))
        norms.append(torch.nn.utils.clip_grad_norm_(masters, folder.reference["clip_norm"]).item())
        optimizer.step()
        optimizer.zero_grad()
        if with_masters:
            with torch.no_grad():
                for value, master in zip(working.values(), masters):
                    value.copy_(master)
    return losses, norms


def distance(curve, other):
    """The largest relative difference of two curves; None where one is not finite."""
    if not all(math.isfinite(b) for b in other):
        return None
    return max(abs(a - b) / abs(a) for a, b in zip(curve, other, strict=True))


def check_fp32(folder):
    """Whether the forward passes above are those of the fixture: its logits, then its whole fp32 curve."""
    with torch.no_grad():
        off = (Model(folder.config, False)(folder.weights, folder.batches[0][0]) - folder.logits).abs().max().item()
    curve = distance(folder.reference["losses"], train(folder, torch.float32, epochs=1)[0])
    if off > 1e-5 or curve > 1e-5:
        sys.exit(f"{folder.path}: fp32 logits are off by {off}, the fp32 curve by {curve}")
    return {"logits": off, "losses": curve}


def curves_of(folder):
    out = {"made_with": {"torch": torch.__version__}, "made_by": "tools/reference_curves.py", "epochs": EPOCHS,
           "fp32_off_by": check_fp32(folder), "curves": {}}
    for name, dtype in TYPES.items():
        scale = LOSS_SCALE[name]
        losses, norms = train(folder, dtype, scale)
        variants = {"native": train(folder, dtype, scale, widened=False), "threads": train(folder, dtype, scale, threads=2),
                    "no_masters": train(folder, dtype, scale, with_masters=False), "fp32": train(folder, torch.float32)}
        distances = {key: {"losses": distance(losses, other[0]), "norms": distance(norms, other[1])}
                     for key, other in variants.items()}
        out["curves"][name] = {"loss_scale": scale, "losses": losses, "gradient_norms_before_clipping": norms,
                               "distances": distances}
        print(folder.path.name, name, json.dumps(distances), flush=True)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).resolve().parents[1] / "tests" / "golden"
    parser.add_argument("--golden", type=pathlib.Path, default=default, help="where the folders are")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    parser.add_argument("names", nargs="*", default=NAMES)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    for name in options.names:
        folder = Folder(options.golden / name)
        made, file = curves_of(folder), folder.path / "low_precision.json"
        if not options.check:
            file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            continue
        kept = json.loads(file.read_text(encoding="utf-8"))
        for kind, entry in made["curves"].items():
            off = distance(kept["curves"][kind]["losses"], entry["losses"])
            if off is None or off > 1e-4:
                sys.exit(f"{file}: the {kind} curve is off by {off}")


if __name__ == "__main__":
    main()
