#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every command of README.md, CONTRIBUTING.md and docs/*.md, as it is written there.

Usage: docs_commands_test.py check | run <build folder> | soak <build folder>

A page's blocks of shell commands are one session, in a copy of the checkout, so that nothing in out/ is touched. Build
folders there are links to the one given, and what builds or tests is not done again: cmake and ctest only look whether
presets and targets exist, and setup.sh, test.sh and soak.sh whether they know their options (the test of each runs it).

A comment before a block says what else holds for it:
  <!-- run: exits 3 -->      it ends with this status
  <!-- run: soak -->         too long for every test run: `soak` runs it (scripts/soak.sh)
  <!-- run: no, REASON -->   it is not run, for one of the REASONS below, which shows in its commands
`check` looks at the blocks without running any.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh", "cpp", "cmake", "json", "python", "text"}
REASONS = {"needs a GPU": r"gpu_check|cuda", "installs what it measures": r"benchmarks/peers", "downloads a model": r"\bhf download\b",
           "needs a downloaded model": r"--(tokenizer|model) (qwen3|model/)"}
SOURCES = {"finetune": "examples/finetune*.cpp", "prepare_data.py": "scripts/prepare_data.py",
           "gpu_check.sh": "scripts/gpu_check.sh", "spillway inspect": "tools/spillway.cpp"}
BLOCK = re.compile(r"(?:^<!-- run: (?P<how>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.S | re.M)
STANDS_IN = r"""#!/usr/bin/env python3
import itertools, json, pathlib, subprocess, sys
real, arguments = {real!r}, sys.argv[1:]
if "--install" in arguments:
    sys.exit(subprocess.call([real, *arguments]))
presets = {{preset["name"] for preset in json.load(open("CMakePresets.json"))["configurePresets"]}}
for flag, value in zip(arguments, arguments[1:]):
    if flag == "--preset" and value not in presets:
        sys.exit(f"there is no preset {{value}}")
if "--target" in arguments:
    after = arguments[arguments.index("--target") + 1:]
    for target in itertools.takewhile(lambda word: not word.startswith("-"), after):
        if not list(pathlib.Path("build/release").glob(f"*/{{target.removesuffix('_program')}}")):
            sys.exit(f"the build has no program of the target {{target}}")
"""
OPTIONS_ONLY = r"""#!/usr/bin/env bash
known=$("{script}" --help)
for word in "$@"; do
  case $word in
    -*) grep -qe "$word" <<<"$known" || {{ echo "{script} has no option $word" >&2; exit 1; }} ;;
  esac
done
"""


def blocks(page):
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found["how"] or "", found["language"], found["text"]


def unknown_options(text):
    """Options of commands that no program they are given to knows: those that are not run are looked up in its source."""
    for command in re.sub(r"\\\n", " ", text).split("\n"):
        files = [path for name, pattern in SOURCES.items() if name in command for path in ROOT.glob(pattern)]
        known = "".join(path.read_text(encoding="utf-8") for path in files)
        yield from [word for word in re.findall(r"(?<=\s)--[\w-]+", command) if files and word not in known]


def fault_of(page, line, how, language, text):
    """What is wrong with a block as it stands; none where nothing is."""
    if language not in LANGUAGES:
        return f"a block of {language or 'no language'}"
    if language == "python":
        compile(text, f"{page.name}:{line}", "exec")
    if language != "sh":
        return f"run: {how} before no commands" if how else ""
    if subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode != 0:
        return "not a script of bash"
    reason = how.removeprefix("no, ")
    if how.startswith("no, "):
        shows = reason in REASONS and re.search(REASONS[reason], text)
        unknown = sorted(set(unknown_options(text)))
        if unknown:
            return f"no program has the options {unknown}"
        return "" if shows else f"no such reason, or not one that shows in the commands: {reason}"
    return "" if re.fullmatch(r"|soak|exits \d+", how) else f"unknown: run: {how}"


def check():
    faults, commands = [], 0
    for page in PAGES:
        for line, how, language, text in blocks(page):
            commands += language == "sh"
            fault = fault_of(page, line, how, language, text)
            if fault:
                faults.append(f"{page.relative_to(ROOT)}:{line}: {fault}")
            names = re.findall(r"\b(?:scripts|examples|tests|tools)/[\w/.-]+\.\w+", text) if language == "sh" else []
            faults += [f"{page.name}:{line}: there is no {name}" for name in names if not (ROOT / name).exists()]
        comments = re.findall(r"^<!-- run:", page.read_text(encoding="utf-8"), re.M)
        if len(comments) != sum(bool(how) for _, how, _, _ in blocks(page)):
            faults.append(f"{page.name}: a comment on running stands before no block")
    if commands < 15:
        faults.append(f"only {commands} blocks of commands were found")
    return faults


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def prepare(folder, build):
    """A copy of the checkout with the given build in it; returns the folder of programs that stand in for others."""
    shutil.rmtree(folder, ignore_errors=True)
    left_out = shutil.ignore_patterns("build*", "out", ".venv", ".git", "install", ".cache", "__pycache__")
    shutil.copytree(ROOT, folder / "spillway", ignore=left_out)
    here = folder / "spillway"
    if (ROOT / ".venv").exists():
        (here / ".venv").symlink_to(ROOT / ".venv")
    (here / "build").mkdir()
    for preset in ("release", "core"):
        (here / "build" / preset).symlink_to(build)
    for script in ("setup.sh", "test.sh", "soak.sh"):
        executable(here / "scripts" / script, OPTIONS_ONLY.format(script=ROOT / "scripts" / script))
    for program in ("cmake", "ctest"):
        executable(folder / "bin" / program, STANDS_IN.format(real=shutil.which(program)))
    return folder / "bin"


def session(page, wanted):
    """The page's blocks that are to run, as one script; None where there are none."""
    lines = ["set -eo pipefail"]
    for line, how, language, text in blocks(page):
        if language != "sh" or how.startswith("no, ") or (how == "soak") != (wanted == "soak"):
            continue
        lines.append(f"echo; echo '---- {page.name}, line {line}'")
        if how.startswith("exits"):
            lines.append(f"set +e; ( set -e\n{text}); status=$?; set -e")
            lines.append(f'[ $status = {how.split()[1]} ] || {{ echo "ended with $status, not {how.split()[1]}"; exit 1; }}')
        else:
            lines.append(text)
    return "\n".join(lines) if len(lines) > 1 else None


def run(wanted, build):
    build = pathlib.Path(build).resolve()
    faults, ran = [], 0
    for page in PAGES:
        script = session(page, wanted)
        if script is None:
            continue
        folder = build / "docs_commands" / page.stem
        programs = prepare(folder, build)
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        for allow in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):  # mpirun refuses root else
            environment.setdefault(allow, "1")
        done = subprocess.run(["bash", "-c", script], cwd=folder / "spillway", env=environment, text=True, check=False,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        ran += 1
        if done.returncode != 0:
            faults.append(f"{page.name}: ended with {done.returncode}:\n{done.stdout[-4000:]}")
        shutil.rmtree(folder)
        print(f"{page.name}: {'failed' if done.returncode else 'done'}", flush=True)
    if ran == 0:
        faults.append("nothing was run")
    return faults


def main():
    if sys.argv[1:] == ["check"]:
        faults = check()
    elif len(sys.argv) == 3 and sys.argv[1] in ("run", "soak"):
        faults = run(sys.argv[1], sys.argv[2])
    else:
        sys.exit(__doc__)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
