#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Doxygen makes the reference without a warning, with a page for each class and struct of the public headers.

Usage: reference_test.py <build folder>

Ends with 77 (skipped) where doxygen is not installed.
"""

import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def declared():
    """The names of namespace spillway's classes and structs, templates left out."""
    for header in sorted((ROOT / "include").rglob("*.h")):
        text = header.read_text(encoding="utf-8")
        if "namespace spillway {" in text:
            yield from re.findall(r"^(?<!>\n)(?:class|struct) (\w+)(?: final)?(?: : [^{;]*)? \{", text, re.M)


def main():
    if not shutil.which("doxygen"):
        print("doxygen is not installed")
        sys.exit(77)
    folder = pathlib.Path(sys.argv[1]).resolve() / "reference_test"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = (ROOT / "docs" / "Doxyfile").read_text(encoding="utf-8")
    done = subprocess.run(["doxygen", "-"], cwd=ROOT, input=f"{text}\nOUTPUT_DIRECTORY = {folder}\n", text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"doxygen ended with {done.returncode}:\n{done.stdout}")
    pages = {page.stem for page in (folder / "html").glob("*.html")}
    names = sorted(set(declared()))
    if len(names) < 50:
        sys.exit(f"only {len(names)} classes were found in the headers")
    escaped = {name: re.sub(r"(?<!^)_", "__", name) for name in names}
    missing = [name for name in names if not any(page.endswith(f"_1_1{escaped[name]}") for page in pages)]
    if missing:
        sys.exit(f"without a page: {missing}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
