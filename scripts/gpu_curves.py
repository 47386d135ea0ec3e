#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the reference models with `finetune` on a device, and compares losses and gradient norms with PyTorch's.

Usage: gpu_curves.py --finetune PROGRAM [--device cuda] [--tolerance 1e-4] [--presets resident,zero_offload] [--seconds 120]
                     [FOLDER]...
Without folders: those of tests/golden that hold a curve. A curve on a GPU differs from PyTorch's on a processor in the
last bits of each product, hence the tolerance; the two presets must agree with each other to the last digit that the log
has. One line a case; ends with 1 where one falls short. Needs Python's standard library alone.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"


def curve_of(options, folder, preset):
    """The log of one run: a dictionary a step."""
    reference = json.loads((folder / "reference.json").read_text(encoding="utf-8"))
    optimizer = reference["optimizer"]
    with tempfile.TemporaryDirectory() as scratch:
        log = pathlib.Path(scratch) / "log.jsonl"
        command = [options.finetune, "--model", folder, "--data", folder / "rows.safetensors", "--output",
                   pathlib.Path(scratch) / "out", "--preset", preset, "--device", options.device, "--batch-size",
                   reference["batch"], "--grad-accum", reference["accumulation"], "--steps", reference["steps"], "--lr",
                   optimizer["lr"], "--lr-schedule", "constant", "--betas", ",".join(map(str, optimizer["betas"])), "--eps",
                   optimizer["eps"], "--weight-decay", optimizer["weight_decay"], "--clip-norm", reference["clip_norm"],
                   "--precision", "fp32", "--no-shuffle", "--log", log]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False,
                              timeout=options.seconds)  # which ends a run that hangs, too
        if done.returncode != 0:
            raise RuntimeError(f"{folder.name}/{preset}: finetune ended with {done.returncode}:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line and "grad_norm" in line]
    return reference, steps


def distance(values, expected):
    """The largest relative difference; infinite where there are not as many."""
    if len(values) != len(expected):
        return float("inf")
    return max(abs(value - want) / abs(want) for value, want in zip(values, expected))


def compare(options, folder):
    """Whether all presets follow the reference's curve, and each other exactly."""
    well, first = True, None
    for preset in options.presets.split(","):
        try:
            reference, steps = curve_of(options, folder, preset)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error)
            return False
        losses, norms = [line["loss"] for line in steps], [line["grad_norm"] for line in steps]
        loss, norm = distance(losses, reference["losses"]), distance(norms, reference["gradient_norms_before_clipping"])
        same = first in (None, (losses, norms))
        first = first or (losses, norms)
        ok = loss < options.tolerance and norm < options.tolerance and same
        well = well and ok
        print(f"{folder.name}/{preset}: {'ok' if ok else 'SHORT'}: loss {loss:.1e}, norm {norm:.1e}"
              f"{'' if same else ', differs from the first preset'}")
    return well


def main():
    parser = argparse.ArgumentParser(description="Compares training curves on a device with PyTorch's.")
    parser.add_argument("--finetune", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--presets", default="resident,zero_offload")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of one run [120]")
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    folders = options.folders or sorted(path.parent for path in GOLDEN.glob("*/reference.json")
                                        if (path.parent / "rows.safetensors").is_file())
    results = [compare(options, folder) for folder in folders]
    if not results:
        sys.exit("no folder with a reference curve was found")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
