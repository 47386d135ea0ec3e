#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md quotes messages that stand in the sources, and leaves out none that a run can end with.

A quoted message is a span of code in the first column of a table; what varies in it is written as an ellipsis.

Usage: troubleshooting_page_test.py
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
VARIES = "\u2026"
LITERAL = r'"(?:[^"\\\n]|\\.)*"'

# Where what `finetune` ends with is said, but for the readers of files, whose many messages share their cures.
ENDS_A_RUN = ["examples/finetune*.cpp", "src/plan/run_plan.cpp", "src/train/engine_plan.cpp", "src/device/gpu.cpp",
              "src/memory/cuda_arena.cpp", "src/memory/host_region.cpp", "src/runtime/cuda_machine.cpp",
              "src/train/torch_device_*.cpp", "src/train/engine_checkpoint.cpp", "src/train/metrics.cpp"]
# What the program's own code would have to do wrong first: said to its author, by the header's contract.
FAULTS = ["keep is {}; expected zero", "the CUDA machine was asked for another device", "which checkpoints cannot hold"]


def joined(text):
    """A source's text with neighbouring literals as one, and what is put between two of them as {}."""
    text = re.sub(r'"\s*\n\s*"', "", text)
    return re.sub(r'"\s*\+\s*[^";]*?\+\s*"', "{}", text)


def literals(text):
    return [found[1:-1].replace('\\"', '"') for found in re.findall(LITERAL, joined(text))]


def sources():
    for folder, ends in (("src", ".cpp .h"), ("include", ".h"), ("examples", ".cpp .h"), ("tools", ".cpp .h"),
                         ("scripts", ".py .sh"), ("cmake", ".cmake")):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in ends.split():
                yield path
    yield ROOT / "tests" / "CMakeLists.txt"


def quotes():
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `")]
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


def pattern(quote):
    parts = [re.escape(part) for part in re.split(rf"{VARIES}", quote)]
    return re.compile(".*".join(parts))


def said(text):
    """The messages that a source throws."""
    for statement in re.findall(r"(?:\bthrow\s+(?:spillway::)?\w+\(|\brequire\()(.*?);\n", joined(text), re.S):
        compared = re.sub(rf"[!=]= *{LITERAL}", "", statement)
        found = [literal for literal in re.findall(LITERAL, compared) if len(literal) > 20 and " " in literal]
        if found:
            yield found[0][1:-1].replace('\\"', '"')


class TroubleshootingPage(unittest.TestCase):
    def test_what_is_quoted_stands_in_the_sources(self):
        self.assertGreater(len(quotes()), 90)
        known = []
        for path in sources():
            text = path.read_text(encoding="utf-8")
            known += literals(text) if path.suffix in (".cpp", ".h", ".cmake", ".txt") else [text.replace("\\\n", "")]
        for quote in quotes():
            with self.subTest(quote=quote):
                self.assertGreaterEqual(len(quote.replace(VARIES, "").strip()), 8, "too short to find anything by")
                self.assertTrue(any(pattern(quote).search(text) for text in known))

    def test_what_a_run_ends_with_is_quoted(self):
        paths = [path for name in ENDS_A_RUN for path in sorted(ROOT.glob(name))]
        messages = {message: path.name for path in paths for message in said(path.read_text(encoding="utf-8"))}
        self.assertGreater(len(messages), 25)
        patterns = [pattern(quote) for quote in quotes()]
        missing = [f"{name}: {message}" for message, name in messages.items()
                   if not any(one.search(message) for one in patterns) and not any(fault in message for fault in FAULTS)]
        self.assertEqual(missing, [])

    def test_exit_codes_are_those_of_finetune(self):
        code = (ROOT / "examples" / "finetune.cpp").read_text(encoding="utf-8")
        numbers = re.search(r"kFailed = (\d), kUsage = (\d), kDoesNotFit = (\d), kInterrupted = (\d);", code).groups()
        line = next(line for line in PAGE.splitlines() if line.startswith("`finetune` ends with"))
        self.assertEqual(tuple(re.findall(r"\b(\d) \w", line)), ("0", *numbers))


if __name__ == "__main__":
    unittest.main()
