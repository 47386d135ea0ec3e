#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A folder in which a script of scripts/ runs with stand-ins for the programs it calls, which note how they were called."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
TOOLS = ("bash env awk cat cut dirname flock grep ls mkdir rm cp sed touch tr uname xargs").split()


class ScriptStage(unittest.TestCase):
    """PATH holds TOOLS and the stand-ins alone, so nothing of the machine's own can answer instead."""

    def set_stage(self, stubs):
        """Copies the scripts into an empty checkout and makes a program of each entry of `stubs` (name: body)."""
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.root = pathlib.Path(holder.name) / "checkout"
        self.bin = pathlib.Path(holder.name) / "bin"
        self.log = pathlib.Path(holder.name) / "log"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("setup.sh", "test.sh", "lib.sh"):
            shutil.copy(SCRIPTS / name, self.root / "scripts" / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        for name, body in stubs.items():
            self.put_program(self.bin / name, body)

    @staticmethod
    def put_program(path, body):
        path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def run_script(self, name, *arguments, **environment):
        """Exit status, output, and the calls that the stand-ins noted in $LOG."""
        self.log.write_text("", encoding="utf-8")
        variables = {"PATH": str(self.bin), "LOG": str(self.log), "HOME": str(self.root), **environment}
        done = subprocess.run([str(self.bin / "bash"), str(self.root / "scripts" / name), *arguments], env=variables,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              check=False)
        return done.returncode, done.stdout, self.log.read_text(encoding="utf-8").splitlines()
