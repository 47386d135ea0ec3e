#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills training at random moments, saves included, and resumes it: it must end as if nothing had happened.

Usage: resume_test.py <finetune program> [number of kills, 6 by default]
"""
import array
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

INTERRUPTED = 4
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}
# Each resume is under another one of these.
PLACEMENTS = (["--preset", "zero_offload", "--chunk-size", "2Ki"], ["--preset", "resident"],
              ["--preset", "zero_offload", "--threads", "2"], ["--preset", "zero_offload", "--recompute"])


def demand(condition, message):
    if not condition:
        sys.exit(message)


class Run:
    def __init__(self, program, scratch, name, save_every=1, seed=0, steps=40):
        self.program, self.folder = program, scratch / name
        self.command = [program, "--init", scratch / "config.json", "--data", scratch / "tokens.bin", "--seq-len", 16,
                        "--batch-size", 2, "--grad-accum", 2, "--steps", steps, "--lr", "3e-3", "--lr-schedule", "cosine",
                        "--precision", "bf16", "--output", self.folder, "--log", self.folder / "log.jsonl",
                        "--save-every", save_every, "--keep", 2, "--seed", seed]

    def start(self, *more):
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        return subprocess.Popen([str(word) for word in (*self.command, *more)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env=environment)

    def finish(self, *more):
        process = self.start(*more)
        out, _ = process.communicate(timeout=120)
        return process.returncode, out

    def log(self):
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def weights(self):
        return (self.folder / "model.safetensors").read_bytes()


def numbers(log):
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in log]


def kill_and_resume(run, kills, seed):
    """Kills by SIGKILL after a random number of checkpoints and a random part of the next one."""
    order = random.Random(seed)
    for kill in range(kills):
        process = run.start("--resume", *PLACEMENTS[kill % len(PLACEMENTS)])
        for _ in range(order.randint(1, 5)):  # lines of checkpoints that were made
            for line in process.stdout:
                if line.startswith("checkpoint"):
                    break
        time.sleep(order.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for name in (path.name for path in (run.folder / "checkpoints").iterdir() if path.name.startswith("step-")):
            demand((run.folder / "checkpoints" / name / "manifest.json").exists(), f"{name} has no manifest")
    return run.finish("--resume", *PLACEMENTS[kills % len(PLACEMENTS)])


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        (scratch / "config.json").write_text(json.dumps(MODEL))
        rows = array.array("H", [(i * 7 + i // 16) % 64 for i in range(200 * 16 + 1)])
        (scratch / "tokens.bin").write_bytes(rows.tobytes())

        whole = Run(program, scratch, "whole")
        code, out = whole.finish()
        demand(code == 0, out)

        killed = Run(program, scratch, "killed")
        code, out = kill_and_resume(killed, kills, seed=kills)
        demand(code == 0, out)
        demand(numbers(killed.log()) == numbers(whole.log()), "the log of the killed run is another one")
        demand(killed.weights() == whole.weights(), "the weights of the killed run are others")
        left = sorted(path.name for path in (killed.folder / "checkpoints").iterdir())
        demand(left == ["step-00000039", "step-00000040"], f"left behind: {left}")

        newest = killed.folder / "checkpoints" / left[1]
        largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 1)
        code, out = killed.finish("--resume")
        demand(code != 0 and "the one before is step-00000039" in out and "move step-00000040 away" in out, out)
        newest.rename(scratch / "damaged")
        code, out = killed.finish("--resume")
        demand(code == 0 and "resumed after step 39" in out, out)
        demand(killed.weights() == whole.weights(), "the weights after a damaged checkpoint are others")

        asked = Run(program, scratch, "asked", save_every=0)
        process = asked.start()
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGTERM)
                break
        out, _ = process.communicate(timeout=60)
        demand(process.returncode == INTERRUPTED and "--resume" in out, f"ended with {process.returncode}: {out}")
        code, out = asked.finish("--resume")
        demand(code == 0 and "resumed after step" in out, out)
        demand(asked.weights() == whole.weights(), "the weights of the interrupted run are others")

        code, out = Run(program, scratch, "asked", seed=5).finish("--resume")
        demand(code == 2 and "seed" in out, f"another seed was accepted: {out}")

        # An output that cannot be written at the end: what was trained is kept, and a resumed run writes it.
        longer = Run(program, scratch, "longer", save_every=0, steps=400)
        code, out = longer.finish()
        demand(code == 0, out)
        blocked = Run(program, scratch, "blocked", save_every=0, steps=400)
        blocked.folder.mkdir()
        process = blocked.start()
        for line in process.stdout:
            if line.startswith("step 1/"):
                # The end is seconds away.
                (blocked.folder / "config.json").mkdir()
                break
        out, _ = process.communicate(timeout=60)
        demand(process.returncode not in (0, INTERRUPTED) and "what was trained is in" in out, out)
        (blocked.folder / "config.json").rmdir()
        code, out = blocked.finish("--resume")
        demand(code == 0 and "nothing is left to train" in out, out)
        demand(blocked.weights() == longer.weights(), "the weights of the rescued run are others")

        adapted = Run(program, scratch, "adapted")
        for alpha, expected in ((4, 0), (8, 2), (4, 0)):
            code, out = adapted.finish("--lora-rank", 2, "--lora-merge", "--lora-alpha", alpha, "--resume")
            demand(code == expected and (code == 0 or "lora_scale" in out), f"alpha {alpha} ended with {code}: {out}")
    print(f"killed {kills} times, resumed under other placements: the same losses, norms and weights")


if __name__ == "__main__":
    main()
