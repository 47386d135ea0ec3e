#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs a build, moves the installation elsewhere, and builds and runs a small project that finds it there.

Usage: install_test.py <core|spillway> <yes|no> <build folder> <c++ compiler> [LibTorch folder] [compiler launcher]...

`yes` where the build has the spillway program (no CLI11, no program). `core` installs that component alone, and looks for no LibTorch; `spillway` installs everything.
"""

import os
import pathlib
import shutil
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
CONSUMER = SOURCE / "tests" / "consumer"


def run(*command, fails=False):
    """The output of a command that must succeed (or, where asked, fail)."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if (done.returncode != 0) != fails:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def demand(condition, message):
    if not condition:
        sys.exit(message)


class Case:
    def __init__(self, component, build, compiler, libtorch, launcher):
        self.component, self.build = component, pathlib.Path(build).resolve()
        self.compiler, self.libtorch, self.launcher = compiler, libtorch, launcher
        self.scratch = self.build / "install_test" / component
        self.prefix = self.scratch / "moved" / "prefix"

    def install(self):
        """Installs into one folder and moves it to another, so that nothing of the first may be needed."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        first = self.scratch / "first"
        only = ["--component", "core"] if self.component == "core" else []
        run("cmake", "--install", self.build, "--prefix", first, *only)
        self.prefix.parent.mkdir(parents=True)
        first.rename(self.prefix)

    def check_files(self):
        """No installed CMake file names a folder of this machine's build; the core's name no LibTorch."""
        files = list(self.prefix.rglob("*.cmake"))
        demand(any(file.name == "spillwayConfig.cmake" for file in files), "no spillwayConfig.cmake was installed")
        forbidden = [str(SOURCE), str(self.build), "rpath", *([self.libtorch] if self.libtorch else [])]
        for file in files:
            if file.name == "FindLibTorch.cmake":
                continue  # sets the run path of whoever uses it
            text = file.read_text(encoding="utf-8")
            for word in forbidden:
                demand(word not in text, f"{file} names {word}")
        if self.component == "core":
            named = [str(file) for file in self.prefix.rglob("*") if file.parent.name in ("models", "train")]
            demand(not named, f"the core's installation holds {named}")
            demand(not list(self.prefix.rglob("FindLibTorch.cmake")), "the core's installation looks for LibTorch")

    def check_program(self):
        """The spillway program stands in bin and runs from where it was moved to."""
        said = run(self.prefix / "bin" / "spillway", "inspect", "--help")
        demand("--checksums" in said, f"spillway inspect --help said:\n{said}")

    def configure(self, *options, fails=False):
        launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={';'.join(self.launcher)}"] if self.launcher else []
        return run("cmake", "-G", "Ninja", "-S", CONSUMER, "-B", self.scratch / "build", f"-DCMAKE_PREFIX_PATH={self.prefix}",
                   f"-DCMAKE_CXX_COMPILER={self.compiler}", *launcher, *options, fails=fails)

    def check_refusals(self):
        """What is not there is said, with the remedy, instead of an error from the linker."""
        if self.component == "core":
            said = self.configure("-DCONSUMER_COMPONENTS=spillway", fails=True)
            demand("core alone" in " ".join(said.split()), f"no word of the missing component in:\n{said}")
        else:
            header = pathlib.Path(self.libtorch) / "include" / "torch" / "headeronly" / "version.h"
            own = header.read_text(encoding="utf-8") if header.exists() else ""
            cuda = (pathlib.Path(self.libtorch) / "lib" / "libtorch_cuda.so").exists()
            # A torch of another minor version than the one that the library was built with, and one without CUDA.
            self.refused(self.imitation("\n".join(f"#define TORCH_VERSION_{part} {number}" for part, number in
                                                  (("MAJOR", 1), ("MINOR", 0), ("PATCH", 0)))), "has 1.0")
            if cuda and own:
                self.refused(self.imitation(own), "is one without: take one with CUDA")
            self.refused(self.scratch / "nothing", "Torch_DIR leads to no LibTorch")
        self.refuse_another_fmt()
        shutil.rmtree(self.scratch / "build")

    def imitation(self, version):
        """A folder that looks like a LibTorch of a version, without CUDA."""
        other = self.scratch / "other"
        shutil.rmtree(other, ignore_errors=True)
        for name in ("include/torch/csrc/api/include/torch/torch.h", "lib/libtorch_cpu.so", "lib/libc10.so"):
            (other / name).parent.mkdir(parents=True, exist_ok=True)
            (other / name).write_text("std::__cxx11\n", encoding="utf-8")  # the string ABI of a build
        (other / "include" / "torch" / "headeronly").mkdir()
        (other / "include" / "torch" / "headeronly" / "version.h").write_text(version, encoding="utf-8")
        return other

    def refused(self, libtorch, words):
        said = self.configure(f"-DTorch_DIR={libtorch}/share/cmake/Torch", fails=True)
        demand(words in " ".join(said.split()), f'no word of "{words}" in:\n{said}')

    def refuse_another_fmt(self):
        """An fmt of another version than the library's: found first, and refused instead of failing in the linker."""
        package = self.scratch / "fmt"
        package.mkdir(exist_ok=True)
        (package / "fmt-config.cmake").write_text("add_library(fmt::fmt INTERFACE IMPORTED)\n", encoding="utf-8")
        (package / "fmt-config-version.cmake").write_text(
            'set(PACKAGE_VERSION "99.1.0")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n', encoding="utf-8")
        said = self.configure("-DCONSUMER_COMPONENTS=core", f"-Dfmt_DIR={package}", fails=True)
        demand("but 99 is installed here" in " ".join(said.split()), f"no word of the other fmt in:\n{said}")

    def build_and_run(self):
        options = ["-DCONSUMER_COMPONENTS=core"]
        if self.component == "spillway":
            options = [f"-DTorch_DIR={self.libtorch}/share/cmake/Torch"]
        self.configure(*options)
        run("cmake", "--build", self.scratch / "build")
        print(run(self.scratch / "build" / "plan", self.scratch / "weights.safetensors"), end="")
        if self.component == "spillway":
            print(run(self.scratch / "build" / "train"), end="")


def main():
    component, program, build, compiler, *rest = sys.argv[1:]
    libtorch = os.path.realpath(rest.pop(0)) if component == "spillway" else ""
    case = Case(component, build, compiler, libtorch, rest)
    case.install()
    case.check_files()
    if program == "yes":
        case.check_program()
    case.check_refusals()
    case.build_and_run()


if __name__ == "__main__":
    main()
