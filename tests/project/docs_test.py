#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The code blocks of docs/embedding.md are pieces of examples/embedding.cpp, which is compiled and run."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def squeezed(text):
    return re.sub(r"\s+", " ", text).strip()


class DocsTest(unittest.TestCase):
    def test_every_code_block_stands_in_the_example(self):
        example = squeezed((ROOT / "examples" / "embedding.cpp").read_text())
        blocks = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs" / "embedding.md").read_text(), re.S)
        self.assertGreater(len(blocks), 10)
        for block in blocks:
            self.assertIn(squeezed(block), example)

    def test_every_call_of_the_engine_is_in_the_example(self):
        header = (ROOT / "include" / "spillway" / "train" / "engine.h").read_text()
        public = header[header.index("class Engine {"):header.index(" private:\n  struct Impl;")]
        calls = set(re.findall(r"^  (?! )[\w:<>&\[\] ]*?\b(\w+)\(", public, re.M)) - {"Engine", "requires"}
        self.assertIn("backward", calls)
        used = (ROOT / "examples" / "embedding.cpp").read_text()
        elsewhere = {"block_call", "config", "master"}  # bound by the constructor for CausalLM; plain readers
        self.assertEqual([call for call in sorted(calls - elsewhere) if f"engine.{call}(" not in used], [])

    def test_links_between_documents_lead_somewhere(self):
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
            for target in re.findall(r"\]\((?!https?:)([^)#]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
                self.assertTrue((page.parent / target).exists(), f"{page.name} links to {target}")


if __name__ == "__main__":
    unittest.main()
