#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The checks of tools/tidy.py find what they are for: each violation is planted in a small tree and must be named."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import tidy  # noqa: E402

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
HEADER = SPDX + "#pragma once\n"

# A tree that keeps all rules; each test adds one file to it.
CLEAN = {
    "include/spillway/core/units.h": HEADER + "#include <cstdint>\n",
    "include/spillway/lane/lane.h": HEADER + '#include "spillway/core/units.h"\n',
    "include/spillway/formats/file.h": HEADER + '#include "spillway/core/units.h"\n',
    "include/spillway/comm/communicator.h": HEADER + '#include "spillway/lane/lane.h"\n',
    "include/spillway/state/layout.h": HEADER + '#include "spillway/formats/file.h"\n',
    "include/spillway/runtime/verbs.h": HEADER + '#include "spillway/comm/communicator.h"\n',
    "include/spillway/schedule/schedule.h": HEADER + '#include "spillway/runtime/verbs.h"\n',
    "include/spillway/models/llama.h": HEADER + "#include <torch/nn/module.h>\n",
    "include/spillway/train/engine.h": HEADER + '#include "spillway/models/llama.h"\n',
    "kernels/adam.h": HEADER + "#include <cmath>\n",
    "kernels/cpu/adam.cpp": SPDX + '#include <immintrin.h>\n#include "kernels/adam.h"\n',
    "kernels/cuda/adam.cu": SPDX + '#include <cuda_runtime.h>\n#include "kernels/adam.h"\n',
    "src/lane/uring.cpp": SPDX + "#include <liburing.h>\n#include <unistd.h>\n",
    "src/formats/cast.cpp": SPDX + '#include "kernels/adam.h"\n',
    "src/device/cuda.cpp": SPDX + "#include <cuda_runtime.h>\n",
    "src/schedule/shared.h": HEADER + '#include "spillway/schedule/schedule.h"\n',
    "src/schedule/resident.h": HEADER,
    "src/schedule/resident.cpp": SPDX + '#include "schedule/resident.h"\n#include "schedule/shared.h"\n#include <vector>\n',
    "tests/train/engine_test.cpp": SPDX + '#include <torch/torch.h>\n#include "spillway/train/engine.h"\n',
    "README.md": "Runs on /path/to/model.\n",
}

# name of the case: (file, its text, a part of what must be said)
PLANTED = {
    "includes to the right": ("src/core/a.cpp", SPDX + '#include "spillway/lane/lane.h"\n', "core does not include lane"),
    "a schedule's header in the runtime": ("src/runtime/a.cpp", SPDX + '#include "spillway/schedule/schedule.h"\n',
                                           "runtime does not include schedule"),
    "a leaf beyond its brackets": ("src/comm/a.cpp", SPDX + '#include "spillway/formats/file.h"\n',
                                   "comm does not include formats"),
    "a leaf from within what it needs": ("src/lane/a.cpp", SPDX + '#include "spillway/comm/communicator.h"\n',
                                         "lane does not include comm"),
    "models that know the engine": ("src/models/a.cpp", SPDX + '#include "spillway/train/engine.h"\n',
                                    "models does not include train"),
    "kernels that know the core": ("kernels/a.h", HEADER + '#include "spillway/core/units.h"\n',
                                   "kernels does not include core"),
    "a relative path to the right": ("src/core/b.cpp", SPDX + '#include "../schedule/shared.h"\n',
                                     "core does not include schedule"),
    "angle brackets to the right": ("src/core/b.cpp", SPDX + "#include <spillway/lane/lane.h>\n", "core does not include lane"),
    "a library file that reads a test": ("src/core/b.cpp", SPDX + '#include "train/engine_test.h"\n', "no file of the project"),
    "another schedule": ("src/schedule/delayed.cpp", SPDX + '#include "schedule/resident.h"\n', "includes no other schedule"),
    "another schedule's source": ("src/schedule/delayed.cpp", SPDX + '#include "schedule/resident.cpp"\n', "the source"),
    "a schedule with a thread": ("src/schedule/delayed.cpp", SPDX + "#include <thread>\n", "the system's <thread>"),
    "a schedule with a clock": ("src/schedule/delayed.cpp", SPDX + "#  include <chrono>\n", "the system's <chrono>"),
    "a schedule with the OS": ("include/spillway/schedule/a.h", HEADER + "#include <sys/mman.h>\n", "the system's <sys/mman.h>"),
    "a schedule with CUDA": ("src/schedule/delayed.cpp", SPDX + "#include <cuda_runtime.h>\n", "CUDA's <cuda_runtime.h>"),
    "CUDA in a public header": ("include/spillway/lane/a.h", HEADER + "#include <cuda_runtime.h>\n", "CUDA's <cuda_runtime.h>"),
    "NCCL in the runtime": ("src/runtime/a.cpp", SPDX + "#include <nccl.h>\n", "CUDA's <nccl.h>"),
    "LibTorch in the runtime": ("src/runtime/a.cpp", SPDX + "#include <ATen/ATen.h>\n", "LibTorch's <ATen/ATen.h>"),
    "liburing twice": ("src/lane/zuring.cpp", SPDX + "#include <liburing.h>\n", "liburing.h is read in one file alone"),
    "a kernel header with CUDA": ("kernels/a.h", HEADER + "#include <cuda_bf16.h>\n", "CUDA's <cuda_bf16.h>"),
    "a kernel header with fmt": ("kernels/a.h", HEADER + "#include <fmt/format.h>\n", "the standard library alone"),
    "a CUDA source with the core": ("kernels/cuda/a.cu", SPDX + '#include "spillway/core/units.h"\n', "headers of kernels alone"),
    "an unknown layer": ("src/util/a.cpp", SPDX + '#include "spillway/core/units.h"\n', "util is no layer"),
    "no licence line": ("src/core/a.cpp", "#include <vector>\n", "SPDX"),
    "a header without guard": ("include/spillway/core/a.h", SPDX, "#pragma once"),
    "unfinished": ("src/core/a.cpp", SPDX + "// TO" "DO: later\n", "unfinished"),
    "unfinished, in words": ("docs/a.md", "This is not " "implemented.\n", "unfinished"),
    "a path of one machine": ("scripts/a.sh", "cd /ho" "me/me/spillway\n", "a path of one machine"),
    "a registry": ("scripts/a.sh", "curl https://py" "pi.org/simple\n", "a registry's host"),
    "words about the work": ("docs/a.md", "Done in this " "session.\n", "how the work is organised"),
    "a test switched off": ("tests/core/a_test.cpp", SPDX + "TEST(A, DISABLED" "_B) {}\n", "switched off"),
    "a long file": ("src/core/a.cpp", SPDX + "int a;\n" * 400, "401 lines"),
    "a long line": ("src/core/a.cpp", SPDX + "int " + "a" * 120 + ";\n", "columns"),
    "a long function": ("src/core/a.cpp", SPDX + "void f() {\n" + "  g();\n" * 70 + "}\n", "a function of 72 lines"),
    "a long Python function": ("tools/a.py", "def f():\n" + "    g()\n" * 70, "a function of 71 lines"),
}


class Tidy(unittest.TestCase):
    def found(self, extra):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**CLEAN, **extra}.items():
                path = pathlib.Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return tidy.violations(folder)

    def test_a_tree_that_keeps_the_rules_passes(self):
        self.assertEqual(self.found({}), [])

    def test_each_planted_violation_is_named_and_nothing_else(self):
        for name, (path, text, said) in PLANTED.items():
            with self.subTest(name):
                found = self.found({path: text})
                self.assertEqual([str(entry[0]) for entry in found], [path], found)
                self.assertIn(said, found[0][2])

    def test_functions_are_measured_whole(self):
        text = """namespace a {
struct S {
  S(int x) : x_{x}, y_(x) {
    use(x);
  }
  int get() const { return x_; }  // a brace in a comment: {
};
const Table kTable[] = {
    {1, 2},
};
template <class F>
auto outer(F f) {
  auto inner = [&](int i) {
    return "}" + f(i);
  };
  return inner(R"(})");
}
}  // namespace a
"""
        self.assertEqual([length for _, length in tidy.cpp_functions(text)][-2:], [1, 7])
        self.assertEqual(list(tidy.cpp_functions(text))[-1][0], 11)


if __name__ == "__main__":
    unittest.main(verbosity=1)
