#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the finetune program as a user would: what it prints, writes, refuses, and ends with.

Usage: finetune_test.py <finetune program> [unittest argument]...
"""
import array
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

FINETUNE = pathlib.Path(sys.argv.pop(1)).resolve()
DONE, FAILED, USAGE, DOES_NOT_FIT = 0, 1, 2, 3

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
}


class FinetuneTest(unittest.TestCase):
    def setUp(self):
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self._scratch.name)
        (self.folder / "config.json").write_text(json.dumps(TINY))
        rows = array.array("H", [(i * 7 + i // 16) % 64 for i in range(64 * 17)])
        (self.folder / "tokens.bin").write_bytes(rows.tobytes())

    def tearDown(self):
        self._scratch.cleanup()

    def finetune(self, *arguments, expect=DONE):
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        done = subprocess.run([str(FINETUNE), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False, env=environment)
        self.assertEqual(done.returncode, expect, done.stdout)
        return done.stdout

    def job(self, *more):
        return ("--init", self.folder / "config.json", "--data", self.folder / "tokens.bin", "--seq-len", 16,
                "--batch-size", 2, "--lr", "1e-2", "--output", self.folder / "out", *more)

    def losses(self):
        return [json.loads(line)["loss"] for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def test_help_names_every_flag_of_the_readme(self):
        text = self.finetune("--help")
        for flag in ("--model", "--data", "--dry-run", "--recompute", "--preset", "--precision", "--device-memory"):
            self.assertIn(flag, text)

    def test_trains_saves_and_starts_again_from_what_it_saved(self):
        out = self.finetune(*self.job("--steps", 12, "--log", self.folder / "log.jsonl", "--generate", 4))
        self.assertIn("saved to", out)
        losses = self.losses()
        self.assertEqual(len(losses), 12)
        self.assertLess(losses[-1], losses[0] - 0.5)
        names = {path.name for path in (self.folder / "out").iterdir()}
        self.assertLessEqual({"config.json", "model.safetensors"}, names)
        again = self.finetune("--model", self.folder / "out", "--data", self.folder / "tokens.bin", "--seq-len", 16,
                              "--batch-size", 2, "--steps", 1, "--output", self.folder / "again", "--log",
                              self.folder / "log.jsonl")
        self.assertIn("saved to", again)
        self.assertLess(self.losses()[0], losses[0] - 0.4)

    def test_presets_recompute_and_precisions_give_the_same_losses_where_promised(self):
        for precision in ("fp32", "bf16"):
            seen = []
            for more in (("--preset", "resident"), ("--preset", "zero_offload", "--chunk-size", "2Ki"),
                         ("--preset", "zero_offload", "--recompute", "--threads", 2),
                         ("--preset", "zero_offload", "--cores", "any", "--instruction-set", "baseline")):
                self.finetune(*self.job("--steps", 6, "--precision", precision, "--grad-accum", 2, "--log",
                                        self.folder / "log.jsonl", *more))
                seen.append(self.losses())
            self.assertEqual(seen[0], seen[1])
            self.assertEqual(seen[0], seen[2])
            self.assertEqual(seen[0], seen[3])

    def test_dry_run_needs_no_weights_and_writes_nothing(self):
        (self.folder / "model").mkdir()
        (self.folder / "model" / "config.json").write_text(json.dumps(TINY))
        out = self.finetune("--model", self.folder / "model", "--seq-len", 16, "--batch-size", 2, "--dry-run")
        for word in ("device", "pinned", "masters", "optimizer states", "staging", "activations", "resident", "recompute"):
            self.assertIn(word, out)
        out = self.finetune("--model", self.folder / "model", "--seq-len", 16, "--dry-run", "--device-memory", "100KiB",
                            expect=DOES_NOT_FIT)
        self.assertIn("are missing", out)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["config.json", "model", "tokens.bin"])
        self.assertIn("--seq-len", self.finetune("--model", self.folder / "model", "--dry-run", expect=USAGE))

    def test_a_run_that_cannot_fit_is_refused_before_anything_is_made(self):
        out = self.finetune(*self.job("--steps", 2, "--device-memory", "200KiB"), expect=DOES_NOT_FIT)
        self.assertIn("bytes) are missing", out)
        self.assertFalse((self.folder / "out").exists())

    def test_the_dry_run_is_what_the_run_then_holds(self):
        def total(text, line):
            for row in text.splitlines():
                if row.startswith(line):
                    return row.split()[1:3]
            raise AssertionError(f"no line {line!r} in\n{text}")
        shape = self.job("--steps", 3)
        promised = self.finetune(*shape, "--dry-run")
        measured = self.finetune(*shape).split("memory measured:")[1]
        self.assertEqual(total(promised, "  device"), total(measured, "  device"))

    def test_a_deepspeed_configuration_trains_and_its_values_say_where_they_came_from(self):
        file = self.folder / "ds.json"
        file.write_text(json.dumps({
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "1e-7"}}, "gradient_clipping": 0.5,
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2,
                                                              "total_num_steps": "auto"}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}))
        base = ("--init", self.folder / "config.json", "--data", self.folder / "tokens.bin", "--seq-len", 16,
                "--output", self.folder / "out", "--offload", file, "--lr", "1e-2", "--steps", 3)
        text = self.finetune(*base, "--print-config")
        self.assertFalse((self.folder / "out").exists())
        for value, origin in (("rows of a micro-batch: 4", "ds.json: train_micro_batch_size_per_gpu"),
                              ('"lr": 0.01', "--lr"), ('"eps": 1e-07', "ds.json: optimizer.params.eps"),
                              ('"total_steps": 3', "--steps"),
                              ('"clip_norm": 0.5', "ds.json: gradient_clipping"), ('"threads": 0', "// default"),
                              ('"schedule": "zero_offload"', "offload_optimizer")):
            line = [line for line in text.splitlines() if value in line]
            self.assertTrue(line and origin in line[0], f"{value} from {origin} in\n{text}")
        self.assertIn("without effect here: zero_optimization.offload_optimizer.pin_memory", text)
        out = self.finetune(*base)
        self.assertIn("3 steps of 2 x 4 rows, schedule zero_offload", out)
        self.assertIn("--batch-size 2 replaces the 4 rows", self.finetune(*base, "--batch-size", 2, "--print-config"))
        file.write_text(text[text.index("//"):])
        again = self.finetune(*base[:-4], "--print-config")
        self.assertIn('"total_steps": 3', again)
        self.assertIn("saved to", self.finetune(*base[:-4], "--steps", 1, "--batch-size", 2))

    def test_a_deepspeed_file_may_leave_the_working_type_to_the_flag(self):
        file = self.folder / "sums.json"
        file.write_text(json.dumps({"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "bf16"},
                                    "gradient_clipping": 1}))
        base = (*self.job(), "--offload", file, "--print-config", "--precision")
        self.assertIn('"low_memory_accumulation": true', self.finetune(*base, "bf16"))
        for precision in ("fp16", "fp32"):
            self.assertIn("grad_accum_dtype: bf16 is neither fp32 nor the working type",
                          self.finetune(*base, precision, expect=USAGE))

    def test_wrong_use_is_named(self):
        for arguments, words in (
                (("--no-such-flag",), "no-such-flag"),
                (("--init", self.folder / "config.json"), "--data"),
                (self.job("--steps", 0), "--steps"),
                (self.job("--precision", "fp8"), "fp32"),
                (self.job("--preset", "zero_ofload"), "zero_offload"),
                (self.job("--device-memory", "12 parsecs"), "parsecs"),
                (self.job("--model", self.folder), "exclude"),
                (("--data", self.folder / "tokens.bin", "--output", self.folder / "out"), "--init")):
            self.assertIn(words, self.finetune(*arguments, expect=USAGE))

    def test_files_that_are_not_there_or_not_what_they_should_be(self):
        self.assertIn("no_such.bin", self.finetune("--init", self.folder / "config.json", "--data", "no_such.bin",
                                                   "--seq-len", 16, "--output", self.folder / "out", expect=FAILED))
        (self.folder / "config.json").write_text("{not json")
        self.assertIn("not valid JSON", self.finetune(*self.job("--steps", 1), expect=USAGE))
        self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    unittest.main()
