#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh without a GPU: what it ends with, what it writes. Programs of a build are imitated by scripts.

Usage: gpu_check_test.py
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name)

    def program(self, name, body):
        path = self.build / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def run_it(self, *arguments):
        # Without a sanitizer of the machine's own, so that the imitations are not looked into.
        environment = {**os.environ, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([ROOT / "scripts" / "gpu_check.sh", "--build", self.build, *arguments], capture_output=True,
                              text=True, check=False, env=environment)
        results = self.build / "gpu_check.json"
        return done, json.loads(results.read_text(encoding="utf-8")) if results.exists() else None

    def test_without_a_gpu_it_ends_with_77_and_says_why(self):
        self.program("tests/cuda_test", "echo 'no usable GPU: CUDA finds none'")
        done, results = self.run_it()
        self.assertEqual(done.returncode, 77)
        self.assertIn("no usable GPU: CUDA finds none", done.stdout)
        self.assertIsNone(results)

    def test_what_passes_is_listed_and_written_down(self):
        self.program("tests/cuda_test", "exit 0")
        self.program("tests/cuda_engine_test", "exit 0")
        self.program("tests/process_test", "exit 0")
        self.program("benchmarks/offload_bench", 'while [ "$1" != --json ]; do shift; done; echo \'{"copies": []}\' > "$2"')
        done, results = self.run_it()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(results["failed"], 0)
        self.assertEqual(results["offload_bench"], {"copies": []})
        outcomes = {check["name"]: check["outcome"] for check in results["checks"]}
        self.assertEqual(outcomes["engine"], "passed")
        self.assertEqual(outcomes["curves of the references"], "skipped")
        self.assertRegex(done.stdout, r"kernels +\d+ s +passed")

    def test_one_failure_does_not_hide_the_rest(self):
        self.program("tests/cuda_test", 'case "$*" in *-Kernels*) echo "lane \\"h2d\\" broke"; exit 3;; esac')
        self.program("tests/cuda_engine_test", "exit 0")
        self.program("tests/process_test", "exit 0")
        done, results = self.run_it()
        self.assertEqual(done.returncode, 1)
        self.assertEqual(results["failed"], 1)
        broken = next(check for check in results["checks"] if check["outcome"] == "FAILED")
        self.assertEqual((broken["name"], broken["status"]), ("machine and schedules", 3))
        self.assertIn('lane "h2d" broke', broken["end_of_log"])
        self.assertIn("passed", {check["outcome"] for check in results["checks"] if check["name"] == "engine"})

    def test_a_check_that_hangs_ends_with_the_time(self):
        self.program("tests/cuda_test", 'case "$*" in *=Kernels*) sleep 60;; esac')
        done, results = self.run_it("--seconds", "7")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(results["checks"][0]["status"], 124)

    def test_mistakes_are_explained(self):
        done, _ = self.run_it()
        self.assertEqual(done.returncode, 1)
        self.assertIn("tests/cuda_test", done.stderr)
        self.program("tests/cuda_test", "exit 0")
        for arguments, words in ((["--libtorch", self.build], "no LibTorch"), (["--bogus"], "--bogus")):
            done, _ = self.run_it(*arguments)
            self.assertEqual(done.returncode, 1)
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=1)
