#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds adapters that finetune trained and saved against PEFT: loaded on the base by PEFT, do they compute the same?

Usage: tools/check_peft.py [--build FOLDER] [--steps N] [--tolerance X]

For a GPT-2 and a Llama of tests/golden: trains adapters with `finetune`, saves them as a PEFT folder and again merged
into the model, loads the first in PEFT and the second in transformers, and compares the logits of both (fp32, eager
attention) with each other, and the loss with what finetune's own evaluation printed. Adapters that do nothing, names
that PEFT does not find and merged weights of another scale show up as a difference. Needs torch, transformers and peft:

    python3 -m venv build/peft && build/peft/bin/pip install torch transformers peft
    build/peft/bin/python tools/check_peft.py
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
CASES = {
    "gpt2": ["--lora-rank", "4", "--lora-alpha", "8", "--lora-targets", "c_attn,mlp.c_proj"],
    "llama": ["--lora-rank", "8", "--lora-targets", "all-linear"],
    "qwen2": ["--lora-rank", "2", "--lora-alpha", "16", "--lora-targets", "*.0.self_attn.*,up_proj"],
}


def train(finetune, name, output, flags, steps):
    rows = GOLDEN / name / "rows.safetensors"
    command = [finetune, "--model", GOLDEN / name, "--data", rows, "--eval-data", rows, "--eval-batches", "0",
               "--steps", steps, "--batch-size", "4", "--lr", "0.01", "--progress-every", "0", "--output", output, *flags]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"finetune ended with {done.returncode}:\n{done.stderr}")
    return [float(loss) for loss in re.findall(r"^evaluation .*: loss ([0-9.]+)", done.stdout, re.MULTILINE)]


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def loss_of(logits, tokens):
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def check(finetune, name, flags, options, folder):
    evaluations = train(finetune, name, folder / "adapter", flags, options.steps)
    train(finetune, name, folder / "merged", [*flags, "--lora-merge"], options.steps)
    rows = load_file(GOLDEN / name / "rows.safetensors")
    tokens = rows["tokens"].long()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that it misses
        plain = load(GOLDEN / name)(tokens[:, :-1]).logits
        model = peft.PeftModel.from_pretrained(load(GOLDEN / name), folder / "adapter").eval()
        adapted = model(tokens[:, :-1]).logits
        merged = load(folder / "merged")(tokens[:, :-1]).logits
    effect = float((adapted - plain).abs().max())
    difference = float((adapted - merged).abs().max())
    print(f"{name}: adapters move the logits by up to {effect:.3g}; PEFT's and the merged model's differ by {difference:.3g}; "
          f"finetune's loss before and after {evaluations}")
    good = effect > 1e-2 and difference <= options.tolerance
    if "labels" not in rows:
        loss = loss_of(adapted, tokens)
        print(f"{name}: loss by PEFT {loss:.5f}, by finetune {evaluations[-1]:.4f}")
        good = good and abs(loss - evaluations[-1]) <= 1e-4
    return good and evaluations[-1] < evaluations[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release", help="where finetune was built")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference of logits")
    options = parser.parse_args()
    failed = []
    for name, flags in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            if not check(options.build / "examples" / "finetune", name, flags, options, pathlib.Path(folder)):
                failed.append(name)
    print("FAILED: " + ", ".join(failed) if failed else f"{len(CASES)} passed, 0 failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
