#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Wide instructions stay where the dispatch guards them: no other object of the library has a wide register, and the
guarded objects lend the linker no function that it could use elsewhere.

Usage: isolation_test.py libspillway_core.a
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

GUARDED = {"kernels_avx2.cpp.o": ("ymm", "kAvx2Kernels"), "kernels_avx512.cpp.o": ("zmm", "kAvx512Kernels")}


def output_of(*command, cwd=None):
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


class Isolation(unittest.TestCase):
    archive = ""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        output_of("ar", "x", cls.archive, cwd=cls.folder.name)
        cls.objects = sorted(pathlib.Path(cls.folder.name).glob("*.o"))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_wide_registers_are_guarded(self):
        for path in self.objects:
            wide = set(re.findall(r"%([yz]mm)\d", output_of("objdump", "-d", "--no-show-raw-insn", str(path))))
            if path.name in GUARDED:
                self.assertIn(GUARDED[path.name][0], wide, path.name)
            else:
                self.assertEqual(wide, set(), path.name)

    def test_guarded_objects_define_their_table_alone(self):
        names = {path.name for path in self.objects}
        for name, (_, table) in GUARDED.items():
            self.assertIn(name, names)
            symbols = output_of("nm", "-C", "--defined-only", "--extern-only", str(pathlib.Path(self.folder.name) / name))
            defined = [line.split(maxsplit=2)[2] for line in symbols.splitlines() if len(line.split(maxsplit=2)) == 3]
            self.assertEqual(defined, [f"spillway::kernels::{table}"], name)

    def test_no_fused_multiply_add(self):
        for path in self.objects:
            if path.name.startswith("kernels_"):
                self.assertNotRegex(output_of("objdump", "-d", "--no-show-raw-insn", str(path)), r"\bvfn?m(add|sub)")


if __name__ == "__main__":
    Isolation.archive = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=1)
