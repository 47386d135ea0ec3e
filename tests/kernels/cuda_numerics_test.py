#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels' instructions keep docs/numerics.md: nothing fused, nothing approximate, no flush of denormals.

Usage: cuda_numerics_test.py NVCC CXX CUOBJDUMP SOURCE_ROOT OBJECT... -- FLAG...
Reads the PTX that nvcc makes of each source; with cuobjdump (an empty argument: none), the machine code of OBJECTs too.
Division and square root are themselves made of fused instructions there, so machine code is held to it in the kernels
that have neither.
"""

import pathlib
import re
import subprocess
import sys
import unittest

DIVIDES = ("4Adam", "7Adagrad")  # mangled names
ARITHMETIC = re.compile(r"\b(fma|mad|mul|add|sub|div|sqrt|rcp|rsqrt)\.([a-z0-9.]*)(f32|f64)\b")


def ptx_faults(text):
    """Instructions that round other than once, to nearest even, with denormals kept."""
    found = []
    for match in ARITHMETIC.finditer(text):
        name, modifiers = match.group(1), match.group(2).split(".")
        if name in ("fma", "mad", "rcp", "rsqrt") or "rn" not in modifiers or "ftz" in modifiers or "approx" in modifiers:
            found.append(match.group(0))
    return found


def sass_faults(text):
    """Fused instructions in kernels that neither divide nor take roots, by kernel."""
    found, kernel = {}, ""
    for line in text.splitlines():
        match = re.search(r"Function : (\S+)", line)
        kernel = match.group(1) if match else kernel
        if any(name in kernel for name in DIVIDES):
            continue
        if re.search(r"\b(FFMA|DFMA|HFMA2)\b", line) and not re.search(r"HFMA2\.MMA|HFMA2 R\d+, -RZ, RZ", line):
            found.setdefault(kernel, []).append(line.strip())
    return found


class Instructions(unittest.TestCase):
    nvcc = cxx = cuobjdump = ""
    root = pathlib.Path()
    objects, flags = [], []

    def test_ptx(self):
        sources = sorted((self.root / "kernels" / "cuda").glob("*.cu"))
        self.assertGreater(len(sources), 0)
        for source in sources:
            command = [self.nvcc, "-ccbin", self.cxx, *self.flags, "-arch=compute_80", f"-I{self.root}", "-ptx", str(source),
                       "-o", "-"]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            self.assertGreater(len(ARITHMETIC.findall(text)), 5, source)
            self.assertEqual(ptx_faults(text), [], source)
            self.assertRegex(text, r"ld\.global(\.nc)?\.v4", f"{source} reads no quads")

    def test_machine_code(self):
        if not self.cuobjdump:
            self.skipTest("cuobjdump was not found")
        for name in self.objects:
            text = subprocess.run([self.cuobjdump, "--dump-sass", name], check=True, capture_output=True, text=True).stdout
            self.assertIn("Function : ", text)
            self.assertEqual(sass_faults(text), {}, name)

    def test_faults_are_found(self):
        self.assertEqual(ptx_faults("fma.rn.f32 %f1, %f2, %f3, %f4;"), ["fma.rn.f32"])
        self.assertEqual(ptx_faults("mul.f32 %f1, %f2, %f3; div.approx.f32 a, b, c;"), ["mul.f32", "div.approx.f32"])
        self.assertEqual(ptx_faults("add.rn.ftz.f32 %f1, %f2, %f3;"), ["add.rn.ftz.f32"])
        self.assertEqual(ptx_faults("mul.rn.f32 %f1, %f2, %f3; sqrt.rn.f32 a, b; mad.lo.s32 x, y, z, w;"), [])
        self.assertEqual(len(sass_faults("Function : lion\n  FFMA R0, R1, R2, R3 ;")["lion"]), 1)
        self.assertEqual(sass_faults("Function : x4Adamx\n  FFMA R0, R1, R2, R3 ;"), {})


if __name__ == "__main__":
    Instructions.nvcc, Instructions.cxx, Instructions.cuobjdump, root = sys.argv[1:5]
    Instructions.root = pathlib.Path(root)
    split = sys.argv.index("--")
    Instructions.objects, Instructions.flags = sys.argv[5:split], sys.argv[split + 1:]
    unittest.main(argv=sys.argv[:1], verbosity=1)
