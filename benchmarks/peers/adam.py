#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times Spillway's CPU AdamW beside DeepSpeed's and PyTorch's, in turn, in one run.

All peers work on the same memory with the same number of threads; raw operators are called, not an optimizer's step().
The order of the cases turns with every round, and a ratio is taken inside a round: figures drift with the machine,
ratios of one round do not. What is printed is the median over rounds, and the 10th and 90th percentile in brackets.

The peers are installed into build/peers/venv by the first run (some minutes): it sees the PyTorch of .venv, or of the
python3 that runs this, and compiles DeepSpeed's operator for this processor. Spillway's library is built there too.

Usage: adam.py [--parameters N] [--threads N] [--rounds N] [--cases A,B] [--set NAME] [--json FILE] [--list]
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "peers" / "venv"
LIBRARY = ROOT / "build" / "core" / "benchmarks" / "libspillway_peer.so"
DEEPSPEED = "0.19.8"
LR, BETA1, BETA2, EPS, DECAY, FACTOR = 1e-4, 0.9, 0.999, 1e-8, 0.01, 0.5
F32, BF16, NONE = 0, 1, 3  # Element
STATES = {"f32": 0, "bf16": 1, "block8": 2}  # StateFormat

# Name: bytes read and written for a parameter, and what it does.
CASES = {
    "deepspeed": (28, "DeepSpeed CPU Adam, fp32"),
    "pytorch": (28, "PyTorch fused AdamW, fp32"),
    "zero": (42, "ZeRO path: unscale, DeepSpeed Adam, cast to bf16"),
    "widen": (40, "widen bf16 gradients, PyTorch fused, cast to bf16"),
    "fp32": (28, "Spillway, fp32"),
    "one_pass": (28, "Spillway, one pass: bf16 gradients in, bf16 copy out"),
    "split": (26, "Spillway, split master"),
    "bf16": (20, "Spillway, bf16 moments"),
    "split_bf16": (18, "Spillway, split master and bf16 moments"),
    "block8": (16, "Spillway, 8-bit moments"),
    "split_block8": (14, "Spillway, split master and 8-bit moments"),
    "traffic": (28, "traffic alone: the bytes of the one pass"),
}


def torch_folder():
    candidates = [*(ROOT / ".venv").glob("lib/python3*/site-packages"), *map(pathlib.Path, sys.path)]
    for folder in candidates:
        if (folder / "torch" / "version.py").exists():
            return folder.resolve()
    sys.exit("No PyTorch was found: scripts/setup.sh installs it into .venv.")


def install_peers():
    """Makes the virtual environment where it is not whole."""
    python = VENV / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import deepspeed, torch"], capture_output=True).returncode == 0:
        return
    print(f"Installing DeepSpeed {DEEPSPEED} into {VENV.relative_to(ROOT)} (some minutes)", file=sys.stderr)
    torch = torch_folder()
    interpreter = torch.parents[2] / "bin" / "python"
    subprocess.run([interpreter if interpreter.exists() else sys.executable, "-m", "venv", "--clear", VENV], check=True)
    site = next(VENV.glob("lib/python3*/site-packages"))
    (site / "torch_of_spillway.pth").write_text(f"{torch}\n")
    environment = {**os.environ, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "DS_BUILD_CPU_ADAM": "1", "DS_ACCELERATOR": "cpu"}
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "setuptools<81", "wheel", "ninja", "packaging", "psutil", "py-cpuinfo"], check=True, env=environment)
    subprocess.run([*pip, f"deepspeed=={DEEPSPEED}", "--no-build-isolation"], check=True, env=environment)


def build_library():
    for command in (["cmake", "--preset", "core"], ["cmake", "--build", "--preset", "core", "-j2", "--target", "spillway_peer"]):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")


class Spillway:
    """The library, its team of threads, and memory that all peers share."""

    def __init__(self, threads, name):
        self.library = ctypes.CDLL(str(LIBRARY))
        for function in ("spillway_open", "spillway_memory"):
            getattr(self.library, function).restype = ctypes.c_void_p
        self.library.spillway_set.restype = ctypes.c_char_p
        self.library.spillway_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.library.spillway_adamw.argtypes = [pointer, integer, ctypes.c_float] + [pointer] * 6 + [number, pointer, number, pointer, number, integer]
        self.library.spillway_traffic.argtypes = [pointer] * 6 + [integer]
        self.session = ctypes.c_void_p(self.library.spillway_open(threads, name.encode() if name else None))
        if not self.session:
            sys.exit(f"This processor or build has no set of kernels named {name}.")
        self.set = self.library.spillway_set(self.session).decode()
        self.arrays = 0

    def tensor(self, count, dtype):
        """An array at another offset of its page than the ones before."""
        import torch

        size = torch.empty(0, dtype=dtype).element_size()
        address = self.library.spillway_memory(self.session, count * size, 576 * self.arrays)
        if not address:
            sys.exit("There is not enough memory; ask for fewer --parameters.")
        self.arrays += 1
        return torch.frombuffer((ctypes.c_char * (count * size)).from_address(address), dtype=dtype)


class Bench:
    def __init__(self, count, spillway):
        import torch
        from deepspeed.ops.op_builder import CPUAdamBuilder

        self.torch, self.count, self.spillway, self.steps = torch, count, spillway, 0
        self.operator = CPUAdamBuilder().load()
        self.operator.create_adam(0, LR, BETA1, BETA2, EPS, DECAY, True, False)
        make = spillway.tensor
        self.p, self.m, self.v, self.g = (make(count, torch.float32) for _ in range(4))
        self.g16, self.copy, self.low, self.m16, self.v16 = (make(count, torch.bfloat16) for _ in range(5))
        self.m8, self.v8 = (make(count, torch.uint8) for _ in range(2))
        self.m_scales, self.v_scales = (make(count // 256 + 1, torch.float32) for _ in range(2))
        self.step = torch.tensor(1.0)
        self.fill()

    def fill(self):
        self.torch.manual_seed(1)
        for tensor, scale in ((self.p, 0.02), (self.g, 1e-3)):
            tensor.normal_().mul_(scale)
        self.g16.copy_(self.g)
        # States as they are after a few steps: no zeros, no denormals.
        for name in ("one_pass", "bf16", "block8") * 3:
            self.run(name)

    def adamw(self, states, moments, master, low=None, g=None, copy=None):
        address = lambda tensor: None if tensor is None else tensor.data_ptr()
        scales = [address(t) for t in ((self.m_scales, self.v_scales) if states == "block8" else (None, None))]
        g = self.g16 if g is None else g
        types = [F32 if t is not None and t.dtype == self.torch.float32 else BF16 if t is not None else NONE for t in (g, copy)]
        m, v = moments
        self.spillway.library.spillway_adamw(
            self.spillway.session, self.steps, FACTOR, address(master), address(low), address(m), scales[0], address(v), scales[1],
            STATES[states], address(g), types[0], address(copy), types[1], self.count)

    def deepspeed(self):
        self.operator.adam_update(0, self.steps, LR, BETA1, BETA2, EPS, DECAY, True, self.p, self.g, self.m, self.v)

    def pytorch(self):
        self.torch._fused_adamw_([self.p], [self.g], [self.m], [self.v], [], [self.step], amsgrad=False, lr=LR, beta1=BETA1,
                                 beta2=BETA2, weight_decay=DECAY, eps=EPS, maximize=False, grad_scale=None, found_inf=None)

    def run(self, name):
        self.steps += 1
        wide, half, block = (self.m, self.v), (self.m16, self.v16), (self.m8, self.v8)
        if name == "deepspeed":
            self.deepspeed()
        elif name == "pytorch":
            self.pytorch()
        elif name == "zero":
            self.g.mul_(1.0)
            self.deepspeed()
            self.copy.copy_(self.p)
        elif name == "widen":
            self.g.copy_(self.g16)
            self.pytorch()
            self.copy.copy_(self.p)
        elif name == "fp32":
            self.adamw("f32", wide, self.p, g=self.g)
        elif name == "one_pass":
            self.adamw("f32", wide, self.p, copy=self.copy)
        elif name == "split":
            self.adamw("f32", wide, self.copy, low=self.low)
        elif name == "bf16":
            self.adamw("bf16", half, self.p, copy=self.copy)
        elif name == "split_bf16":
            self.adamw("bf16", half, self.copy, low=self.low)
        elif name == "block8":
            self.adamw("block8", block, self.p, copy=self.copy)
        elif name == "split_block8":
            self.adamw("block8", block, self.copy, low=self.low)
        elif name == "traffic":
            self.spillway.library.spillway_traffic(self.spillway.session, self.p.data_ptr(), self.m.data_ptr(), self.v.data_ptr(),
                                                   self.g16.data_ptr(), self.copy.data_ptr(), self.count)

    def seconds(self, name, repeats):
        # Threads of the peer before may still be spinning for more work.
        time.sleep(0.005)
        if repeats > 1:
            self.run(name)  # into the cache
        start = time.perf_counter()
        for _ in range(repeats):
            self.run(name)
        return (time.perf_counter() - start) / repeats


def start_peers():
    """Lets the peers make their threads, before Spillway's team takes this one to a core that they would inherit."""
    import torch
    from deepspeed.ops.op_builder import CPUAdamBuilder

    operator = CPUAdamBuilder().load()
    operator.create_adam(1, LR, BETA1, BETA2, EPS, DECAY, True, False)
    tensors = [torch.zeros(1_000_000) for _ in range(4)]
    operator.adam_update(1, 1, LR, BETA1, BETA2, EPS, DECAY, True, *tensors)
    tensors[0].mul_(2.0)


def measure(bench, cases, rounds, repeats):
    times = {name: [] for name in cases}
    for name in cases:
        bench.seconds(name, repeats)
    for index in range(rounds):
        turn = index % len(cases)
        for name in cases[turn:] + cases[:turn]:
            times[name].append(bench.seconds(name, repeats) / bench.count * 1e9)
    return times


def spread(values):
    ordered = sorted(values)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]
    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9)}


def ratios(times, base, name):
    return spread([a / b for a, b in zip(times[base], times[name])])


def report(times, count, threads, kernels, rounds):
    bases = [base for base in ("deepspeed", "pytorch", "zero", "traffic") if base in times]
    rows = {}
    for name, values in times.items():
        rows[name] = {"bytes": CASES[name][0], "ns_per_parameter": spread(values),
                      "speed_over": {base: ratios(times, base, name) for base in bases if base != name}}
    print(f"{count} parameters, {threads} threads, {rounds} rounds, Spillway's kernels: {kernels}")
    print(f"{'':54}{'bytes':>6}{'ns/param':>10}" + "".join(f"{'times ' + base:>24}" for base in bases))
    for name, row in rows.items():
        line = f"{CASES[name][1]:54}{row['bytes']:6}{row['ns_per_parameter']['median']:10.3f}"
        for base in bases:
            r = row["speed_over"].get(base)
            line += f"{'1':>24}" if r is None else f"{r['median']:10.2f} [{r['p10']:.2f} - {r['p90']:.2f}]"
        print(line)
    return {"format": "spillway.peers.adam.1", "parameters": count, "threads": threads, "rounds": rounds, "kernels": kernels,
            "cases": rows}


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas between them")
    parser.add_argument("--set", default="", help="Spillway's set of kernels; else the fastest")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    return parser.parse_args()


def main():
    o = options()
    if o.list:
        print("\n".join(f"{name:14} {size:3} bytes  {what}" for name, (size, what) in CASES.items()))
        return
    cases = o.cases.split(",")
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        sys.exit(f"There is no case {', '.join(unknown)}; there are: {', '.join(CASES)}.")
    if pathlib.Path(sys.prefix).resolve() != VENV.resolve():
        install_peers()
        build_library()
        environment = {**os.environ, "OMP_NUM_THREADS": str(o.threads), "DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "ERROR"}
        os.execve(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv], environment)
    import torch

    torch.set_num_threads(o.threads)
    start_peers()
    spillway = Spillway(o.threads, o.set)
    bench = Bench(o.parameters, spillway)
    repeats = max(1, 20_000_000 // o.parameters)  # a measurement takes at least some milliseconds
    result = report(measure(bench, cases, o.rounds, repeats), o.parameters, o.threads, spillway.set, o.rounds)
    if o.json:
        o.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
