#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn text, prompts with responses, or chats into a token file that Spillway trains on (docs/data.md).

Without --tokenizer a token is a byte: 0 to 255 (a vocabulary of 256, or of 257 with --separator 256). The output holds
little-endian token numbers: uint16, or uint32 where its name ends in .u32.bin. With --pack it is a .safetensors file of
rows that hold several documents each, none of which sees another, and with --targets the responses alone are trained on.

  prepare_data.py --output tokens.bin book.txt
  prepare_data.py --output code.bin --suffixes .h,.hpp --validation-fraction 0.01 include/
  prepare_data.py --output corpus.u32.bin --tokenizer model/ --separator '<|endoftext|>' corpus.jsonl
  prepare_data.py --output chats.safetensors --pack 2048 --tokenizer model/ --format chat --targets responses chats.jsonl

Needs nothing beyond Python, except the packages tokenizers for --tokenizer and jinja2 for chat templates:
scripts/setup.sh installs both into .venv, where this script finds them.
"""
import argparse
import collections
import os
import pathlib
import signal
import sys

from spillway_data import MissingPackage, Problem, chat, documents, tokens, writers

VENV = pathlib.Path(__file__).resolve().parents[1] / ".venv"


class Arguments(argparse.Namespace):
    def chat_template_path(self):
        path = pathlib.Path(self.chat_template)
        if not path.is_file():
            raise Problem(f"--chat-template {path}: no such file; expected {chat.CHATML}, tokenizer or a Jinja file")
        return path


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=pathlib.Path, metavar="INPUT",
                        help="text files, .jsonl files (an object a line), .json files (one list of objects), each of "
                        "them as .gz, .bz2 or .xz too, or folders")
    parser.add_argument("--output", required=True, type=pathlib.Path, metavar="FILE",
                        help="the token file: NAME.bin (uint16) or NAME.u32.bin (uint32), NAME.safetensors with --pack")
    parser.add_argument("--suffixes", nargs="+", default=None, metavar="SUFFIX",
                        help="take a folder's files that end in one of these (.h .hpp, or .h,.hpp), sorted by path")
    parser.add_argument("--format", choices=("text", "prompt-response", "chat"), default="text",
                        help="what a .jsonl line holds (default: %(default)s)")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="the key of the text (default: %(default)s)")
    parser.add_argument("--prompt-key", default="prompt", metavar="KEY[,KEY]",
                        help="the key of the prompt (default: %(default)s); further ones may be missing or empty, and "
                        "follow after a blank line: instruction,input")
    parser.add_argument("--response-key", default="response", metavar="KEY",
                        help="the key of the response (default: %(default)s)")
    parser.add_argument("--messages-key", default="messages", metavar="KEY",
                        help="the key of a chat's messages (default: %(default)s)")
    parser.add_argument("--chat-template", default=None, metavar="TEMPLATE",
                        help="chatml, tokenizer (the one that comes with it) or a Jinja file; default for chats: the "
                        "tokenizer's where it has one, else chatml; for prompts with responses: none")
    parser.add_argument("--targets", choices=("all", "responses", "last-response"), default="all",
                        help="what is trained on: every token, or what the assistant says (default: %(default)s)")
    parser.add_argument("--separator", default=None, metavar="TOKEN",
                        help="a token put after each document (a file, or a line of a .jsonl): its number or its name")
    parser.add_argument("--validation-fraction", type=float, default=0.0, metavar="X",
                        help="hold the last part of the tokens, 0 <= X < 1, back in NAME.validation.bin")
    parser.add_argument("--tokenizer", type=pathlib.Path, default=None, metavar="PATH",
                        help="a Hugging Face tokenizer.json, or the folder it is in; without it tokens are bytes")
    parser.add_argument("--pack", type=int, default=None, metavar="LENGTH",
                        help="put documents beside each other in rows of so many tokens and one to predict")
    parser.add_argument("--long", choices=("cut", "truncate", "drop"), default="cut",
                        help="with --pack, what becomes of a document that is longer than a row: cut into parts, only "
                        "its beginning is taken, or it is left out (default: %(default)s)")
    return parser


def parse_arguments(argv):
    parser = make_parser()
    arguments = parser.parse_args(argv, namespace=Arguments())
    if arguments.suffixes:
        arguments.suffixes = [suffix for word in arguments.suffixes for suffix in word.split(",") if suffix]
    arguments.prompt_key = [key for key in arguments.prompt_key.split(",") if key]
    if not arguments.prompt_key:
        parser.error("--prompt-key: expected at least one key")
    check_output(parser, arguments)
    if not 0 <= arguments.validation_fraction < 1:
        parser.error(f"--validation-fraction {arguments.validation_fraction}: must be at least 0 and below 1")
    if arguments.format == "text" and arguments.chat_template:
        parser.error("--chat-template: --format text has no messages; expected prompt-response or chat")
    return arguments


def check_output(parser, arguments):
    if arguments.targets != "all":
        if arguments.format == "text":
            parser.error(f"--targets {arguments.targets}: --format text has no responses; expected prompt-response or chat")
        if arguments.pack is None:
            parser.error(f"--targets {arguments.targets}: needs --pack LENGTH, as a .bin file cannot say what is a target")
    if arguments.pack is not None:
        if arguments.pack < 1:
            parser.error(f"--pack {arguments.pack}: a row has at least 1 token")
        if not arguments.output.name.endswith(".safetensors"):
            parser.error(f"--output {arguments.output}: with --pack the name must end in .safetensors")
    elif not arguments.output.name.endswith(".bin"):
        parser.error(f"--output {arguments.output}: the name must end in .bin or .u32.bin")
    elif arguments.long != "cut":
        parser.error(f"--long {arguments.long}: only the rows of --pack have an end")


def make_writer(arguments):
    if arguments.pack:
        return writers.RowWriter(arguments.output, arguments.pack, arguments.targets != "all", arguments.long)
    return writers.TokenWriter(arguments.output)


def prepare(arguments):
    files = documents.find_files(arguments.inputs, arguments.suffixes)
    encoder = tokens.make_encoder(arguments.tokenizer)
    targets = tokens.Targets(encoder, arguments.targets, arguments.separator)
    template = chat.make_chat(arguments)
    left_out = collections.Counter()
    reader = documents.Reader(arguments, template, left_out)
    writer = None
    try:
        with writers.uninterrupted():
            writer = make_writer(arguments)
        read = 0
        for path in files:
            for document in reader.documents_of(path):
                for numbers, marks in targets.parts_of(document):
                    writer.write(numbers, marks, document.where)
                writer.end_document()
                read += 1
        counts = left_out + writer.counts
        if writer.count == 0:
            raise Problem("the inputs hold no text" + "".join(f"; {n} documents {what}" for what, n in counts.items()))
        for line in writer.publish(arguments.validation_fraction):
            print(line)
    finally:
        if writer:
            writer.discard()
    print(f"from {read + sum(left_out.values())} documents in {len(files)} files")
    report(arguments, counts, encoder, template, targets)


def report(arguments, counts, encoder, template, targets):
    """What happened to documents that were not taken as they are, and what may not be meant."""
    for what in ("cut into parts", "truncated"):
        if counts[what]:
            print(f"{what}: {counts[what]}")
    for what in ("with an empty response", "longer than a row", "without a target", "shorter than two tokens",
                 "parts without a target"):
        if counts[what]:
            print(f"left out, {what}: {counts[what]}")
    if template:
        print(f"chat template: {template.name}")
        special = encoder.special_tokens()
        if template.end_of_turn and special and template.end_of_turn not in special:
            print(f"note: {template.end_of_turn} is no special token of this tokenizer: it is spelled out")
        if template.without_end:
            print(f"note: the template puts nothing behind {template.without_end} responses that tells the model to stop")
    elif arguments.format == "prompt-response" and arguments.separator is None:
        print("note: without --separator or --chat-template nothing tells the model where a response ends")
    if targets.with_special:
        print(f"note: {targets.with_special} documents hold special tokens of the tokenizer in their own text; they are "
              "encoded as these tokens")


def end_by_signal(number, _):
    sys.exit(128 + number)  # through what removes the files aside


def main(argv=None):
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, end_by_signal)
    try:
        prepare(parse_arguments(argv))
    except MissingPackage as error:
        python = VENV / "bin" / "python"
        if argv is None and python.exists() and pathlib.Path(sys.prefix).resolve() != VENV.resolve():
            os.execv(python, [str(python), *sys.argv])
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 1
    except (Problem, OSError) as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
