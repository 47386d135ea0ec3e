#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every test that docs/numerics.md names exists, and every test of the kernels is named there.

Usage: numerics_page_test.py
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNNAMED = {"ExactSum.ZeroIsPositive", "ExactSum.CanBeSentAsBytes", "Narrow.AnyLengthAndAlignment", "Convert.Fp32IsACopy"}


def tests_under(folder):
    names = set()
    for path in folder.rglob("*.cpp"):
        names |= {".".join(pair) for pair in re.findall(r"^TEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\)", path.read_text(), re.M)}
    for path in folder.rglob("*_test.py"):
        for suite, body in re.findall(r"^class (\w+)\(unittest\.TestCase\):\n((?:[ \t].*\n|\n)+)", path.read_text(), re.M):
            names |= {f"{suite}.{name}" for name in re.findall(r"def (test_\w+)", body)}
    return names


class NumericsPage(unittest.TestCase):
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", (ROOT / "docs" / "numerics.md").read_text()))

    def test_named_tests_exist(self):
        self.assertGreater(len(self.named), 20)
        self.assertEqual(sorted(self.named - tests_under(ROOT / "tests")), [])

    def test_tests_of_the_kernels_are_named(self):
        kernels = {name for name in tests_under(ROOT / "tests" / "kernels") if not name.startswith("NumericsPage.")}
        self.assertEqual(sorted(kernels - self.named - UNNAMED), [])


if __name__ == "__main__":
    unittest.main(verbosity=1)
