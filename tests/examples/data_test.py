#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From chats to a trained model: scripts/prepare_data.py, then finetune on all tokens and on responses alone.

Usage: data_test.py <finetune program> [unittest argument]...
"""
import array
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

FINETUNE = pathlib.Path(sys.argv.pop(1)).resolve()
PREPARE = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"
DONE, FAILED, USAGE = 0, 1, 2
NO = -100
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 32,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
}


def read_tensors(path):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, entry in json.loads(content[8:start]).items():
        numbers = array.array("i")
        first, end = entry["data_offsets"]
        numbers.frombytes(content[start + first:start + end])
        columns = entry["shape"][1]
        tensors[name] = [list(numbers[at:at + columns]) for at in range(0, len(numbers), columns)]
    return tensors


def write_tensors(path, tensors):
    header, data = {}, b""
    for name, rows in tensors.items():
        content = b"".join(array.array("i", row).tobytes() for row in rows)
        header[name] = {"dtype": "I32", "shape": [len(rows), len(rows[0])], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def targets_in(tensors):
    """How many positions have a target, by the rule of docs/formats.md."""
    return sum(label != NO and own >= 0 and own == before
               for labels, documents in zip(tensors["labels"], tensors["documents"])
               for label, own, before in zip(labels[1:], documents[1:], documents))


class DataTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        (self.folder / "config.json").write_text(json.dumps(MODEL))

    def run_program(self, *command, expect=DONE):
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False, env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.assertEqual(done.returncode, expect, done.stdout)
        return done.stdout

    def finetune(self, data, *more, output="out", expect=DONE):
        return self.run_program(FINETUNE, "--init", self.folder / "config.json", "--data", data, "--lr", "1e-2", "--output",
                                self.folder / output, "--log", self.folder / output / "log.jsonl", *more, expect=expect)

    def log(self, output="out"):
        return [json.loads(line) for line in (self.folder / output / "log.jsonl").read_text().splitlines()]

    def prepare(self, name, chats, *more):
        lines = self.folder / "chats.jsonl"
        lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        path = self.folder / f"{name}.safetensors"
        out = self.run_program(sys.executable, PREPARE, "--output", path, "--pack", 100, "--format", "chat", *more, lines)
        return path, out

    def chats(self, count):
        numbers = random.Random(3)
        question = lambda: "".join(chr(numbers.randrange(65, 91)) for _ in range(numbers.randrange(8, 30)))
        return [[{"role": "user", "content": question()}, {"role": "assistant", "content": "yes, " + question()[:3].lower()}]
                for _ in range(count)]

    def complement(self, tensors, name):
        """The same rows with the other targets: what is no response."""
        labels = [[token if label == NO and document >= 0 else NO for token, label, document in zip(*row)]
                  for row in zip(tensors["tokens"], tensors["labels"], tensors["documents"])]
        path = self.folder / f"{name}.safetensors"
        write_tensors(path, {**tensors, "labels": labels})
        return path

    def test_the_loss_of_all_tokens_is_that_of_responses_and_of_the_rest_each_with_its_number(self):
        everything, _ = self.prepare("all", self.chats(9))
        responses, out = self.prepare("responses", self.chats(9), "--targets", "responses")
        tensors = read_tensors(responses)
        self.assertIn(f"{targets_in(tensors)} of them targets", out)
        rest = self.complement(tensors, "rest")
        rows = len(tensors["tokens"])
        losses, counts = {}, {}
        for name, file in (("all", everything), ("responses", responses), ("rest", rest)):
            held = read_tensors(file)
            counts[name] = targets_in({**held, "labels": held.get("labels", held["tokens"])})
            for batch in (1, rows):
                self.finetune(file, "--no-shuffle", "--steps", 1, "--batch-size", batch, "--grad-accum", rows // batch)
                losses[name, batch] = self.log()[0]["loss"]
            self.assertAlmostEqual(losses[name, 1], losses[name, rows], delta=1e-4)
        self.assertEqual(counts["all"], counts["responses"] + counts["rest"])
        self.assertGreater(abs(losses["all", 1] - losses["responses", 1]), 1e-3)
        expected = sum(losses[name, 1] * counts[name] for name in ("responses", "rest")) / counts["all"]
        self.assertAlmostEqual(losses["all", 1], expected, delta=1e-4)

    def test_training_on_responses_learns_them_and_not_the_questions(self):
        everything, _ = self.prepare("all", self.chats(60))
        responses, _ = self.prepare("responses", self.chats(60), "--targets", "responses")
        questions = self.complement(read_tensors(responses), "questions")

        def evaluations(data, eval_data):
            out = self.finetune(data, "--steps", 40, "--batch-size", 4, "--eval-data", eval_data, "--eval-batches", 0)
            return [float(line.split("loss ")[1].split(",")[0]) for line in out.splitlines() if line.startswith("evaluation")]

        before, after = evaluations(responses, responses)
        self.assertLess(after, before - 3)
        unlearned, learned = evaluations(responses, questions)[-1], evaluations(everything, questions)[-1]
        self.assertGreater(unlearned, learned + 1)

    def put_rows(self, name, count, masked=()):
        tokens = [[(row * 41 + place * place) % 256 for place in range(17)] for row in range(count)]
        labels = [[NO] * 17 if row in masked else [NO] * 9 + tokens[row][9:] for row in range(count)]
        path = self.folder / f"{name}.safetensors"
        write_tensors(path, {"tokens": tokens, "labels": labels})
        return path

    def test_an_epoch_is_rounded_up_to_whole_steps(self):
        data = self.put_rows("rows", 5)
        for epochs, batch, accumulation, steps in ((1, 2, 2, 2), (1, 5, 1, 1), (2, 2, 1, 5), (1, 7, 1, 1), (0.5, 2, 1, 2)):
            out = self.finetune(data, "--epochs", epochs, "--batch-size", batch, "--grad-accum", accumulation)
            self.assertIn(f"5 rows of 16 tokens, {steps} steps of {accumulation} x {batch} rows", out)
            self.assertEqual(len(self.log()), steps)

    def test_a_run_resumed_inside_a_last_batch_ends_in_the_same_bits(self):
        data = self.put_rows("rows", 5, masked=(1, 2))
        self.finetune(data, "--steps", 7, "--batch-size", 2, output="whole")
        for at in (2, 3, 5):  # 4, 6 and 10 rows: before, in the middle of and behind the end of an epoch
            output = f"at{at}"
            self.finetune(data, "--steps", at, "--batch-size", 2, "--save-every", at, output=output)
            out = self.finetune(data, "--steps", 7, "--batch-size", 2, "--resume", output=output)
            self.assertIn(f"resumed after step {at}", out)
            for key in ("step", "loss", "grad_norm", "lr"):
                self.assertEqual([line[key] for line in self.log(output)], [line[key] for line in self.log("whole")])
            self.assertEqual((self.folder / output / "model.safetensors").read_bytes(),
                             (self.folder / "whole" / "model.safetensors").read_bytes())
        self.finetune(data, "--steps", 3, "--batch-size", 2, "--save-every", 3, output="other")
        self.finetune(data, "--steps", 7, "--batch-size", 1, "--grad-accum", 2, "--resume", output="other")
        for ours, theirs in zip(self.log("other"), self.log("whole")):
            self.assertEqual(ours["status"], theirs["status"])
            if ours["status"] == "updated":
                self.assertAlmostEqual(ours["loss"], theirs["loss"], delta=1e-3)

    def test_a_run_is_not_resumed_on_other_data_of_as_many_rows(self):
        data = self.put_rows("rows", 5)
        self.finetune(data, "--steps", 2, "--batch-size", 2, "--save-every", 2)
        for other in (self.put_rows("masked", 5, masked=(1,)), self.put_rows("rows", 6)):
            out = self.finetune(other, "--steps", 4, "--batch-size", 2, "--resume", expect=USAGE)
            self.assertIn("--resume: the checkpoint was made with data_", out)
        # What counts is what was trained on, not what stands there when a checkpoint is written.
        self.put_rows("rows", 5).rename(self.folder / "moved.safetensors")
        self.assertIn("resumed after step 2", self.finetune(self.folder / "moved.safetensors", "--steps", 4, "--batch-size", 2,
                                                            "--resume"))

    def test_a_second_run_does_not_mix_with_the_checkpoints_of_the_first(self):
        data = self.put_rows("rows", 5)
        self.finetune(data, "--steps", 4, "--batch-size", 1, "--save-every", 4)
        out = self.finetune(data, "--steps", 2, "--batch-size", 1, "--save-every", 1, expect=USAGE)
        self.assertIn("holds checkpoints of an earlier run (the newest is step-00000004)", out)
        self.finetune(data, "--steps", 2, "--batch-size", 1, "--save-every", 1, "--checkpoints", self.folder / "own")
        self.assertIn("nothing is left to train", self.finetune(data, "--steps", 3, "--batch-size", 1, "--resume"))

    def test_epochs_are_counted_in_rows_when_a_resumed_run_has_another_batch_size(self):
        data = self.put_rows("rows", 24)
        self.finetune(data, "--steps", 4, "--batch-size", 2, "--save-every", 4)
        out = self.finetune(data, "--epochs", 1, "--batch-size", 4, "--resume")  # 8 rows are done, 16 are left
        self.assertIn("24 rows", out)
        self.assertEqual(self.log()[-1]["step"], 8)

    def test_a_token_outside_of_the_vocabulary_is_found_before_training(self):
        data = self.put_rows("rows", 9)
        tensors = read_tensors(data)
        tensors["tokens"][8][1] = 256
        write_tensors(data, tensors)
        out = self.finetune(data, "--steps", 1, "--batch-size", 1, "--no-shuffle", expect=FAILED)
        self.assertIn("row 8", out)
        self.assertNotIn("step 1/", out)
        out = self.finetune(self.put_rows("rows", 9), "--steps", 1, "--generate", 3, "--prompt", "\u00e9")
        self.assertIn("generated", out)

    def test_a_step_without_a_target_changes_nothing_and_says_so(self):
        data = self.put_rows("rows", 3, masked=(0, 1))
        self.finetune(data, "--no-shuffle", "--steps", 2, "--batch-size", 2)
        self.assertEqual([(line["status"], line["loss"] == "nan") for line in self.log()], [("empty", True), ("updated", False)])
        write_tensors(self.folder / "one.safetensors", {name: rows[2:] for name, rows in read_tensors(data).items()})
        self.finetune(self.folder / "one.safetensors", "--steps", 1, "--batch-size", 1, output="one")
        self.assertAlmostEqual(self.log("one")[0]["loss"], self.log()[1]["loss"], delta=1e-6)

    def test_files_that_would_train_on_nothing_or_on_what_they_mean_to_mask_are_refused(self):
        data = self.put_rows("rows", 3, masked=(0, 1, 2))
        self.assertIn("has a target", self.finetune(data, "--steps", 1, expect=FAILED))
        tensors = read_tensors(self.put_rows("rows", 3))
        write_tensors(data, {"tokens": tensors["tokens"], "loss_mask": tensors["labels"]})
        self.assertIn("loss_mask", self.finetune(data, "--steps", 1, expect=FAILED))
        self.assertFalse((self.folder / "out" / "model.safetensors").exists())


if __name__ == "__main__":
    unittest.main()
