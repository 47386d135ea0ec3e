#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs `spillway inspect` as a user would.

Usage: inspect_test.py <spillway program> [unittest argument]...
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SPILLWAY = pathlib.Path(sys.argv.pop(1)).resolve()
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
DONE, FAILED, USAGE = 0, 1, 2


class InspectTest(unittest.TestCase):
    def setUp(self):
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self._scratch.name)

    def tearDown(self):
        self._scratch.cleanup()

    def inspect(self, *arguments, expect=DONE):
        done = subprocess.run([str(SPILLWAY), "inspect", *map(str, arguments)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        self.assertEqual(done.returncode, expect, done.stdout)
        return done.stdout

    def test_a_model_of_two_files(self):
        shape = json.loads((GOLDEN / "llama" / "config.json").read_text())
        index = json.loads((GOLDEN / "llama" / "model.safetensors.index.json").read_text())
        text = self.inspect(GOLDEN / "llama")
        self.assertIn("Hugging Face model: llama", text)
        self.assertIn(f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}", text)
        self.assertIn(f"  {len(index['weight_map'])} fp32 tensors, {index['metadata']['total_size'] // 4} elements", text)
        self.assertIn("model-00002-of-00002.safetensors 189896 bytes", text)

    def test_a_shape_without_weights(self):
        shutil.copy(GOLDEN / "llama" / "config.json", self.folder)
        self.assertIn("none: only random ones", self.inspect(self.folder))

    def test_adapters(self):
        config = json.loads((GOLDEN / "llama-lora" / "adapter_config.json").read_text())
        text = self.inspect(GOLDEN / "llama-lora")
        self.assertIn(f"LoRA of rank {config['r']}, alpha {config['lora_alpha']}", text)
        self.assertIn("fp32 tensors", text)
        (self.folder / "adapter_config.json").write_text(json.dumps(dict(config, use_dora=True)))
        self.assertIn("use_dora", self.inspect(self.folder, expect=FAILED))

    def test_what_is_wrong_is_said(self):
        self.assertIn("found no manifest.json", self.inspect(self.folder, expect=FAILED))
        self.assertIn("is not a folder", self.inspect(self.folder / "no_such", expect=FAILED))
        shutil.copytree(GOLDEN / "llama", self.folder / "cut")
        weights = self.folder / "cut" / "model-00001-of-00002.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        self.assertIn("model-00001-of-00002", self.inspect(self.folder / "cut", expect=FAILED))
        (self.folder / "manifest.json").write_text("{}")
        self.assertIn("manifest.json", self.inspect(self.folder, expect=FAILED))
        for arguments in ((), ("a", "b"), ("a", "--no-such")):
            self.inspect(*arguments, expect=USAGE)


if __name__ == "__main__":
    unittest.main()
