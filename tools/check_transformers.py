#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds every family that Spillway runs against Hugging Face transformers, in both directions.

Usage: tools/check_transformers.py [--build FOLDER] [--tokens N] [--only NAME]... [--tolerance X]

For each variant of each family: a folder that transformers made, in shards, is read by Spillway; what `finetune` made of
it by training (in fp32; once a family also in bf16 and as merged adapters), and what Spillway saves with a config.json of
its own, is read by transformers without a missing or unexpected tensor. Of each such folder, the logits of both (fp32,
eager attention) are compared, and the tokens of greedy generation: prompts shorter and longer than the sliding windows,
row by row and all rows of a batch together. Ends with 1 where anything differs.

Needs finetune and model_answers, built with LibTorch. transformers is installed into build/transformers at the first
run, beside .venv's torch where there is one.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / "build" / "transformers"
PACKAGES = ["transformers==5.24.0", "safetensors", "numpy"]
TORCH = "torch==2.11.0"
LENGTHS = (3, 25)  # of prompts: the windows below are between them
ROWS = 3


def run_in_venv():
    """Starts this script again in a virtual environment that has transformers."""
    python = VENV / "bin" / "python"
    marker = VENV / "complete"
    if not marker.exists():
        print(f"Installing transformers into {VENV.relative_to(ROOT)}", flush=True)
        venv.create(VENV, clear=True, symlinks=True, with_pip=True)
        packages = list(PACKAGES)
        known = sorted((ROOT / ".venv").glob("lib/python3*/site-packages/torch"))
        own = sorted(VENV.glob("lib/python3*/site-packages"))[0]
        if known and known[-1].parent.parent.name == own.parent.name:
            (own / "torch_of_setup.pth").write_text(str(known[-1].parent) + "\n")
        else:
            packages.append(TORCH)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        marker.write_text("\n".join(packages) + "\n")
    os.execv(python, [str(python), *sys.argv])


try:
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError:
    if pathlib.Path(sys.prefix).resolve() == VENV.resolve():
        raise
    run_in_venv()

VOCABULARY = 96
SIZES = dict(vocab_size=VOCABULARY, max_position_embeddings=128, hidden_size=32, intermediate_size=48,
             num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
GPT2 = dict(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)
GEMMA = dict(SIZES, head_dim=16, query_pre_attn_scalar=24)
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]


def variants():
    """Name, and configuration; the first of a family is also trained in bf16 and with adapters."""
    t = transformers
    return {
        "gpt2": t.GPT2Config(**GPT2),
        "gpt2 untied, no attention scale": t.GPT2Config(**GPT2, tie_word_embeddings=False, scale_attn_weights=False),
        "llama": t.LlamaConfig(**SIZES),
        "llama biases": t.LlamaConfig(**dict(SIZES, num_key_value_heads=4), attention_bias=True, mlp_bias=True,
                                      hidden_act="gelu"),
        "llama tied, llama3 rope": t.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        "llama linear rope": t.LlamaConfig(
            **SIZES, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
        "mistral window": t.MistralConfig(**SIZES, sliding_window=7, head_dim=16),
        "mistral": t.MistralConfig(**SIZES, sliding_window=None),
        "qwen2": t.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen2 some layers slide": t.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6,
                                                 max_window_layers=1),
        "qwen3": t.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        "qwen3 biases, some layers slide": t.Qwen3Config(
            **SIZES, head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5, layer_types=LAYERS),
        "gemma2": t.Gemma2Config(**GEMMA, sliding_window=7, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
        "gemma2 untied, no caps, biases": t.Gemma2Config(
            **GEMMA, sliding_window=5, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True,
            tie_word_embeddings=False, layer_types=LAYERS),
        "gemma3": t.Gemma3TextConfig(**GEMMA, sliding_window=7, sliding_window_pattern=3),
        "gemma3 scaled rope, capped": t.Gemma3TextConfig(
            **GEMMA, sliding_window=5, layer_types=LAYERS, final_logit_softcapping=5.0,
            rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                                 sliding_attention=dict(rope_type="default", rope_theta=1e4))),
    }


def call(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(word) for word in command)}\nended with {done.returncode}:\n{done.stderr}")


def make_folder(config, folder, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():  # the default leaves norms at one and biases at zero
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB")
    if len(list(folder.glob("*.safetensors"))) < 2:
        sys.exit(f"{folder}: transformers wrote one file; shards were to be tested")


class Checker:
    def __init__(self, options, folder):
        self.options = options
        self.folder = folder
        self.prompts = {f"length{n}": torch.randint(0, VOCABULARY, (ROWS, n)) for n in LENGTHS}
        save_file({name: rows.to(torch.int32) for name, rows in self.prompts.items()}, folder / "prompts.safetensors")
        rows = torch.randint(0, VOCABULARY, (32, 1)) + torch.arange(33) * torch.randint(1, 5, (32, 1))
        save_file({"tokens": (rows % VOCABULARY).to(torch.int32)}, folder / "rows.safetensors")

    def train(self, source, target, *flags):
        call([self.options.build / "examples" / "finetune", "--model", source, "--data",
              self.folder / "rows.safetensors", "--steps", 8, "--batch-size", 4, "--lr", 0.01, "--progress-every", 0,
              "--output", target, *flags])

    def folders(self, name, config, first, seed):
        """What is compared: label to folder. The first one is transformers' own."""
        place = self.folder / f"model{seed}"
        found = {"read": place / "read", "trained": place / "trained"}
        make_folder(config, found["read"], seed)
        self.train(found["read"], found["trained"])
        if first:
            found["bf16"] = place / "bf16"
            self.train(found["read"], found["bf16"], "--precision", "bf16")
            found["merged"] = place / "merged"
            self.train(found["read"], found["merged"], "--lora-rank", 4, "--lora-merge")
        command = [self.options.build / "tests" / "model_answers", self.folder / "prompts.safetensors",
                   self.options.tokens]
        for label, folder in found.items():
            command += [folder, place / f"{label}.answers", place / f"{label}.saved"]
        call(command)
        return place, found

    def theirs(self, folder, faults):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
        for what, names in report.items():
            if names:
                faults.append(f"{folder.name}: {what}: {names}")
        model.eval()
        model.generation_config.eos_token_id = None  # as many tokens as are asked for
        return model

    def tokens_of(self, model, rows):
        return model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=False,
                              max_new_tokens=self.options.tokens, pad_token_id=0)

    def compare(self, place, label, folder, faults):
        """Returns the largest difference of logits relative to the largest logit, and how many tokens were equal."""
        model = self.theirs(folder, faults)
        saved = self.theirs(place / f"{label}.saved", faults)
        answers = load_file(place / f"{label}.answers")
        largest, count = 0.0, 0
        for name, rows in self.prompts.items():
            logits = model(rows).logits
            difference = float((logits - answers[name + ".logits"]).abs().max())
            largest = max(largest, difference / max(1.0, float(logits.abs().max())))
            if not torch.equal(saved(rows).logits, logits):
                faults.append(f"{label}: with Spillway's config.json transformers computes other logits")
            tokens = self.tokens_of(model, rows)
            if tokens.shape[1] != rows.shape[1] + self.options.tokens:
                faults.append(f"{label}: transformers ended after {tokens.shape[1] - rows.shape[1]} tokens")
            for kind in ("tokens", "batch"):
                if not torch.equal(tokens, answers[f"{name}.{kind}"].long()):
                    faults.append(f"{label}: other {kind} after {name}")
            count += 2 * ROWS * self.options.tokens
        if not largest <= self.options.tolerance:
            faults.append(f"{label}: logits differ by {largest:.3g}, relative to the largest one")
        return largest, count, answers

    def stored_types(self, folder):
        types = set()
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                types |= {str(tensors.get_tensor(name).dtype) for name in tensors.keys()}
        return types

    def check(self, name, config, first, seed):
        faults = []
        place, folders = self.folders(name, config, first, seed)
        largest, count, before = 0.0, 0, None
        for label, folder in folders.items():
            difference, tokens, answers = self.compare(place, label, folder, faults)
            largest, count = max(largest, difference), count + tokens
            if before is None:
                before = answers
            elif float((answers["length25.logits"] - before["length25.logits"]).abs().max()) < 1e-2:
                faults.append(f"{label}: training changed nothing")
            expected = "torch.bfloat16" if label == "bf16" else "torch.float32"
            if self.stored_types(folder) != {expected}:
                faults.append(f"{label}: stored as {self.stored_types(folder)}, expected {expected}")
        print(f"{name:34} {', '.join(folders):28} {largest:12.2e} {count:8}  {'differs' if faults else 'equal'}",
              flush=True)
        for fault in faults:
            print("  " + fault, flush=True)
        return largest, count, not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release", help="where programs were built")
    parser.add_argument("--tokens", type=int, default=48, help="how many are generated after each prompt")
    parser.add_argument("--only", action="append", default=[], help="variants whose name contains this")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of logits, relative to the largest (at least 1)")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    start = time.monotonic()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    results, families = [], set()
    print(f"{'variant':34} {'folders':28} {'logits apart':>12} {'tokens':>8}")
    with tempfile.TemporaryDirectory() as folder:
        checker = Checker(options, pathlib.Path(folder))
        for seed, (name, config) in enumerate(variants().items()):
            first = config.model_type not in families
            families.add(config.model_type)
            if options.only and not any(part in name for part in options.only):
                continue
            results.append(checker.check(name, config, first, seed))
    if not results:
        sys.exit(f"--only {options.only}: no variant has such a name")
    failed = sum(not good for _, _, good in results)
    print(f"{len(results) - failed} variants equal, {failed} differ: logits at most {max(r[0] for r in results):.2e} apart, "
          f"{sum(r[1] for r in results)} tokens, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
