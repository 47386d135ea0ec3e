#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh fails where anything failed or nothing ran, and ends with ctest's own words where all passed."""

import unittest

from script_stage import ScriptStage

# ctest -N lists three suites with the label core, two without it and one of fuzzing, unless a variable says otherwise.
# With -R it also names the suites of STUB_NAMES; the build has targets for two.
STUBS = {
    "nproc": "echo 2",
    "setarch": "exit 1",
    "clang++": "exit 1",
    "cmake": r'''
case "$*" in *"--target help"*) printf '%s: phony\n' all lane_test memory_test; exit ;; esac
echo "cmake $*" >>"$LOG"
case "$*" in *"$STUB_BROKEN"*) [ -z "$STUB_BROKEN" ] || exit 1 ;; esac''',
    "ctest": r'''
count=3
case "$*" in *"-LE core"*) count=2 ;; *"-L fuzz"*) count=1 ;; esac
case "$*" in *" -N"*)
  case "$*" in *" -R "*) for name in $STUB_NAMES; do echo "  Test  #7: $name"; done ;; esac
  echo "Total Tests: ${STUB_SUITES:-$count}"
  exit ;;
esac
echo "ctest $*" >>"$LOG"
case "$*" in *"$STUB_FAILING"*) [ -z "$STUB_FAILING" ] || exit 8 ;; esac''',
}


class TestScript(ScriptStage):
    def setUp(self):
        self.set_stage(STUBS)
        self.put_program(self.root / "scripts/setup.sh", 'echo "setup $*" >>"$LOG"; exit ${STUB_SETUP:-0}')

    def test_all_presets_in_order_core_first(self):
        status, output, calls = self.run_script("test.sh")
        self.assertEqual(status, 0, output)
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 16")
        self.assertEqual(calls[0], "setup ")
        release = calls[1:6]
        self.assertIn("--preset release", release[0])
        self.assertIn("--target core_tests", release[1])
        self.assertIn("-L core", release[2])
        self.assertTrue(release[3].startswith("cmake --build build/release"))
        self.assertIn("-LE core", release[4])
        self.assertEqual([call.split()[2] for call in calls if "--preset" in call], ["release", "asan", "tsan", "fuzz"])
        self.assertEqual(["--target fuzz" in call or "-L fuzz" in call for call in calls[-3:]], [False, True, True])

    def test_without_clang_fuzzing_is_left_out_and_that_is_said(self):
        (self.bin / "clang++").unlink()
        status, output, calls = self.run_script("test.sh")
        self.assertEqual(status, 0, output)
        self.assertIn("left out: clang++ is missing", output)
        self.assertFalse(any("fuzz" in call for call in calls))

    def test_fast_leaves_the_sanitizers_out(self):
        _, output, calls = self.run_script("test.sh", "--fast")
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 5")
        self.assertFalse(any("asan" in call or "fuzz" in call for call in calls))

    def test_the_core_alone_needs_no_libtorch(self):
        _, _, calls = self.run_script("test.sh", "--preset", "core")
        self.assertEqual(calls[0], "setup --core-only")
        self.assertFalse(any("SPILLWAY_TORCH=ON" in call for call in calls))

    def test_a_suite_that_fails_fails_the_run_and_the_others_still_run(self):
        status, output, calls = self.run_script("test.sh", STUB_FAILING="build/release")
        self.assertEqual(status, 1)
        self.assertNotIn("100%", output)
        self.assertIn("FAILED: 2 of the phases above.", output)
        self.assertTrue(any("ctest --test-dir build/tsan" in call for call in calls))

    def test_a_build_that_fails_fails_the_run(self):
        status, output, calls = self.run_script("test.sh", "--fast", STUB_BROKEN="--target core_tests")
        self.assertEqual(status, 1)
        self.assertNotIn("100%", output)
        self.assertFalse(any(call.startswith("ctest") for call in calls))

    def test_a_setup_that_fails_builds_nothing(self):
        status, _, calls = self.run_script("test.sh", STUB_SETUP="1")
        self.assertEqual((status, calls), (1, ["setup "]))

    def test_suites_that_are_targets_are_built_alone(self):
        status, output, calls = self.run_script("test.sh", "--fast", "-R", "lane|mem", STUB_NAMES="lane_test memory_test",
                                                STUB_SUITES="2")
        self.assertEqual(status, 0, output)
        self.assertEqual(output.splitlines()[-1], "100% tests passed, 0 tests failed out of 2")
        self.assertEqual([call for call in calls if "--build" in call],
                         ["cmake --build build/release -j 2 --target lane_test memory_test"])
        self.assertEqual([call.endswith(" -R lane|mem") for call in calls if call.startswith("ctest")], [True])

    def test_where_one_suite_is_no_target_everything_is_built(self):
        status, output, calls = self.run_script("test.sh", "--fast", "-R", "lane|tidy", STUB_NAMES="lane_test tidy")
        self.assertEqual(status, 0, output)
        self.assertEqual([call for call in calls if "--build" in call],
                         ["cmake --build build/release -j 2 --target core_tests", "cmake --build build/release -j 2"])
        self.assertEqual(len([call for call in calls if call.startswith("ctest")]), 2)

    def test_a_suite_built_alone_that_fails_fails_the_run(self):
        for broken in ({"STUB_FAILING": "build/release"}, {"STUB_BROKEN": "--target lane_test"}):
            status, output, _ = self.run_script("test.sh", "--fast", "-R", "lane", STUB_NAMES="lane_test", STUB_SUITES="1", **broken)
            self.assertEqual(status, 1)
            self.assertIn("FAILED: 1 of the phases above.", output)

    def test_of_fuzzing_the_matching_targets_alone(self):
        status, output, calls = self.run_script("test.sh", "--preset", "fuzz", "-R", "lane", STUB_NAMES="lane_test")
        self.assertEqual(status, 0, output)
        self.assertEqual([call for call in calls if "--build" in call], ["cmake --build build/fuzz -j 2 --target lane_test"])
        self.assertIn("-L fuzz", calls[-1])

    def test_several_sources_are_compiled_at_once_in_continuous_integration_alone(self):
        for environment, expected in ({}, [False, False]), ({"CI": "true"}, [True, False]):
            _, _, calls = self.run_script("test.sh", "--preset", "release", "--preset", "core", **environment)
            self.assertEqual(["SPILLWAY_UNITY=ON" in call for call in calls if "cmake --preset" in call], expected)

    def test_a_run_of_no_suite_fails(self):
        status, output, calls = self.run_script("test.sh", "-R", "nosuch", STUB_SUITES="0")
        self.assertEqual(status, 1)
        self.assertFalse(any("--build" in call for call in calls))
        self.assertIn("no suite ran", output)


if __name__ == "__main__":
    unittest.main(verbosity=1)
