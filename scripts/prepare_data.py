#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn text into a token file that Spillway trains on (docs/formats.md).

Without --tokenizer a token is a byte: 0 to 255 (a vocabulary of 256, or of 257 with --separator 256). The output holds
little-endian token numbers: uint16, or uint32 where its name ends in .u32.bin. With --pack it is a .safetensors file of
rows that hold several documents each, none of which sees another.

  prepare_data.py --output tokens.bin book.txt
  prepare_data.py --output code.bin --suffixes .h,.hpp --validation-fraction 0.01 include/
  prepare_data.py --output corpus.u32.bin --tokenizer tokenizer.json --separator 151643 corpus.jsonl
  prepare_data.py --output chats.safetensors --pack 2048 --tokenizer tokenizer.json chats.jsonl

Needs nothing beyond Python, except `tokenizers` for --tokenizer.
"""
import argparse
import array
import json
import os
import pathlib
import sys
import tempfile


class Problem(Exception):
    """Something the user can put right."""


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=pathlib.Path, metavar="INPUT",
                        help="text files, .jsonl files (one object with a text a line), or folders")
    parser.add_argument("--output", required=True, type=pathlib.Path, metavar="FILE",
                        help="the token file: NAME.bin (uint16) or NAME.u32.bin (uint32), NAME.safetensors with --pack")
    parser.add_argument("--suffixes", nargs="+", default=None, metavar="SUFFIX",
                        help="take a folder's files that end in one of these (.h .hpp, or .h,.hpp), sorted by path")
    parser.add_argument("--text-key", default="text", metavar="KEY",
                        help="the key of a .jsonl line that holds the document (default: %(default)s)")
    parser.add_argument("--separator", type=int, default=None, metavar="TOKEN",
                        help="a token number put after each document (a file, or a line of a .jsonl)")
    parser.add_argument("--validation-fraction", type=float, default=0.0, metavar="X",
                        help="hold the last part of the tokens, 0 <= X < 1, back in NAME.validation.bin")
    parser.add_argument("--tokenizer", type=pathlib.Path, default=None, metavar="FILE",
                        help="a Hugging Face tokenizer.json; without it tokens are bytes")
    parser.add_argument("--pack", type=int, default=None, metavar="LENGTH",
                        help="put documents beside each other in rows of so many tokens and one to predict")
    arguments = parser.parse_args(argv)
    if arguments.suffixes:
        arguments.suffixes = [suffix for word in arguments.suffixes for suffix in word.split(",") if suffix]
    if arguments.pack is not None:
        if arguments.pack < 1:
            parser.error(f"--pack {arguments.pack}: a row has at least 1 token")
        if not arguments.output.name.endswith(".safetensors"):
            parser.error(f"--output {arguments.output}: with --pack the name must end in .safetensors")
    elif not arguments.output.name.endswith(".bin"):
        parser.error(f"--output {arguments.output}: the name must end in .bin or .u32.bin")
    if not 0 <= arguments.validation_fraction < 1:
        parser.error(f"--validation-fraction {arguments.validation_fraction}: must be at least 0 and below 1")
    if arguments.separator is not None and arguments.separator < 0:
        parser.error(f"--separator {arguments.separator}: must not be negative")
    return arguments


def find_files(inputs, suffixes):
    """The input files: those named, and those of each folder in the order of their paths."""
    files = []
    for path in inputs:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            if not suffixes:
                raise Problem(f"{path} is a folder: --suffixes says which of its files to take, for example .txt")
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(tuple(suffixes)))
            if not found:
                raise Problem(f"{path}: no file ends in {' or '.join(suffixes)}")
            files += found
        else:
            raise Problem(f"{path}: no such file or folder")
    return files


def documents_of(path, text_key):
    """Yields the documents of one file as bytes."""
    if path.suffix != ".jsonl":
        yield path.read_bytes()
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
                text = document[text_key]
            except ValueError as error:
                raise Problem(f"{path}, line {number}: not JSON: {error}") from None
            except (KeyError, TypeError):
                raise Problem(f"{path}, line {number}: expected an object with the key \"{text_key}\"") from None
            if not isinstance(text, str):
                raise Problem(f"{path}, line {number}: \"{text_key}\" is not a string")
            try:
                yield text.encode("utf-8")
            except UnicodeEncodeError:
                raise Problem(f"{path}, line {number}: \"{text_key}\" holds half of a surrogate pair") from None


def make_encoder(tokenizer):
    """Returns a function from a document's bytes and its file to token numbers."""
    if tokenizer is None:
        return lambda document, path: document
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Problem("--tokenizer needs the tokenizers package: pip install tokenizers") from None
    if not tokenizer.is_file():
        raise Problem(f"{tokenizer}: no such tokenizer file")
    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises a plain Exception
        raise Problem(f"{tokenizer}: not a tokenizer.json: {error}") from None

    def encode(document, path):
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Problem(f"{path}: not UTF-8 text at byte {error.start}") from None
        return loaded.encode(text, add_special_tokens=False).ids

    return encode


class TokenWriter:
    """Writes token numbers to a file aside; `publish` cuts it into the output files and gives them their names."""

    def __init__(self, output):
        self.output = output
        self.wide = output.name.endswith(".u32.bin")
        self.code = "I" if self.wide else "H"
        self.size = 4 if self.wide else 2
        self.count = 0
        if not output.parent.is_dir():
            raise Problem(f"{output.parent}: no such folder for the output")
        self.asides = []
        self.file = self.open_aside()

    def open_aside(self):
        handle, name = tempfile.mkstemp(prefix=f".{self.output.name}.", suffix=".part", dir=self.output.parent)
        self.asides.append(pathlib.Path(name))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's files are for their owner alone
        return os.fdopen(handle, "w+b")

    def write(self, tokens, path):
        """Appends token numbers: a list, or bytes whose values they are."""
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
            raise Problem(f"{path}: the token {max(tokens)} does not fit; {wider}") from None
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
        return [(self.output, self.count - held)] + ([(targets[1], held)] if held else [])

    def rename_asides(self, targets):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
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
        self.file.close()
        for aside in self.asides:
            aside.unlink(missing_ok=True)


class RowWriter(TokenWriter):
    """Packs documents into rows of `length` tokens and one to predict, and writes them as safetensors.

    A document goes into the first of the newest rows that has room. One that is longer than a row is cut; its parts
    share a token, so that each token but the first is predicted once.
    """

    NEWEST = 256  # rows that are tried

    def __init__(self, output, length):
        super().__init__(output)
        self.size = 4
        self.columns = length + 1
        self.tokens, self.documents = [], []  # a row each
        self.next_number = []  # of the next document of each row
        self.document = array.array("i")

    def write(self, tokens, path):
        try:
            self.document.extend(tokens)
        except OverflowError:
            raise Problem(f"{path}: the token {max(tokens)} does not fit: it takes 31 bits at most") from None

    def end_document(self):
        for first in range(0, len(self.document) - 1, self.columns - 1):  # a token alone predicts nothing
            self.place(self.document[first:first + self.columns])
        self.document = array.array("i")

    def place(self, part):
        for row in range(max(0, len(self.tokens) - self.NEWEST), len(self.tokens)):
            if len(self.tokens[row]) + len(part) <= self.columns:
                break
        else:
            row = len(self.tokens)
            self.tokens.append(array.array("i"))
            self.documents.append(array.array("i"))
            self.next_number.append(0)
        self.tokens[row].extend(part)
        self.documents[row].extend(array.array("i", [self.next_number[row]]) * len(part))
        self.next_number[row] += 1
        self.count += len(part)

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
        return [(target, sum(len(self.tokens[row]) for row in chosen)) for target, chosen in parts]

    def write_rows(self, file, chosen):
        size = len(chosen) * self.columns * self.size
        header = {name: {"dtype": "I32", "shape": [len(chosen), self.columns], "data_offsets": [start, start + size]}
                  for name, start in (("tokens", 0), ("documents", size))}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for table, padding in ((self.tokens, 0), (self.documents, -1)):
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


def prepare(arguments):
    files = find_files(arguments.inputs, arguments.suffixes)
    encode = make_encoder(arguments.tokenizer)
    writer = RowWriter(arguments.output, arguments.pack) if arguments.pack else TokenWriter(arguments.output)
    try:
        documents = 0
        for path in files:
            for document in documents_of(path, arguments.text_key):
                writer.write(encode(document, path), path)
                if arguments.separator is not None:
                    writer.write([arguments.separator], path)
                writer.end_document()
                documents += 1
        if writer.count == 0:
            raise Problem("the inputs hold no text")
        for target, count in writer.publish(arguments.validation_fraction):
            print(f"{target}: {count} tokens of {8 * writer.size} bits")
        print(f"from {documents} documents in {len(files)} files")
    finally:
        writer.discard()


def main(argv=None):
    try:
        prepare(parse_arguments(argv))
    except (Problem, OSError) as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
