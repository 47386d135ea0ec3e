#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the build was compiled with: nothing of the builder's own processor, and the arithmetic of docs/numerics.md.

Usage: flags_test.py compile_commands.json
"""

import json
import shlex
import sys
import unittest

FORBIDDEN = {"-march=native": "ties the program to the builder's processor", "-mtune=native": "ties the timing to it",
             "-mcpu=native": "ties the program to the builder's processor", "-xHost": "ties the program to it",
             "-ffast-math": "changes results", "-Ofast": "changes results", "-funsafe-math-optimizations": "changes results",
             "-ffinite-math-only": "hides what is not finite", "--use_fast_math": "changes results"}
CONTRACT = {"-ffp-contract=fast", "-ffp-contract=on"}


def faults(command):
    """What is wrong with one compiler command, a list of words."""
    arguments = shlex.split(command)
    found = [f"{argument} {FORBIDDEN[argument]}" for argument in arguments if argument in FORBIDDEN]
    found += [f"{argument} fuses multiply-adds" for argument in arguments if argument in CONTRACT]
    if "" in arguments:
        found.append("an empty argument")
    host = "-ffp-contract=off" in arguments
    device = any(argument in ("-fmad=false", "--fmad=false") for argument in arguments)
    if not host and not device:
        found.append("neither -ffp-contract=off nor -fmad=false")
    return found


class Flags(unittest.TestCase):
    path = ""

    def test_every_source_keeps_them(self):
        with open(self.path, encoding="utf-8") as file:
            entries = json.load(file)
        self.assertGreater(len(entries), 0)
        for entry in entries:
            self.assertEqual(faults(entry["command"]), [], entry["file"])

    def test_faults_are_found(self):
        self.assertEqual(faults("c++ -O2 -ffp-contract=off -c a.cpp"), [])
        self.assertEqual(len(faults("c++ -march=native -ffp-contract=off -c a.cpp")), 1)
        self.assertEqual(len(faults("c++ -ffp-contract=off '' -c a.cpp")), 1)
        self.assertEqual(len(faults("c++ -O3 -ffast-math -c a.cpp")), 2)
        self.assertEqual(faults("nvcc -fmad=false -c a.cu"), [])


if __name__ == "__main__":
    Flags.path = sys.argv.pop(1)
    unittest.main(verbosity=1)
