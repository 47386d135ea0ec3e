#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the sources to the project's rules: who may include whom, style, words that must not appear, lengths.

Usage: tools/tidy.py [--root FOLDER] [--stats]

Prints one line a violation, `file:line: what is wrong`, and ends with 1 where there is one. Reads the files that git
tracks or would track; without git, all files but build products. Needs Python's standard library alone.
"""

import argparse
import ast
import pathlib
import re
import subprocess
import sys

CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "install", "out", ".cache", "__pycache__"}

FILE_LINES = 400
FUNCTION_LINES = 70
COLUMNS = 120

# ---- who may include whom -----------------------------------------------------------------------------------------

ROW = ["core", "device", "memory", "lane", "state", "runtime", "schedule", "plan", "train", "tools"]
LEAVES = {"kernels": [], "formats": ["core"], "comm": ["core", "device", "memory", "lane"],
          "models": ["core", "formats", "state"]}

TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
CUDA = re.compile(r"^(cuda|nccl|cufile|cublas|curand|cudnn|cusparse|nvml|nvToolsExt|nvtx3|cub/|thrust/|cooperative_groups)")
SYSTEM = re.compile(r"^(sys/|linux/|netinet/|arpa/|unistd\.h|fcntl\.h|pthread\.h|sched\.h|signal\.h|dlfcn\.h|dirent\.h|"
                    r"poll\.h|numa\.h|liburing\.h|mpi\.h|time\.h|csignal|ctime|chrono|thread|mutex|shared_mutex|"
                    r"condition_variable|future|semaphore|latch|barrier|stop_token|fstream|filesystem|cstdio|stdio\.h|"
                    r"iostream)")
STANDARD = re.compile(r"^[a-z_0-9]+$|^(stdint|stddef|math|string|limits)\.h$")

TORCH_LAYERS = {"models", "train"}
CUDA_LAYERS = {"device", "memory", "lane", "comm"}
OUTSIDE = {"tests", "examples", "benchmarks"}  # may use anything of the library's
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def may_include(layer):
    """The layers whose headers a file of `layer` may read. The kernels need nothing, so everyone may read theirs."""
    if layer in LEAVES:
        return {layer, "kernels", *LEAVES[layer]} if layer != "kernels" else {layer}
    left = set(ROW[:ROW.index(layer)])
    return {layer} | left | {leaf for leaf, needs in LEAVES.items() if left.issuperset(set(needs) - set(LEAVES))}


def layer_of(path):
    """The layer a file belongs to, None for files outside the library (tests, examples, benchmarks)."""
    parts = path.parts
    if parts[0] in ("src", "tools", "kernels"):
        return parts[1] if parts[0] == "src" else parts[0]
    if parts[:2] == ("include", "spillway"):
        return parts[2] if len(parts) > 3 else ROW[-1]  # a header of all headers stands right of everything
    return None


class Tree:
    """The files of a checkout, by their path relative to its root."""

    def __init__(self, root):
        self.root = root
        self.paths = sorted(self._listed())
        self.texts = {}
        for path in self.paths:
            try:
                self.texts[path] = (root / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # binary

    def _listed(self):
        command = ["git", "-C", str(self.root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        if (self.root / ".git").exists():
            names = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
            return {pathlib.Path(name) for name in names if name and (self.root / name).is_file()}
        found = (path.relative_to(self.root) for path in self.root.rglob("*") if path.is_file())
        return {path for path in found if not SKIPPED_FOLDERS & set(path.parts)}

    def cpp(self):
        return [(path, text) for path, text in self.texts.items() if path.suffix in CPP_SUFFIXES]

    def resolve(self, includer, name):
        """The project's file that an include names, or None where it is a header from outside."""
        for base in (includer.parent, *map(pathlib.Path, ("include", ".", "src", "tests"))):
            candidate = pathlib.Path(*_normal((base / name).parts))
            if candidate in self.texts:
                return candidate
        return None


def _normal(parts):
    out = []
    for part in parts:
        if part == ".." and out:
            out.pop()
        elif part != ".":
            out.append(part)
    return out


def includes_of(text):
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1) == '"', match.group(2)


def project_include(tree, path, target):
    """What is wrong with reading the project's file `target`, or None."""
    layer, other = layer_of(path), layer_of(target)
    if target.suffix in (".cpp", ".cu"):
        return f"includes the source {target}"
    if layer is None:
        return None
    if layer not in ROW and layer not in LEAVES:
        return f"{layer} is no layer of the library"
    if other is None:
        return f"the library does not include {target}"
    if path.suffix in (".cu", ".cuh") and other != "kernels":
        return f"CUDA sources read headers of kernels alone, not {target}"
    if other not in may_include(layer):
        return f"{layer} does not include {other} ({target}): see the row of layers in CONTRIBUTING.md"
    # A header with a source beside it is another schedule; one without is shared by them.
    if layer == other == "schedule" and target.parts[0] == "src" and target.stem != path.stem:
        if target.with_suffix(".cpp") in tree.texts:
            return f"a schedule includes no other schedule ({target})"
    return None


def outside_include(path, name):
    """What is wrong with reading the header `name` from outside the project, or None."""
    layer, top = layer_of(path), path.parts[0]
    cuda_kernels = path.parts[:2] == ("kernels", "cuda")
    if TORCH.match(name) and layer not in TORCH_LAYERS and top not in OUTSIDE and path.name != "torch_pch.h":
        return f"LibTorch's <{name}> belongs in models and train alone"
    if CUDA.match(name):
        allowed = cuda_kernels or (layer in CUDA_LAYERS and top == "src") or top in OUTSIDE
        return None if allowed else f"CUDA's <{name}> belongs in src/device, memory, lane, comm and kernels/cuda alone"
    if layer == "schedule" and SYSTEM.match(name):
        return f"a schedule does not read the system's <{name}>"
    header = path.suffix in (".h", ".cuh")
    if layer == "kernels" and (header or cuda_kernels) and path.parts[1] != "cpu" and not STANDARD.match(name):
        return f"kernels' headers and CUDA sources read the standard library alone, not <{name}>"
    return None


def check_includes(tree):
    uring = []
    for path, text in tree.cpp():
        for number, quoted, name in includes_of(text):
            target = tree.resolve(path, name)
            if target is None and (quoted or name.startswith("spillway/")):
                yield path, number, f'"{name}" is no file of the project; headers from outside stand in <>'
                continue
            wrong = project_include(tree, path, target) if target else outside_include(path, name)
            if wrong:
                yield path, number, wrong
            if name == "liburing.h" and path.parts[0] not in OUTSIDE:
                uring.append((path, number))
    for path, number in uring[1:]:
        yield path, number, f"liburing.h is read in one file alone, and {uring[0][0]} does"


# ---- words ------------------------------------------------------------------------------------------------------------

# A bracket in each pattern keeps this file from matching itself.
WORDS = [
    (re.compile(r"\b([T]ODO|[F]IXME|[X]XX|[H]ACK)\b"), "unfinished: finish it, or write down what holds"),
    (re.compile(r"[n]ot (yet )?implemented|\b[u]nimplemented|[p]laceholder", re.I), "unfinished: finish it, or refuse it"),
    (re.compile(r"(?<![A-Za-z0-9_.$}\"~*<>-])/([w]ork|[r]oot|[h]ome|[t]mp|[f]arm|[U]sers)/[A-Za-z0-9_]+"),
     "a path of one machine"),
    (re.compile(r"[p]ypi\.org|[p]ythonhosted\.org|[d]ownload\.pytorch\.org|[d]eb\.debian\.org|[a]rchive\.ubuntu\.com|"
                r"[c]onda\.anaconda\.org|[c]rates\.io|[r]egistry\.npmjs"), "a registry's host: leave it to the tool's settings"),
    (re.compile(r"\b[t]his session\b|\b[t]he issue\b|\b[C]EO\b|\b[t]he (owner|client) asked\b", re.I),
     "speaks of how the work is organised"),
]
SWITCHED_OFF = re.compile(r"\bDISABLED[_]")


def check_words(tree):
    for path, text in tree.texts.items():
        if path.name == "LICENSE" or path.suffix in (".json", ".txt", ".bin", ".csv"):
            if path.name != "CMakeLists.txt" and not path.name.startswith("CMakePresets"):
                continue  # data
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, why in WORDS:
                match = pattern.search(line)
                if match:
                    yield path, number, f'"{match.group(0)}": {why}'
            if path.parts[0] == "tests" and path.suffix == ".cpp" and SWITCHED_OFF.search(line):
                yield path, number, "a test that is switched off: mend it or remove it"


# ---- form -------------------------------------------------------------------------------------------------------------


def check_form(tree):
    for path, text in tree.texts.items():
        lines = text.splitlines()
        code = path.suffix in CPP_SUFFIXES
        if code and (not lines or lines[0] != "// SPDX-License-Identifier: Apache-2.0"):
            yield path, 1, "the first line is // SPDX-License-Identifier: Apache-2.0"
        if path.suffix in (".h", ".cuh") and "#pragma once" not in lines:
            yield path, 1, "a header holds #pragma once"
        if (code or path.suffix in (".py", ".sh")) and len(lines) > FILE_LINES:
            yield path, FILE_LINES + 1, f"{len(lines)} lines; a file holds {FILE_LINES} at most: split it by what it does"
        for number, line in enumerate(lines, 1):
            if code and len(line) > COLUMNS:
                yield path, number, f"{len(line)} columns; {COLUMNS} at most"
    for path, start, length in functions_of(tree):
        if length > FUNCTION_LINES:
            yield path, start, f"a function of {length} lines; {FUNCTION_LINES} at most"


def functions_of(tree):
    """Each function of the tree: its file, first line and length in lines."""
    for path, text in tree.texts.items():
        if path.suffix in CPP_SUFFIXES:
            for start, length in cpp_functions(text):
                yield path, start, length
        elif path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    yield path, node.lineno, node.end_lineno - node.lineno + 1


BLANKED = re.compile(r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
                     r"|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", re.S | re.M)
CONTAINER = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()=]*$")


def blanked(text):
    """The text without comments, literals and preprocessor lines; line numbers stay."""
    return BLANKED.sub(lambda match: "\n" * match.group(0).count("\n"), text)


def cpp_functions(text):
    """First line and length of each function: an outermost block with a parameter list before it. Brackets decide, not
    a grammar: enough for code that clang-format has laid out."""
    stack = []  # for each open brace: (what it opens, the line where its head began)
    head, head_line, line = "", 1, 1
    for char in blanked(text):
        if char == "\n":
            line += 1
        if char == "{":
            inside = any(kind == "function" for kind, _ in stack)
            if CONTAINER.search(head) and not inside:
                kind = "container"
            elif "(" in head and not re.search(r"=\s*$", head) and not inside:
                kind = "function"
            else:
                kind = "block"
            stack.append((kind, head_line))
            head = ""
        elif char == "}":
            kind, start = stack.pop() if stack else ("block", line)
            if kind == "function":
                yield start, line - start + 1
            head = ""
        elif char == ";":
            head = ""
        elif char.isspace():
            head += " " if head else ""
        else:
            if not head:
                head_line = line
            head += char


def stats(tree):
    lengths = sorted(length for path, _, length in functions_of(tree) if path.suffix in CPP_SUFFIXES)
    files = sorted(len(text.splitlines()) for _, text in tree.cpp())
    if lengths:
        print(f"{len(files)} C++ files, {sum(files)} lines, longest {files[-1]}; {len(lengths)} functions: "
              f"median {lengths[len(lengths) // 2]}, p90 {lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]} lines")


def violations(root):
    """All violations of the tree under `root`: (path, line, what is wrong), sorted."""
    tree = Tree(pathlib.Path(root))
    found = [*check_includes(tree), *check_words(tree), *check_form(tree)]
    return sorted(found, key=lambda entry: (str(entry[0]), entry[1], entry[2]))


def main():
    parser = argparse.ArgumentParser(description="Checks the sources against the project's rules.")
    parser.add_argument("--root", default=str(pathlib.Path(__file__).resolve().parent.parent), help="the checkout")
    parser.add_argument("--stats", action="store_true", help="also print how long files and functions are")
    options = parser.parse_args()
    found = violations(options.root)
    for path, line, what in found:
        print(f"{path}:{line}: {what}")
    if options.stats:
        stats(Tree(pathlib.Path(options.root)))
    print(f"tidy: {len(found)} violations" if found else "tidy: no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
