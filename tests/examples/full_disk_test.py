#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fills the disk under finetune: a save that fails says why, and what an earlier one wrote is as it was.

The disk is a tmpfs, mounted in a namespace of the test's own; where that is not allowed the test is skipped (77).

Usage: full_disk_test.py <finetune program> [mpirun, for the case of two ranks]
"""
import array
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

FAILED, SKIPPED = 1, 77
INSIDE = "--inside"
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}


def demand(condition, message):
    if not condition:
        sys.exit(message)


class Disk:
    """A tmpfs of a size that can be changed."""

    def __init__(self, path):
        self.path = path
        path.mkdir()
        self.mount("size=64m")

    def mount(self, options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)], check=True)

    def resize(self, size):
        self.mount(f"remount,size={size}")

    def leave(self, room):
        """Fills it up to `room` bytes."""
        self.empty()
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize
        with open(self.path / "filler", "wb") as filler:
            filler.write(bytes(max(0, free - room)))

    def empty(self):
        (self.path / "filler").unlink(missing_ok=True)


class Bench:
    def __init__(self, program, scratch, mpirun=None):
        self.program, self.scratch, self.disk = program, scratch, Disk(scratch / "disk")
        self.mpirun, self.launcher = mpirun, []
        (scratch / "config.json").write_text(json.dumps(MODEL))
        rows = array.array("H", [(i * 7 + i // 16) % 64 for i in range(200 * 16 + 1)])
        (scratch / "tokens.bin").write_bytes(rows.tobytes())

    def finetune(self, output, steps, *more, model=None):
        start = ("--model", model) if model else ("--init", self.scratch / "config.json")
        command = [*self.launcher, self.program, *start, "--data", self.scratch / "tokens.bin", "--seq-len", 16, "--batch-size", 2,
                   "--steps", steps, "--lr", "3e-3", "--output", output, *more]
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        done = subprocess.run([str(word) for word in command], env=environment, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    def succeed(self, *arguments, **options):
        code, out = self.finetune(*arguments, **options)
        demand(code == 0, out)
        return out

    def fail_for_space(self, *arguments, **options):
        code, out = self.finetune(*arguments, **options)
        demand(code == FAILED and "No space left on device" in out, f"ended with {code}: {out}")
        return out


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def a_checkpoint_that_finds_no_room(bench):
    """One checkpoint fits, two do not: the second one fails, the first one is resumed."""
    job = ("--precision", "bf16", "--save-every", 5, "--keep", 1)
    whole = bench.scratch / "whole"
    bench.succeed(whole, 12, *job, "--log", bench.scratch / "whole.jsonl")
    size = sum(len(data) for data in content(whole / "checkpoints").values())

    out, log = bench.disk.path / "out", bench.scratch / "log.jsonl"
    bench.disk.resize(size * 3 // 2)
    said = bench.fail_for_space(out, 12, *job, "--log", log)
    demand("step-00000005" in said.splitlines()[-1] and "--resume" in said, f"what to do is not said: {said}")
    saved = content(out / "checkpoints")
    demand({name.split("/")[0] for name in saved} == {"step-00000005"}, f"left behind: {sorted(saved)}")
    bench.fail_for_space(out, 12, *job, "--log", log, "--resume")
    demand(content(out / "checkpoints") == saved, "the last complete checkpoint was changed")

    bench.disk.resize("64m")
    bench.succeed(out, 12, *job, "--log", log, "--resume", "--preset", "zero_offload", "--chunk-size", "2Ki")
    numbers = [[json.loads(line)[key] for key in ("step", "loss", "grad_norm", "lr")]
               for file in (bench.scratch / "whole.jsonl", log) for line in file.read_text().splitlines()]
    demand(numbers[:12] == numbers[12:], "the log of the resumed run is another one")
    demand((out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(),
           "the weights of the resumed run are others")


def ranks_that_find_no_room(bench):
    """A disk that is full for one rank ends both, and leaves the last checkpoint that both completed."""
    job = ("--save-every", 5, "--keep", 1, "--stage", 2)
    bench.launcher = [bench.mpirun, "--oversubscribe", "--bind-to", "none", "-n", 2]
    whole, out = bench.scratch / "ranks_whole", bench.disk.path / "ranks"
    bench.succeed(whole, 12, *job)
    size = sum(len(data) for data in content(whole / "checkpoints").values())
    for folder in bench.disk.path.iterdir():  # of the cases before
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    bench.disk.resize(size * 3 // 2)
    begin = time.monotonic()
    bench.fail_for_space(out, 12, *job)
    demand(time.monotonic() - begin < 60, "the ranks took a minute to end")
    saved = content(out / "checkpoints")
    demand({name.split("/")[0] for name in saved} == {"step-00000005"}, f"left behind: {sorted(saved)}")
    bench.disk.resize("64m")
    bench.succeed(out, 12, *job, "--resume")
    demand((out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(),
           "the weights of the resumed ranks are others")
    bench.launcher = []


def an_export_that_finds_no_room(bench, name, model, *more):
    """Whichever file does not fit: the earlier export is as it was, and nothing else is left behind."""
    out = bench.disk.path / name
    bench.succeed(out, 1, *more, model=model)
    before = content(out)
    page = 4096
    needed = sum(-len(data) // page * -page for data in before.values())
    for room in (page, needed // 2, needed - 2 * page, needed - page):
        bench.disk.leave(room)
        bench.fail_for_space(out, 2, *more, model=model)
        demand(content(out) == before, f"{name} was changed by a save that failed with {room} bytes left")
    bench.disk.empty()
    bench.succeed(out, 2, *more, model=model)
    demand(content(out) != before and set(content(out)) == set(before), f"{name}: the save that had room wrote nothing")


def a_log_that_finds_no_room(bench):
    out, log = bench.scratch / "logged", bench.disk.path / "log.jsonl"
    bench.succeed(out, 20, "--save-every", 10, "--log", log)
    before = log.read_text()
    bench.disk.leave(0)
    code, said = bench.finetune(out, 100, "--save-every", 100, "--log", log, "--resume")
    demand(code == FAILED and "log.jsonl" in said and "full" in said, f"ended with {code}: {said}")
    demand(log.read_text().startswith(before), "lines of steps that were done are gone from the log")
    bench.disk.empty()


def run(program, mpirun):
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(program, pathlib.Path(folder), mpirun)
        try:
            a_checkpoint_that_finds_no_room(bench)
            model = bench.scratch / "whole"
            an_export_that_finds_no_room(bench, "model", model, "--precision", "bf16")
            an_export_that_finds_no_room(bench, "adapters", model, "--lora-rank", 16)
            a_log_that_finds_no_room(bench)
            if mpirun:
                ranks_that_find_no_room(bench)
        finally:
            subprocess.run(["umount", str(bench.disk.path)], check=True)
    print("checkpoints, models, adapters and logs: a full disk is reported and spoils nothing that was written before")


def main():
    if sys.argv[-1] == INSIDE:
        return run(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 3 else None)
    with tempfile.TemporaryDirectory() as folder:
        for namespace in (["unshare", "-rm"], ["unshare", "-m"]):
            probe = [*namespace, "mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                os.execvp(namespace[0], [*namespace, sys.executable, __file__, *sys.argv[1:], INSIDE])
    print("skipped: this machine lets nobody mount a tmpfs, not even in a namespace of its own (unshare -rm)")
    return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
