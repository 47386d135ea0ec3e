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

    def test_every_key_of_a_configuration_is_in_its_page(self):
        page = (ROOT / "docs" / "configuration.md").read_text()
        own, other = page.split("## DeepSpeed's keys")
        reader = (ROOT / "src" / "core" / "config.cpp").read_text()
        keys = set(re.findall(r'section\.(?:read|find|read_bandwidth)\("(\w+)"', reader))
        self.assertGreater(len(keys), 40)
        self.assertEqual([key for key in sorted(keys) if not re.search(rf"[`.]{key}[`.]", own)], [])
        table = (ROOT / "src" / "core" / "deepspeed_keys.cpp").read_text()
        keys = set(re.findall(r'\{"[\w.]*", "(\w+)", k', table))
        self.assertGreater(len(keys), 130)
        self.assertEqual([key for key in sorted(keys) if not re.search(rf"[`.]{key}[`.]", other)], [])

    def test_links_between_documents_lead_somewhere(self):
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
            for target in re.findall(r"\]\((?!https?:)([^)#]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
                self.assertTrue((page.parent / target).exists(), f"{page.name} links to {target}")


if __name__ == "__main__":
    unittest.main()
