#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels compile whatever processor the user's own flags name: each source adds the instructions it needs itself.

Usage: kernel_flags_test.py compile_commands.json
"""

import concurrent.futures
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import unittest

# None named is what the build itself compiles.
BASES = ("-march=x86-64", "-march=x86-64-v2", "-march=x86-64-v3", "-march=x86-64-v4")


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

    @staticmethod
    def compile_for(base, words, folder):
        """Exit status and what the compiler said."""
        with tempfile.TemporaryDirectory() as out:
            command = [words[0], base, *words[1:]]
            command[command.index("-o") + 1] = f"{out}/kernel.o"
            done = subprocess.run([*command, "-O0", "-g0"], cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
            return done.returncode, done.stderr

    def test_every_kernel_compiles_for_any_base_processor(self):
        kernels = list(self.kernels())
        self.assertGreaterEqual(len(kernels), 3)
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as two:
            started = [(source.name, base, two.submit(self.compile_for, base, words, folder))
                       for source, words, folder in kernels for base in BASES]
            for source, base, compilation in started:
                with self.subTest(source=source, base=base):
                    status, said = compilation.result()
                    self.assertEqual(status, 0, said)


if __name__ == "__main__":
    KernelFlags.path = sys.argv.pop(1)
    unittest.main(verbosity=1)
