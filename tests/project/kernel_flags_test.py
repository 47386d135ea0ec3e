#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels compile whatever processor the user's own flags name: each source adds the instructions it needs itself.

Usage: kernel_flags_test.py compile_commands.json
"""

import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import unittest

BASES = ("", "-march=x86-64", "-march=x86-64-v2", "-march=x86-64-v3", "-march=x86-64-v4")


class KernelFlags(unittest.TestCase):
    path = ""

    def kernels(self):
        """Source and compiler command of each kernel set, the launcher in front of the compiler left out."""
        with open(self.path, encoding="utf-8") as file:
            entries = json.load(file)
        for entry in entries:
            source = pathlib.Path(entry["file"])
            if source.name.startswith("kernels_") and source.parent.name == "cpu":
                words = shlex.split(entry["command"])
                words = words[next(i for i, word in enumerate(words) if word.startswith(("-D", "-I", "-O", "-std"))) - 1:]
                yield source, words, entry["directory"]

    def test_every_kernel_compiles_for_any_base_processor(self):
        found = 0
        for source, words, folder in self.kernels():
            found += 1
            for base in BASES:
                with self.subTest(source=source.name, base=base), tempfile.TemporaryDirectory() as out:
                    command = [words[0], *([base] if base else []), *words[1:]]
                    command[command.index("-o") + 1] = f"{out}/kernel.o"
                    done = subprocess.run([*command, "-O0", "-g0"], cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
                    self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreaterEqual(found, 3)


if __name__ == "__main__":
    KernelFlags.path = sys.argv.pop(1)
    unittest.main(verbosity=1)
