# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/prepare_data.py: the bytes it writes, and that a refusal leaves nothing behind."""
import bz2
import gzip
import lzma
import shutil
import signal
import subprocess
import sys
import time
import unittest

from prepare_support import SCRIPT, PrepareCase


class PrepareData(PrepareCase):
    def test_runs_as_a_program(self):
        text = self.write("t.txt", b"abc")
        done = subprocess.run([sys.executable, str(SCRIPT), "--output", str(self.folder / "out.bin"), str(text)],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(bytes(self.tokens("out.bin")), b"abc")
        self.assertIn("3 tokens", done.stdout)
        done = subprocess.run([sys.executable, str(SCRIPT), "--output", str(self.folder / "out.bin"), "none.txt"],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("none.txt: no such file", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_packages_come_from_the_projects_own_python_or_the_way_to_get_them_is_named(self):
        checkout = self.folder / "checkout"
        shutil.copytree(SCRIPT.parent, checkout / "scripts")
        text = self.write("t.txt", b"abc")
        command = [sys.executable, "-S", str(checkout / "scripts" / "prepare_data.py"), "--output",
                   str(self.folder / "out.bin"), "--tokenizer", "tokenizer.json", str(text)]  # -S: without packages
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        for words in ("tokenizers", "scripts/setup.sh"):
            self.assertIn(words, done.stderr)
        python = checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\necho own python: \"$@\"\n")
        python.chmod(0o755)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.stdout, "own python: " + " ".join(command[2:]) + "\n")

    def test_bytes_become_tokens_in_the_order_of_the_inputs(self):
        b = self.write("b.txt", b"\x00\xffz")
        a = self.write("a.txt", b"a")
        out = self.expect_success("--output", self.folder / "out.bin", b, a)
        self.assertEqual(self.tokens("out.bin"), [0, 255, 122, 97])
        self.assertIn("4 tokens", out)
        self.expect_success("--output", self.folder / "out.u32.bin", b, a)
        self.assertEqual(self.tokens("out.u32.bin", "I"), [0, 255, 122, 97])

    def test_folders_are_walked_in_order_and_by_suffix(self):
        self.write("in/z.h", b"3")
        self.write("in/b/y.hpp", b"2")
        self.write("in/a.h", b"1")
        self.write("in/skip.txt", b"x")
        for suffixes in ([".h,.hpp"], [".h", ".hpp"]):
            self.expect_success(self.folder / "in", "--output", self.folder / "out.bin", "--suffixes", *suffixes)
            self.assertEqual(bytes(self.tokens("out.bin")), b"123")

    def test_json_lines_are_documents_with_separators(self):
        lines = self.write("a.jsonl", '{"text":"\u00e9"}\n\n{"text":"b","other":1}\n'.encode())
        self.expect_success("--output", self.folder / "out.bin", "--separator", 256, lines)
        self.assertEqual(self.tokens("out.bin"), [0xc3, 0xa9, 256, 98, 256])

    def test_the_tail_is_held_back(self):
        text = self.write("t.txt", bytes(range(100)))
        self.expect_success("--output", self.folder / "out.bin", "--validation-fraction", 0.25, text)
        self.assertEqual(self.tokens("out.bin"), list(range(75)))
        self.assertEqual(self.tokens("out.validation.bin"), list(range(75, 100)))
        self.assertEqual(len(list(self.folder.iterdir())), 3)

        self.assertNotIn("earlier run", self.expect_success("--output", self.folder / "other.bin", text))
        self.assertIn("out.validation.bin is of an earlier run",
                      self.expect_success("--output", self.folder / "out.bin", text))

    def test_packed_files_lists_and_marks_are_read_for_what_they_are(self):
        lines = b'{"text":"one"}\n{"text":"two"}\n'
        for name, data in (("a.jsonl.gz", gzip.compress(lines)), ("b.JSONL", lines), ("c.ndjson.xz", lzma.compress(lines)),
                           ("d.jsonl.bz2", bz2.compress(lines)), ("e.json", b'[{"text":"one"},{"text":"two"}]'),
                           ("f.jsonl", b"\xef\xbb\xbf" + lines), ("g.txt.gz", gzip.compress(b"onetwo")),
                           ("h.txt", b"\xef\xbb\xbfonetwo")):
            self.expect_success("--output", self.folder / "out.bin", self.write(name, data))
            self.assertEqual(bytes(self.tokens("out.bin")), b"onetwo", name)
        self.write("more/a.txt", b"onetwo")
        self.expect_success(self.folder / "e.json", self.folder / "more", "--output", self.folder / "out.bin",
                            "--suffixes", ".txt")
        self.assertEqual(bytes(self.tokens("out.bin")), b"onetwoonetwo")
        self.write("in/a.json", b"[1, 2]")  # text to learn, where that is asked for
        self.expect_success(self.folder / "in", "--output", self.folder / "out.bin", "--suffixes", ".json")
        self.assertEqual(bytes(self.tokens("out.bin")), b"[1, 2]")

    def test_files_that_are_no_text_are_refused_by_kind(self):
        for name, data, words in (("a.parquet", b"PAR1....", "a Parquet file"), ("b.txt", gzip.compress(b"x"), "by gzip"),
                                  ("c.txt", "x".encode("utf-16"), "UTF-16"), ("d.zst", b"\x28\xb5\x2f\xfd", "zstd"),
                                  ("e.txt.gz", b"no gzip", "cannot be unpacked"), ("h.txt.bz2", b"no bzip2", "cannot be unpacked"),
                                  ("i.tar.gz", gzip.compress(b"name" + bytes(253) + b"ustar" + bytes(250)), "a tar archive"), ("f.json", b'{"text":"x"}', "a list"),
                                  ("g.gz", gzip.compress(bytes(range(99)))[:40], "cannot be unpacked")):
            self.expect_refusal([name, words], self.write(name, data))

    def test_a_signal_leaves_no_file_aside(self):
        pipe = self.folder / "slow.jsonl"
        self.write(pipe.name, b'{"text":"x"}\n' * 2_000_000)
        process = subprocess.Popen([sys.executable, SCRIPT, "--output", self.folder / "out.bin",
                                    pipe])
        while not list(self.folder.glob(".out.bin.*")):
            self.assertIsNone(process.poll())
            time.sleep(0.005)
        process.terminate()
        self.assertEqual(process.wait(), 128 + signal.SIGTERM)
        self.assertEqual([path.name for path in self.folder.iterdir()], [pipe.name])

    def test_an_earlier_output_survives_a_refusal(self):
        text = self.write("t.txt", b"abc")
        self.expect_success("--output", self.folder / "out.bin", text)
        self.expect_refusal(["line 1"], text, self.write("bad.jsonl", b"{"))
        self.assertEqual(bytes(self.tokens("out.bin")), b"abc")

    def test_refusals_say_what_is_wrong(self):
        text = self.write("t.txt", b"abc")
        empty = self.write("e.txt", b"")
        (self.folder / "folder").mkdir()
        self.expect_refusal(["missing.txt", "no such file"], self.folder / "missing.txt")
        self.expect_refusal(["is a folder", "--suffixes"], self.folder / "folder")
        self.expect_refusal(["no file ends in .h"], self.folder / "folder", "--suffixes", ".h")
        self.expect_refusal(["no text"], empty)
        self.expect_refusal(["70000", ".u32.bin"], text, "--separator", 70000)
        self.expect_refusal(["too few"], text, "--validation-fraction", 0.5)
        self.expect_refusal(["below 1"], text, "--validation-fraction", 1)
        self.expect_refusal(["not be negative"], text, "--separator", -1)
        self.expect_refusal(["line 1", "\"text\""], self.write("a.jsonl", b'{"body":"x"}'))
        self.expect_refusal(["line 2", "not a string"], self.write("b.jsonl", b'{"text":"x"}\n{"text":5}'))
        self.expect_refusal(["line 1"], self.write("c.jsonl", b"[1]"))
        self.expect_refusal(["tokenizer"], text, "--tokenizer", self.folder / "none.json")

    def test_an_output_of_another_name_or_place_is_refused(self):
        text = self.write("t.txt", b"abc")
        for output, words in (("out.txt", ".bin"), ("none/out.bin", "no such folder")):
            status, printed = self.run_script("--output", self.folder / output, text)
            self.assertNotEqual(status, 0)
            self.assertIn(words, printed)

    def test_packing_fills_rows_and_numbers_their_documents(self):
        lines = b"".join(b'{"text": "%s"}\n' % text for text in (b"aaa", b"bbbb", b"cc", b"d", b"eeeeeeeee"))
        source = self.write("in.jsonl", lines)
        tensors, out = self.packed(5, source)
        self.assertEqual(list(tensors), ["tokens", "documents"])
        a, b, c, e = 97, 98, 99, 101
        tokens, documents = tensors.values()  # "d" alone predicts nothing
        self.assertEqual(tokens, [[a, a, a, c, c, 0], [b, b, b, b, 0, 0], [e] * 6, [e] * 4 + [0, 0]])
        self.assertEqual(documents, [[0, 0, 0, 1, 1, -1], [0] * 4 + [-1, -1], [0] * 6, [0] * 4 + [-1, -1]])
        self.assertIn("19 tokens of 32 bits, 14 of them targets, in 4 rows of 5\n", out)
        self.assertIn("from 5 documents in 1 files\ncut into parts: 1\nleft out, shorter than two tokens: 1\n", out)
        self.expect_success("--output", self.folder / "out.safetensors", "--pack", 5, "--separator", 256,
                            "--validation-fraction", 0.4, source)
        tokens, documents = self.rows("out.safetensors").values()
        self.assertEqual(tokens, [[a, a, a, 256, 100, 256], [b] * 4 + [256, 0], [c, c, 256, 0, 0, 0]])
        self.assertEqual(documents, [[0] * 4 + [1, 1], [0] * 5 + [-1], [0] * 3 + [-1] * 3])
        tokens, documents = self.rows("out.validation.safetensors").values()
        self.assertEqual(tokens, [[e] * 6, [e] * 4 + [256, 0]])

    def test_packing_refuses_what_it_cannot_write(self):
        source = self.write("a.txt", b"abc")
        self.expect_refusal(["--pack", ".safetensors"], "--pack", 4, source)
        for arguments, word in (((0,), "at least 1 token"), ((4, "--validation-fraction", 0.5), "too few"),
                                ((4, "--separator", 1 << 31), "31 bits")):
            status, printed = self.run_script("--output", self.folder / "out.safetensors", source, "--pack", *arguments)
            self.assertNotEqual(status, 0)
            self.assertIn(word, printed)
            self.assertEqual([path.name for path in self.folder.iterdir()], ["a.txt"])

    def test_a_document_longer_than_a_row_is_cut_truncated_or_left_out(self):
        source = self.write("in.jsonl", b'{"text": "abcdefgh"}\n{"text": "xyz"}\n')
        for long, rows, words in (("cut", [b"abcd", b"defg", b"gh\0\0", b"xyz\0"], "cut into parts: 1"),
                                  ("truncate", [b"abcd", b"xyz\0"], "truncated: 1"),
                                  ("drop", [b"xyz\0"], "left out, longer than a row: 1")):
            tensors, out = self.packed(3, "--long", long, source)
            self.assertEqual([bytes(row) for row in tensors["tokens"]], rows)
            self.assertIn(words, out)
            self.assertIn("from 2 documents", out)
        self.expect_refusal(["--long", "--pack"], "--long", "drop", source)


if __name__ == "__main__":
    unittest.main()
