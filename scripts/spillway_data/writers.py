# SPDX-License-Identifier: Apache-2.0
"""Writes token files: aside, and renamed when they are complete."""
import array
import collections
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile

from spillway_data import Problem


@contextlib.contextmanager
def uninterrupted():
    """Signals that end the program wait until the end: else a file could be made that nobody knows of yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class TokenWriter:
    """Writes token numbers to a file aside; `publish` cuts it into the output files and gives them their names."""

    def __init__(self, output):
        self.output = output
        self.wide = output.name.endswith(".u32.bin")
        self.code = "I" if self.wide else "H"
        self.size = 4 if self.wide else 2
        self.count = 0
        self.counts = collections.Counter()  # documents that were not written as they are, by what befell them
        if not output.parent.is_dir():
            raise Problem(f"{output.parent}: no such folder for the output")
        self.asides = []
        self.file = self.open_aside()

    def open_aside(self):
        with uninterrupted():
            handle, name = tempfile.mkstemp(prefix=f".{self.output.name}.", suffix=".part", dir=self.output.parent)
            self.asides.append(pathlib.Path(name))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's files are for their owner alone
        return os.fdopen(handle, "w+b")

    def write(self, tokens, marks, where):
        """Appends token numbers: a list, or bytes whose values they are. All are targets here: `marks` is None."""
        if isinstance(tokens, bytes):
            numbers = bytearray(len(tokens) * self.size)
            numbers[::self.size] = tokens  # the low byte of each
            self.file.write(numbers)
            self.count += len(tokens)
            return
        try:
            numbers = array.array(self.code, tokens)
        except OverflowError:
            wider = "use an output name that ends in .u32.bin" if not self.wide else "it takes 32 bits at most"
            raise Problem(f"{where}: the token {max(tokens)} does not fit; {wider}") from None
        if numbers.itemsize != self.size:
            raise Problem(f"this Python's array type {self.code} has {numbers.itemsize} bytes, {self.size} are needed")
        if sys.byteorder == "big":
            numbers.byteswap()
        numbers.tofile(self.file)
        self.count += len(numbers)

    def end_document(self):
        """A flat file does not say where documents end, but for --separator."""

    def publish(self, validation_fraction):
        held = int(self.count * validation_fraction)
        targets = [self.output]
        if validation_fraction > 0:
            if held < 2 or self.count - held < 2:
                raise Problem(f"{self.count} tokens are too few to hold {validation_fraction:g} of them back")
            targets.append(validation_name(self.output))
            self.move_tail(held)
        self.rename_asides(targets)
        parts = [(self.output, self.count - held)] + ([(targets[1], held)] if held else [])
        lines = [f"{target}: {count} tokens of {8 * self.size} bits" for target, count in parts]
        return lines + self.older_files(targets)

    def older_files(self, targets):
        """A note on held-back data that is not of this run: it may hold what is trained on now."""
        left = validation_name(self.output)
        return [f"note: {left} is of an earlier run"] if left not in targets and left.exists() else []

    def rename_asides(self, targets):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        with uninterrupted():  # all of them, or none
            for aside, target in zip(list(self.asides), targets):
                os.replace(aside, target)
                self.asides.remove(aside)

    def move_tail(self, held):
        start = (self.count - held) * self.size
        self.file.seek(start)
        with self.open_aside() as tail:
            while block := self.file.read(1 << 20):
                tail.write(block)
            tail.flush()
            os.fsync(tail.fileno())
        self.file.truncate(start)

    def discard(self):
        with uninterrupted():
            self.file.close()
            for aside in self.asides:
                aside.unlink(missing_ok=True)


class RowWriter(TokenWriter):
    """Packs documents into rows of `length` tokens and one to predict, and writes them as safetensors.

    A document goes into the first of the newest rows that has room. One that is longer than a row is cut; its parts
    share a token, so that each token but the first is predicted once. With `masked` there are labels too, -100 where a
    token is no target, and what holds no target is left out.
    """

    NEWEST = 256  # rows that are tried
    NO_TARGET = -100

    def __init__(self, output, length, masked, long):
        super().__init__(output)
        self.size = 4
        self.columns = length + 1
        self.masked, self.long = masked, long
        self.tokens, self.labels, self.documents = [], [], []  # a row each
        self.next_number = []  # of the next document of each row
        self.targets = []  # of each row
        self.start_document()

    def start_document(self):
        self.document = array.array("i")
        self.marks = bytearray()

    def write(self, tokens, marks, where):
        try:
            self.document.extend(tokens)
        except OverflowError:
            raise Problem(f"{where}: the token {max(tokens)} does not fit: it takes 31 bits at most") from None
        self.marks += marks if marks is not None else b"\1" * len(tokens)

    def end_document(self):
        tokens, marks = self.document, self.marks
        self.start_document()
        if len(tokens) > self.columns:
            self.counts[{"cut": "cut into parts", "truncate": "truncated", "drop": "longer than a row"}[self.long]] += 1
            if self.long == "drop":
                return
            if self.long == "truncate":
                tokens = tokens[:self.columns]
        if len(tokens) < 2:
            self.counts["shorter than two tokens"] += 1
            return
        if not any(marks[1:len(tokens)]):  # nothing comes before the first one, so nothing predicts it
            self.counts["without a target"] += 1
            return
        for first in range(0, len(tokens) - 1, self.columns - 1):  # a token alone predicts nothing
            end = first + self.columns
            if any(marks[first + 1:end]):
                self.place(tokens[first:end], marks[first:end])
            else:
                self.counts["parts without a target"] += 1

    def place(self, part, marks):
        row = self.row_with_room(len(part))
        self.tokens[row].extend(part)
        self.documents[row].extend(array.array("i", [self.next_number[row]]) * len(part))
        if self.masked:
            self.labels[row].extend(token if mark else self.NO_TARGET for token, mark in zip(part, marks))
        self.next_number[row] += 1
        self.targets[row] += sum(marks[1:len(part)])
        self.count += len(part)

    def row_with_room(self, length):
        for row in range(max(0, len(self.tokens) - self.NEWEST), len(self.tokens)):
            if len(self.tokens[row]) + length <= self.columns:
                return row
        for table in (self.tokens, self.labels, self.documents):
            table.append(array.array("i"))
        self.next_number.append(0)
        self.targets.append(0)
        return len(self.tokens) - 1

    def publish(self, validation_fraction):
        rows = len(self.tokens)
        held = int(rows * validation_fraction)
        if validation_fraction > 0 and held == 0:
            raise Problem(f"{rows} rows are too few to hold {validation_fraction:g} of them back")
        parts = [(self.output, range(rows - held))]
        if held:
            parts.append((validation_name(self.output), range(rows - held, rows)))
        self.write_rows(self.file, parts[0][1])
        for _, chosen in parts[1:]:
            with self.open_aside() as file:
                self.write_rows(file, chosen)
                file.flush()
                os.fsync(file.fileno())
        self.rename_asides([target for target, _ in parts])
        lines = [f"{target}: {sum(len(self.tokens[row]) for row in chosen)} tokens of {8 * self.size} bits, "
                 f"{sum(self.targets[chosen.start:chosen.stop])} of them targets, in {len(chosen)} rows of "
                 f"{self.columns - 1}" for target, chosen in parts]
        return lines + self.older_files([target for target, _ in parts])

    def write_rows(self, file, chosen):
        tables = {"tokens": (self.tokens, 0), "documents": (self.documents, -1)}
        if self.masked:
            tables["labels"] = (self.labels, self.NO_TARGET)
        size = len(chosen) * self.columns * self.size
        header = {name: {"dtype": "I32", "shape": [len(chosen), self.columns],
                         "data_offsets": [number * size, (number + 1) * size]} for number, name in enumerate(tables)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for table, padding in tables.values():
            for row in chosen:
                numbers = table[row] + array.array("i", [padding]) * (self.columns - len(table[row]))
                if sys.byteorder == "big":
                    numbers.byteswap()
                file.write(numbers.tobytes())


def validation_name(output):
    """tokens.bin -> tokens.validation.bin, tokens.u32.bin -> tokens.validation.u32.bin"""
    endings = (".u32.bin", ".bin", ".safetensors")
    ending = next(ending for ending in endings if output.name.endswith(ending))
    return output.with_name(output.name[:-len(ending)] + ".validation" + ending)
