# SPDX-License-Identifier: Apache-2.0
"""What the tests of scripts/prepare_data.py share: a folder, runs of the script inside this process, its files read."""
import array
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
sys.path.insert(0, str(SCRIPT.parent))


def use_the_projects_python():
    """Goes on under the Python of scripts/setup.sh, which has the packages, where it is there."""
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and pathlib.Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(python, [str(python), *sys.argv])


class PrepareCase(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)

    def tearDown(self):
        self.temporary.cleanup()

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def write_lines(self, name, *entries):
        return self.write(name, "".join(json.dumps(entry) + "\n" for entry in entries))

    def run_script(self, *arguments):
        """The exit status and what was printed, both streams together."""
        import prepare_data
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                status = prepare_data.main(list(map(str, arguments)))
            except SystemExit as end:  # argparse
                status = end.code
        return status, printed.getvalue()

    def expect_success(self, *arguments):
        status, printed = self.run_script(*arguments)
        self.assertEqual(status, 0, printed)
        return printed

    def expect_refusal(self, words, *arguments, output="out.bin"):
        """It ends with a message that holds the words, and leaves every file as it was."""
        before = {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}
        status, printed = self.run_script("--output", self.folder / output, *arguments)
        self.assertNotEqual(status, 0, printed)
        for word in words:
            self.assertIn(word, printed)
        self.assertEqual({path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}, before)

    def tokens(self, name, code="H"):
        numbers = array.array(code)
        numbers.frombytes((self.folder / name).read_bytes())
        return list(numbers)

    def rows(self, name):
        """The tensors of a packed file, each as a list of rows."""
        content = (self.folder / name).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        tensors = {}
        for key, entry in json.loads(content[8:start]).items():
            self.assertEqual(entry["dtype"], "I32")
            first, end = entry["data_offsets"]
            numbers = array.array("i")
            numbers.frombytes(content[start + first:start + end])
            rows, columns = entry["shape"]
            tensors[key] = [list(numbers[row * columns:(row + 1) * columns]) for row in range(rows)]
        return tensors

    def packed(self, length, *arguments):
        """Tensors and output of a run that packs."""
        printed = self.expect_success("--output", self.folder / "out.safetensors", "--pack", length, *arguments)
        return self.rows("out.safetensors"), printed
