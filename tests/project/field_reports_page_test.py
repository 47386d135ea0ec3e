#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/field_reports.md names tests and files that exist, answers every report once, and leaves no field test out.

Usage: field_reports_page_test.py
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "field_reports.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if re.match(r"\| (B\d|none )", line)]


def tests_under(folder):
    names = set()
    for path in folder.rglob("*.cpp"):
        names |= {".".join(pair) for pair in re.findall(r"^TEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\)", path.read_text(), re.M)}
    for path in folder.rglob("*_test.py"):
        for suite, body in re.findall(r"^class (\w+)\((?:unittest\.TestCase|\w+Case)\):\n((?:[ \t].*\n|\n)+)", path.read_text(), re.M):
            names |= {f"{suite}.{name}" for name in re.findall(r"def (test_\w+)", body)}
    return names


class FieldReportsPage(unittest.TestCase):
    spans = set(re.findall(r"`([^`]+)`", PAGE))
    tests = {span for span in spans if re.fullmatch(r"[A-Z]\w+\.\w+", span)}

    def test_named_tests_exist(self):
        self.assertGreater(len(self.tests), 80)
        self.assertEqual(sorted(self.tests - tests_under(ROOT / "tests")), [])

    def test_named_files_exist(self):
        files = {span for span in self.spans if re.fullmatch(r"[\w/.]+\.(py|cmake|in|h|cpp|md)", span)}
        self.assertGreater(len(files), 2)
        self.assertEqual([name for name in sorted(files) if not (ROOT / name).is_file()], [])

    def test_every_report_has_one_row_with_all_its_cells(self):
        self.assertGreater(len(ROWS), 90)
        ids = [name for row in ROWS for name in re.findall(r"B\d{3}", row[0])]
        self.assertEqual(sorted(ids), sorted(set(ids)))
        for row in ROWS:
            with self.subTest(row=row[0]):
                self.assertEqual(len(row), 4)
                self.assertTrue(all(row))
                if row[0] != "none":
                    self.assertRegex(row[2], r"^[\w.-]+/[\w.-]+#\d+")

    def test_field_tests_are_named(self):
        written = {name for name in tests_under(ROOT / "tests" / "train") if re.match(r"(Checkpoint|Gradient|Memory|Rank|Update)Reports\.", name)}
        self.assertGreater(len(written), 25)
        self.assertEqual(sorted(written - self.tests), [])


if __name__ == "__main__":
    unittest.main(verbosity=1)
