#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Configures with each optional part absent, asked for or misspelt, and as a part of another project.

Usage: configure_test.py <cmake> <c++ compiler>
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
OFF = [f"-DSPILLWAY_{part}=OFF" for part in ("TORCH", "CUDA", "MPI", "IO_URING", "TESTS", "BENCHMARKS", "EXAMPLES")]
CONSUMER = """cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
add_subdirectory({source} spillway)
if(NOT TARGET spillway::core OR SPILLWAY_TESTS OR SPILLWAY_WERROR)
  message(FATAL_ERROR "spillway::core is missing, or brings its tests or its own warnings along")
endif()
if(CMAKE_BUILD_TYPE)
  message(FATAL_ERROR "it chose a build type: ${{CMAKE_BUILD_TYPE}}")
endif()
"""


class Configure(unittest.TestCase):
    cmake = compiler = ""

    def configure(self, *options, source=SOURCE):
        """Exit status and output of a configure run in an empty folder, all parts off unless asked."""
        with tempfile.TemporaryDirectory() as build:
            done = subprocess.run([self.cmake, "-G", "Ninja", "-S", str(source), "-B", build,
                                   f"-DCMAKE_CXX_COMPILER={self.compiler}", *OFF, *options],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, " ".join(done.stdout.split())

    def test_all_optional_parts_off(self):
        status, output = self.configure()
        self.assertEqual(status, 0, output)
        for part in ("TORCH", "CUDA", "MPI", "IO_URING"):
            self.assertIn(f"off (SPILLWAY_{part}=OFF)", output)

    def test_a_part_that_is_missing_is_left_out_with_a_reason(self):
        status, output = self.configure("-DSPILLWAY_CUDA=AUTO", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
                                        "-DSPILLWAY_IO_URING=AUTO", "-DCMAKE_IGNORE_PATH=/usr/include;/usr/local/include",
                                        "-DSPILLWAY_XXHASH_INCLUDE=/usr/include")  # needed always, so not looked for
        self.assertEqual(status, 0, output)
        self.assertIn("CUDA: not found: devices are emulated", output)
        self.assertIn("io_uring: not found: files are read and written by threads", output)

    def test_a_part_that_is_asked_for_and_missing_stops_with_the_remedy(self):
        status, output = self.configure("-DSPILLWAY_CUDA=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
        self.assertNotEqual(status, 0)
        self.assertIn("SPILLWAY_CUDA is ON but the CUDA toolkit (nvcc) was not found", output)
        self.assertIn("SPILLWAY_CUDA to AUTO or OFF", output)

    def test_liburing_from_a_folder_of_ones_own(self):
        with tempfile.TemporaryDirectory() as prefix:
            for name in ("include/liburing.h", "lib/liburing.so"):
                path = pathlib.Path(prefix) / name
                path.parent.mkdir(exist_ok=True)
                path.write_text("", encoding="utf-8")
            status, output = self.configure("-DSPILLWAY_IO_URING=ON", f"-DCMAKE_PREFIX_PATH={prefix}")
        self.assertEqual(status, 0, output)
        self.assertIn(f"io_uring: {prefix}/lib/liburing.so", output)

    def configure_with_libtorch(self, symbol, *options):
        """With a folder that looks like LibTorch and whose libc10.so holds `symbol`."""
        with tempfile.TemporaryDirectory() as root:
            for name in ("include/torch/csrc/api/include/torch/torch.h", "lib/libtorch_cpu.so", "lib/libc10.so",
                         "share/cmake/Torch/TorchConfig.cmake"):
                path = pathlib.Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(symbol + "\n" if name.endswith("libc10.so") else "", encoding="utf-8")
            status, output = self.configure(f"-DTorch_DIR={root}/share/cmake/Torch", *options)
            return status, output.replace(root, "LIBTORCH")

    def test_a_libtorch_of_another_string_abi_is_refused_with_the_remedy(self):
        new, old = "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringE", "_ZN3c105ErrorC1ESs"
        switch = "-D_GLIBCXX_USE_CXX11_ABI=0"
        for symbol, flags, remedy in ((old, "", f"add {switch} to CMAKE_CXX_FLAGS"),
                                      (new, switch, f"take {switch} out of CMAKE_CXX_FLAGS")):
            status, output = self.configure_with_libtorch(symbol, "-DSPILLWAY_TORCH=ON", f"-DCMAKE_CXX_FLAGS={flags}")
            self.assertNotEqual(status, 0)
            self.assertIn("SPILLWAY_TORCH is ON, but the LibTorch in LIBTORCH has the", output)
            self.assertIn(remedy, output)
            status, output = self.configure_with_libtorch(symbol, "-DSPILLWAY_TORCH=AUTO", f"-DCMAKE_CXX_FLAGS={flags}")
            self.assertEqual(status, 0, output)
            self.assertIn("LibTorch is left out: the LibTorch in LIBTORCH has the", output)
        for symbol, flags in ((new, ""), (old, switch)):
            status, output = self.configure_with_libtorch(symbol, "-DSPILLWAY_TORCH=ON", f"-DCMAKE_CXX_FLAGS={flags}")
            self.assertEqual(status, 0, output)
            self.assertIn("in LIBTORCH", output)

    def test_a_value_that_is_none_is_named(self):
        status, output = self.configure("-DSPILLWAY_MPI=YES")
        self.assertNotEqual(status, 0)
        self.assertIn('SPILLWAY_MPI is "YES": give AUTO', output)

    def test_as_a_part_of_another_project(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "CMakeLists.txt").write_text(CONSUMER.format(source=SOURCE), encoding="utf-8")
            status, output = self.configure("-USPILLWAY_TESTS", source=folder)
        self.assertEqual(status, 0, output)


if __name__ == "__main__":
    Configure.compiler = sys.argv.pop(2)
    Configure.cmake = sys.argv.pop(1)
    unittest.main(verbosity=1)
