#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""finetune on several ranks: the losses of one rank, the bits of other placements, ranks that are killed or stopped.

Usage: ranks_test.py <mpirun> <finetune program> [number of kills, 4 by default]
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
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}
STEPS = 20
SECONDS_TO_END = 20  # of the others, after one rank is gone; the machine may be busy


def demand(condition, message):
    if not condition:
        sys.exit(message)


class Run:
    def __init__(self, tools, scratch, name, save_every=0, steps=STEPS):
        self.mpirun, program = tools
        self.folder = scratch / name
        self.command = [program, "--init", scratch / "config.json", "--data", scratch / "tokens.bin", "--seq-len", 16,
                        "--batch-size", 12, "--grad-accum", 2, "--steps", steps, "--lr", "3e-3", "--clip-norm", 0.5,
                        "--precision", "fp32", "--output", self.folder, "--log", self.folder / "log.jsonl",
                        "--save-every", save_every, "--keep", 2, "--chunk-size", "4Ki", "--progress-every", 1]

    def start(self, ranks, *more):
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        launcher = [self.mpirun, "--oversubscribe", "--bind-to", "none", "-n", ranks] if ranks > 0 else []
        return subprocess.Popen([str(word) for word in (*launcher, *self.command, *more)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env=environment)

    def finish(self, ranks, *more):
        process = self.start(ranks, *more)
        out, _ = process.communicate(timeout=200)
        return process.returncode, out

    def log(self):
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def weights(self):
        return (self.folder / "model.safetensors").read_bytes()


def ranks_of(process, count):
    """The process numbers of mpirun's ranks."""
    for _ in range(400):
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [int(child) for child in children
                 if "finetune" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")[0]]
        if len(found) == count:
            return found
        time.sleep(0.02)
    sys.exit("mpirun's ranks did not appear")


def wait_for(process, start):
    for line in process.stdout:
        if line.startswith(start):
            return line
    sys.exit(f"the run ended before it printed {start!r}: {process.wait()}")


def alive(number):
    try:
        return pathlib.Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def same_as_one_rank(tools, scratch):
    """Losses agree to rounding for any number of ranks, and bit for bit for any stage and placement of one number."""
    one = Run(tools, scratch, "one")
    code, out = one.finish(0)
    demand(code == 0, out)
    resident, cut = ["--stage", 0, "--preset", "resident"], ["--stage", 2, "--bucket-chunks", 2]
    last = ["--reduce-last-only", "--stage"]
    for ranks, variants in ((1, (resident, cut)), (2, (resident, cut)), (3, (resident, cut)),
                            (2, ([*last, 0, "--preset", "resident"], [*last, 1, "--bucket-chunks", 2]))):
        weights = set()
        for more in variants:
            run = Run(tools, scratch, f"ranks{ranks}")
            code, out = run.finish(ranks, *more)
            demand(code == 0, out)
            demand(out.count("step 1/") == 1, f"not one rank alone speaks:\n{out}")
            weights.add(run.weights())
            for mine, theirs in zip(run.log(), one.log(), strict=True):
                demand(abs(mine["loss"] - theirs["loss"]) <= 1e-5 * theirs["loss"], f"{ranks} ranks: {mine} {theirs}")
        demand(len(weights) == 1, f"{ranks} ranks, {variants}: stage and placement change the weights")
    return one


def killed_ranks(tools, scratch, kills):
    """SIGKILL of any one rank ends the others within seconds; the last complete checkpoint resumes."""
    order = random.Random(kills)
    steps = 4 * kills + 4  # a kill comes after three of them at most
    whole = Run(tools, scratch, "whole2", steps=steps)
    code, out = whole.finish(2)
    demand(code == 0, out)
    run = Run(tools, scratch, "killed", save_every=1, steps=steps)
    longest = 0
    for kill in range(kills):
        process = run.start(2, "--resume", "--stage", kill % 3, "--preset", ("zero_offload", "resident")[kill % 2])
        for _ in range(order.randint(1, 3)):
            wait_for(process, "checkpoint")
        numbers = ranks_of(process, 2)
        time.sleep(order.random() * 0.03)
        os.kill(numbers[order.randrange(2)], signal.SIGKILL)
        begin = time.monotonic()
        process.stdout.read()
        demand(process.wait(timeout=SECONDS_TO_END) != 0, "mpirun ended as if all were well")
        while any(alive(number) for number in numbers):
            demand(time.monotonic() - begin < SECONDS_TO_END, "a rank outlived the one that was killed")
            time.sleep(0.05)
        longest = max(longest, time.monotonic() - begin)
    code, out = run.finish(2, "--resume")
    demand(code == 0, out)
    demand(run.weights() == whole.weights(), "the killed run ended with other weights")
    demand([line["loss"] for line in run.log()] == [line["loss"] for line in whole.log()], "other losses")
    demand(longest < SECONDS_TO_END, f"the others took {longest:.1f} s to end")
    return longest


def other_numbers_of_ranks(tools, scratch, one):
    """A run goes on with another number of ranks."""
    run = Run(tools, scratch, "changing", save_every=5)
    for ranks, more in ((2, ["--stage", 2]), (3, ["--stage", 1]), (0, [])):
        process = run.start(ranks, "--resume", *more)
        if ranks == 0:
            demand(process.wait(timeout=100) == 0, process.stdout.read())
            break
        wait_for(process, "checkpoint")
        target = ranks_of(process, ranks)[0]
        os.kill(target, signal.SIGTERM)
        out = process.stdout.read()
        demand(process.wait() == INTERRUPTED, f"a rank asked to end gave {process.returncode}: {out}")
    for mine, theirs in zip(run.log(), one.log(), strict=True):
        demand(abs(mine["loss"] - theirs["loss"]) <= 1e-4 * theirs["loss"], f"changing ranks: {mine} {theirs}")


def stopped_rank(tools, scratch):
    """A rank that stands still past the timeout is named by the others, which end."""
    process = Run(tools, scratch, "stopped").start(2, "--rank-timeout", 2)
    wait_for(process, "step 2/")
    numbers = ranks_of(process, 2)
    os.kill(numbers[1], signal.SIGSTOP)
    begin = time.monotonic()
    out = process.stdout.read()
    code = process.wait(timeout=SECONDS_TO_END)
    seconds = time.monotonic() - begin
    for number in numbers:
        if alive(number):
            os.kill(number, signal.SIGKILL)
    demand(code != 0 and seconds < SECONDS_TO_END, f"a stopped rank held the others for {seconds:.1f} s")
    demand("rank 1" in out, f"the rank that stood still is not named:\n{out}")


def main():
    tools = (sys.argv[1], pathlib.Path(sys.argv[2]).resolve())
    kills = int(sys.argv[3]) if len(sys.argv) > 3 else 4
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        (scratch / "config.json").write_text(json.dumps(MODEL))
        rows = array.array("H", [(i * 7 + i // 16) % 64 for i in range(200 * 16 + 1)])
        (scratch / "tokens.bin").write_bytes(rows.tobytes())
        one = same_as_one_rank(tools, scratch)
        longest = killed_ranks(tools, scratch, kills)
        other_numbers_of_ranks(tools, scratch, one)
        stopped_rank(tools, scratch)
    print(f"1, 2, 3 ranks agree; {kills} kills, each over within {longest:.1f} s; a stopped rank is named")


if __name__ == "__main__":
    main()
