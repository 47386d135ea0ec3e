#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""offload_bench writes every key it promises, with values that can be, and refuses flags that cannot.

Usage: offload_bench_test.py <offload_bench>
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SETS = {"compute": {"compute"}, "copies": {"h2d", "d2h"}, "adam": {"adam"},
        "compute+copies": {"compute", "h2d", "d2h"}, "compute+adam": {"compute", "adam"},
        "copies+adam": {"h2d", "d2h", "adam"}, "compute+copies+adam": {"compute", "h2d", "d2h", "adam"}}


class OffloadBench(unittest.TestCase):
    program = ""

    def run_it(self, *flags):
        return subprocess.run([self.program, *flags], capture_output=True, text=True, check=False)

    def check_spread(self, spread):
        self.assertEqual(set(spread), {"median", "q25", "q75", "min", "max", "samples"})
        self.assertGreater(spread["min"], 0)
        ascending = [spread[key] for key in ("min", "q25", "median", "q75", "max")]
        self.assertEqual(ascending, sorted(ascending))
        self.assertGreaterEqual(spread["samples"], 3)

    def measured(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "out.json"
            done = self.run_it("--quick", "--json", str(file), *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(file.read_text(encoding="utf-8")), done.stdout

    def test_json_has_every_key_and_table_every_part(self):
        out, table = self.measured("--sizes", "4KiB,64KiB", "--threads", "1", "--parameters", "5000")
        self.assertEqual(list(out), ["schema", "machine", "settings", "copies", "adam", "interference", "step"])
        self.assertEqual(out["schema"], "spillway.offload_bench.1")
        self.assertGreaterEqual(out["machine"]["cores"], 1)
        self.assertTrue(out["machine"]["instruction_set"])
        self.assertEqual(out["settings"]["adam_parameters"], 5000)
        cells = [(c["tier"], c["bytes"], c["direction"]) for c in out["copies"]]
        self.assertEqual(cells, [(tier, size, way) for tier in ("host", "pinned") for size in (4096, 65536)
                                 for way in ("h2d", "d2h")])
        for cell in out["copies"]:
            self.check_spread(cell["alone_gb_per_s"])
            self.check_spread(cell["both_ways_gb_per_s"])
        self.assertEqual([(a["threads"], a["working_copy"]) for a in out["adam"]], [(1, "fp32"), (1, "bf16")])
        for cell, bytes_each in zip(out["adam"], (28, 30)):
            self.check_spread(cell["ns_per_parameter"])
            # Two ways to say one thing: the fastest in one is the fastest in the other.
            self.assertAlmostEqual(cell["ns_per_parameter"]["min"] * cell["gb_per_s"]["max"], bytes_each, places=6)
        for text in ("Copies, GB/s", "Adam on the CPU", "slower beside others", "zero_offload / resident"):
            self.assertIn(text, table)

    def test_interference_and_steps(self):
        out, _ = self.measured("--sizes", "64KiB", "--threads", "1")
        interference = out["interference"]
        self.assertEqual({name: set(parts) for name, parts in interference["seconds"].items()}, SETS)
        self.assertEqual({name: set(parts) for name, parts in interference["slowdown"].items()}, SETS)
        for activities in interference["seconds"].values():
            for spread in activities.values():
                self.check_spread(spread)
        for own in ("compute", "copies", "adam"):
            for ratio in interference["slowdown"][own].values():
                self.assertEqual(ratio, 1)
        self.assertEqual(set(out["step"]["schedules"]), {"resident", "zero_offload"})
        for schedule in out["step"]["schedules"].values():
            self.check_spread(schedule["seconds"])
            self.assertTrue({"h2d", "d2h", "cpu", "compute"} <= set(schedule["busy_seconds"]))
            self.assertGreater(schedule["device_peak_bytes"], 0)
        offloaded = out["step"]["schedules"]["zero_offload"]["busy_seconds"]
        for lane in ("h2d", "d2h", "cpu"):
            self.assertGreater(offloaded[lane], 0)
        self.assertEqual(out["step"]["schedules"]["resident"]["busy_seconds"]["h2d"], 0)

    def test_a_modelled_link_is_not_passed(self):
        out, _ = self.measured("--sizes", "1MiB", "--threads", "1", "--link-bandwidth", "200MB/s")
        for cell in out["copies"]:
            self.assertLess(cell["alone_gb_per_s"]["median"], 0.21)

    def test_flags_that_cannot_be_are_explained(self):
        for flags, words in ((["--sizes", "64Kx"], "64Kx"), (["--sizes", "0"], "expected 1 byte"),
                             (["--threads", "0"], "--threads 0"), (["--threads", "100000"], "cores"),
                             (["--seconds", "-1"], "--seconds"), (["--device", "tpu"], "--device"),
                             (["--device", "cuda", "--quick"], "cuda"), (["--link-bandwidth", "fast"], "fast"),
                             (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json"), (["--bogus"], "--bogus"),
                             (["--model", "/nowhere"], "/nowhere")):
            done = self.run_it(*flags)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertIn(words, done.stderr, flags)
            self.assertNotIn("Copies", done.stdout)

    def test_help_names_the_schema(self):
        done = self.run_it("--help")
        self.assertEqual(done.returncode, 0)
        self.assertIn("spillway.offload_bench.1", " ".join(done.stdout.split()))


if __name__ == "__main__":
    OffloadBench.program = sys.argv.pop(1)
    unittest.main(verbosity=1)
