#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks under mpirun: what becomes of a run in which one of them dies, stands still, or does something else.

Usage: mpi_faults_test.py <mpirun> <comm_rank>
"""

import os
import pathlib
import subprocess
import sys
import time
import unittest
import uuid

TIMEOUT = 4  # of comm_rank's communicator
SECONDS = 60  # for what must end at once: starting MPI takes most of them on a busy machine


def environment_of(process):
    try:
        return (process / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has ended, or is another user's


class Ranks(unittest.TestCase):
    mpirun = program = ""

    def launch(self, ranks, *arguments, environment=None, seconds=SECONDS):
        """Exit status, output and time; fails where the run outlives its time or leaves a process behind."""
        command = [self.mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), self.program, *map(str, arguments)]
        mark = str(uuid.uuid4())  # stands in the environment of all ranks
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, **(environment or {}), "SPILLWAY_TEST_RUN": mark})
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            self.fail(f"{arguments} still ran after {seconds} s: {process.communicate()[0]}")
        took = time.monotonic() - started
        self.assertTrue(self.gone_soon(mark), output)
        return process.returncode, output, took

    def gone_soon(self, mark):
        """Whether no process of the run is left, a moment after it; stopped ones would stay for ever."""
        for _ in range(50):
            if not any(mark in environment_of(process) for process in pathlib.Path("/proc").glob("[0-9]*")):
                return True
            time.sleep(0.1)
        return False

    def test_each_rank_knows_its_place(self):
        status, output, _ = self.launch(3, "place")
        self.assertEqual(status, 0, output)
        for rank in range(3):
            self.assertIn(f"rank {rank} of 3, here {rank} of 3, by mpirun through MPI", output)

    def test_a_run_without_a_fault_ends_with_zero(self):
        status, output, _ = self.launch(2, "none")
        self.assertEqual(status, 0, output)
        self.assertNotIn("comm_rank:", output)

    def test_a_program_may_end_mpi_itself(self):
        status, output, _ = self.launch(2, "finalize")
        self.assertEqual(status, 0, output)

    def test_a_killed_rank_ends_the_run(self):
        for rank, calls in ((0, 0), (1, 7), (2, 20)):
            with self.subTest(rank=rank):
                status, output, _ = self.launch(3, "kill", rank, calls)
                self.assertEqual(status, 128 + 9, output)

    def test_a_rank_that_throws_ends_the_run_with_its_reason(self):
        status, output, _ = self.launch(3, "throw", 1, 5)
        self.assertEqual(status, 1, output)
        self.assertIn("no memory is left", output)

    def test_a_rank_that_leaves_without_a_word_ends_the_run(self):
        status, output, _ = self.launch(2, "exit", 1, 5)
        self.assertNotEqual(status, 0, output)

    def test_a_different_call_is_named_by_both_sides(self):
        status, output, _ = self.launch(2, "other", 1, 9)
        self.assertEqual(status, 1, output)
        self.assertRegex(output, r'ranks [01] and [01] disagree: rank [01] calls .*rank [01] calls')
        self.assertIn('broadcast from rank 1 "another", call 9 of the verbs (1 piece, 12 bytes)', output)
        self.assertIn('all_reduce of fp32 "gradients" [9], call 9 of the verbs (1 piece, 400000 bytes)', output)

    def test_a_rank_that_ends_early_is_named(self):
        status, output, _ = self.launch(3, "end", 2, 4)
        self.assertEqual(status, 1, output)
        self.assertRegex(output, 'rank 2 has ended its part of the run before call 4 of the verbs.*all_reduce of fp32 "gradients" .4.')

    def test_a_rank_that_stands_still_is_named_after_the_timeout(self):
        status, output, seconds = self.launch(3, "stop", 1, 3)
        self.assertEqual(status, 1, output)
        self.assertGreaterEqual(seconds, TIMEOUT)
        self.assertRegex(output, r'has waited \d+\.\d s \(since [\d:]+ UTC\) in (all_reduce of fp32 "gradients" .3.|gather_bytes "finite" .2.)')
        self.assertRegex(output, r"for rank 1, which did not come to it")

    def test_an_environment_that_contradicts_itself_is_refused_by_name(self):
        status, output, _ = self.launch(2, "place", environment={"WORLD_SIZE": "4"})
        self.assertNotEqual(status, 0, output)
        self.assertIn("the environment variable WORLD_SIZE is 4, but mpirun set OMPI_COMM_WORLD_SIZE to mean 2", output)


if __name__ == "__main__":
    Ranks.program = sys.argv.pop()
    Ranks.mpirun = sys.argv.pop()
    unittest.main()
