#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/setup.sh on systems that are bare, half installed, without rights or without room."""

import shutil
import unittest

from script_stage import ScriptStage

PACKAGES = ("g++ cmake ninja-build python3-venv libgtest-dev libbenchmark-dev libfmt-dev libspdlog-dev nlohmann-json3-dev "
            "libcli11-dev liburing-dev libxxhash-dev libopenmpi-dev openmpi-bin").split()

STUBS = {
    "apt-get": 'echo "apt-get $*" >>"$LOG"',
    "apt-cache": "exit 1",
    "sudo": "exit 1",
    "nproc": "echo 2",
    "g++": "exit 1",
    "cmake": "", "ninja": "",
    "id": 'echo "${STUB_UID:-0}"',
    "df": 'printf "head\\nfs 1 1 %s 1%% /\\n" "${STUB_FREE_KB:-99999999}"',
    "dpkg-query": 'for name in $STUB_INSTALLED; do echo "$name installed"; done',
    # One stand-in for the system's python3 and for the one inside .venv: the latter has its folder two levels up.
    "python3": r'''
site=$(dirname "$0")/../lib/python3.11/site-packages
case "$*" in
  "-m venv"*) mkdir -p "$3/bin" "$3/lib/python3.11/site-packages" && cp "$0" "$3/bin/python" ;;
  "-m pip install"*)
    echo "pip $*" >>"$LOG"
    rm -f "$site/loads"
    case "$*" in *torch*)
      mkdir -p "$site/torch/lib" "$site/torch/include/torch/csrc/api/include/torch"
      touch "$site/torch/lib/libtorch_cpu.so" "$site/torch/include/torch/csrc/api/include/torch/torch.h" ;;
    esac
    [ -z "$STUB_PIP_STOPS" ] || exit 1
    touch "$site/loads" ;;
  *find_spec*) echo ;;
  *import_module*) cat >/dev/null; [ -f "$site/loads" ] ;;
esac''',
}


class Setup(ScriptStage):
    def setUp(self):
        self.set_stage(STUBS)

    def run_setup(self, *arguments, installed=tuple(PACKAGES), **environment):
        return self.run_script("setup.sh", *arguments, STUB_INSTALLED=" ".join(installed), **environment)

    def test_a_second_run_installs_nothing(self):
        status, output, calls = self.run_setup()
        self.assertEqual(status, 0, output)
        self.assertEqual(calls, ["pip -m pip install --progress-bar off torch==2.11.0 numpy safetensors tokenizers jinja2"])
        status, output, calls = self.run_setup()
        self.assertEqual((status, calls), (0, []), output)
        self.assertIn("Ready.", output)

    def test_an_interrupted_installation_is_made_anew(self):
        status, output, _ = self.run_setup(STUB_PIP_STOPS="yes")
        self.assertNotEqual(status, 0)
        self.assertIn("pip could not install: torch==2.11.0", output)
        half = self.root / ".venv/lib/python3.11/site-packages/half"
        half.touch()
        status, output, calls = self.run_setup()
        self.assertEqual(status, 0, output)
        self.assertEqual(len(calls), 1)
        self.assertFalse(half.exists())

    def test_an_interrupted_addition_is_made_anew_too(self):
        torch = self.put_libtorch()
        self.assertEqual(self.run_setup(CMAKE_PREFIX_PATH=str(torch))[0], 0)
        shutil.rmtree(torch)
        self.assertNotEqual(self.run_setup(STUB_PIP_STOPS="yes")[0], 0)
        half = self.root / ".venv/lib/python3.11/site-packages/half"
        half.touch()
        status, output, _ = self.run_setup()
        self.assertEqual(status, 0, output)
        self.assertFalse(half.exists())

    def test_a_damaged_installation_is_made_anew(self):
        self.assertEqual(self.run_setup()[0], 0)
        (self.root / ".venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so").unlink()
        status, output, calls = self.run_setup()
        self.assertEqual((status, len(calls)), (0, 1), output)

    def test_a_python_that_no_longer_runs_is_replaced(self):
        self.assertEqual(self.run_setup()[0], 0)
        self.put_program(self.root / ".venv/bin/python", "exit 127")
        status, output, calls = self.run_setup()
        self.assertEqual((status, len(calls)), (0, 1), output)

    def test_what_is_missing_alone_is_installed(self):
        status, output, calls = self.run_setup("--core-only", installed=[p for p in PACKAGES if p != "libfmt-dev"])
        self.assertEqual(status, 0, output)
        self.assertEqual(len(calls), 2, calls)
        self.assertTrue(calls[0].endswith(" update"))
        self.assertTrue(calls[1].endswith("install -y --no-install-recommends libfmt-dev"), calls[1])

    def test_without_rights_the_command_is_printed(self):
        status, output, calls = self.run_setup(installed=PACKAGES[:-2], STUB_UID="1000")
        self.assertNotEqual(status, 0)
        self.assertEqual(calls, [])
        self.assertIn("sudo apt-get install -y --no-install-recommends " + " ".join(PACKAGES[-2:]) + "\n", output)

    def test_without_a_package_manager_the_list_is_printed(self):
        (self.bin / "apt-get").unlink()
        (self.bin / "dpkg-query").unlink()
        status, output, calls = self.run_setup()
        self.assertNotEqual(status, 0)
        self.assertEqual(calls, [])
        self.assertIn("libspdlog-dev", output)
        self.assertIn("CMake 3.25 and later", output)

    def test_without_a_package_manager_what_is_there_is_enough(self):
        (self.bin / "apt-get").unlink()
        (self.bin / "dpkg-query").unlink()
        for name in ("g++", "mpicxx", "mpirun"):
            self.put_program(self.bin / name, "exit 0")
        status, output, _ = self.run_setup()
        self.assertEqual(status, 0, output)

    def test_without_room_nothing_is_downloaded(self):
        status, output, calls = self.run_setup(STUB_FREE_KB="2000000")
        self.assertNotEqual(status, 0)
        self.assertEqual(calls, [])
        self.assertIn("LibTorch needs about 6 GB", output)
        self.assertIn("1 GB are free", output)

    def put_libtorch(self):
        torch = self.root / "elsewhere/torch"
        for name in ("lib/libtorch_cpu.so", "include/torch/csrc/api/include/torch/torch.h"):
            (torch / name).parent.mkdir(parents=True)
            (torch / name).touch()
        (torch / "share/cmake/Torch").mkdir(parents=True)
        return torch

    def test_a_libtorch_that_is_named_is_used(self):
        torch = self.put_libtorch()
        for variable in ({"Torch_DIR": str(torch / "share/cmake/Torch")}, {"CMAKE_PREFIX_PATH": f"/none:{torch}"}):
            shutil.rmtree(self.root / ".venv", ignore_errors=True)
            status, output, calls = self.run_setup(STUB_FREE_KB="2000000", **variable)
            self.assertEqual(status, 0, output)
            self.assertEqual(calls, ["pip -m pip install --progress-bar off numpy safetensors tokenizers jinja2"])
            self.assertIn(f"LibTorch: {torch}", output)

    def test_an_unknown_option_is_named(self):
        status, output, calls = self.run_setup("--everything")
        self.assertEqual((status, calls), (1, []))
        self.assertIn("--everything", output)


if __name__ == "__main__":
    unittest.main(verbosity=1)
