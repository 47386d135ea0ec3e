# SPDX-License-Identifier: Apache-2.0
"""Reads the inputs: text files and JSON lines of texts, of prompts with responses, and of chats."""
import bz2
import dataclasses
import gzip
import json
import lzma
import zlib

from spillway_data import Problem

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {"human": "user", "gpt": "assistant"}  # of files whose messages say "from" and "value"


COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # read as what their name says without it
LINES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How files begin that are neither text nor JSON lines. Their bytes would be learned without a word.
FOREIGN = ((b"PAR1", "a Parquet file"), (b"ARROW1", "an Arrow file"), (b"PK\3\4", "a zip archive"), (b"%PDF", "a PDF"),
           (b"\x28\xb5\x2f\xfd", "compressed by zstd"), (b"\x1f\x8b", "compressed by gzip"), (b"BZh91AY", "compressed by bzip2"),
           (b"\xfd7zXZ", "compressed by xz"), (b"\xff\xfe", "UTF-16 text"), (b"\xfe\xff", "UTF-16 text"))
TAR_MARK, TAR_MARK_AT = b"ustar", 257


@dataclasses.dataclass
class Document:
    """A text, the characters of it that are responses (None: the text has no such parts), and where it came from."""
    text: object  # str, or bytes of a file as it is
    spans: object
    where: str
    own_texts: tuple = ()  # what the data says itself, without what a template puts around it


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


def no_key_twice(pairs):
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key \"{next(key for key in keys if keys.count(key) > 1)}\" stands twice")
    return entries


def open_input(path):
    """An input's bytes, unpacked where its name says that they are packed, and the ending of its name without that."""
    endings = [ending.lower() for ending in path.suffixes]
    unpack = COMPRESSED.get(endings[-1]) if endings else None
    if unpack:
        endings.pop()
    file = (unpack or open)(path, "rb")
    try:
        beginning = file.read(TAR_MARK_AT + len(TAR_MARK))
        kind = next((kind for magic, kind in FOREIGN if beginning.startswith(magic)), None)
        if beginning[TAR_MARK_AT:] == TAR_MARK:
            kind = "a tar archive"
        if kind:
            raise Problem(f"{path} is {kind}; expected UTF-8 text or JSON lines, as they are or as .gz, .bz2 or .xz")
        file.seek(len(BYTE_ORDER_MARK) if beginning.startswith(BYTE_ORDER_MARK) else 0)
    except BaseException:
        file.close()
        raise
    return file, endings[-1] if endings else ""


def parsed(text, where):
    try:
        return json.loads(text, object_pairs_hook=no_key_twice)
    except ValueError as error:
        raise Problem(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise Problem(f"{where}: not JSON that can be read: it is nested too deep") from None


def entries_of(file, path, lines):
    """Yields each object of JSON lines, or of one JSON list, and where it stands."""
    if lines:
        entries = ((parsed(line, f"{path}, line {number}"), f"{path}, line {number}")
                   for number, line in enumerate(file, 1) if line.strip())
    else:
        whole = parsed(file.read(), path)
        if not isinstance(whole, list):
            raise Problem(f"{path}: expected a list of objects, found {kind_of(whole)}; an object a line is a .jsonl file")
        entries = ((entry, f"{path}, entry {number}") for number, entry in enumerate(whole, 1))
    for entry, where in entries:
        if not isinstance(entry, dict):
            raise Problem(f"{where}: expected an object, found {kind_of(entry)}")
        yield entry, where


def kind_of(value):
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def text_at(entry, key, where, optional=False):
    """The string under a key; empty where it may be missing and is."""
    value = entry.get(key)
    if value is None and optional:
        return ""
    if key not in entry:
        hints = {"messages": "--format chat", "conversations": "--format chat --messages-key conversations",
                 "prompt": "--format prompt-response",
                 "instruction": "--format prompt-response --prompt-key instruction,input --response-key output"}
        hint = next((f": is this {words}?" for name, words in hints.items() if name in entry and name != key), "")
        raise Problem(f"{where}: expected an object with the key \"{key}\"{hint}")
    if not isinstance(value, str):
        raise Problem(f"{where}: \"{key}\" is not a string but {kind_of(value)}")
    return checked_text(value, key, where)


def checked_text(text, key, where):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Problem(f"{where}: \"{key}\" holds half of a surrogate pair") from None
    return text


def messages_at(entry, key, where):
    """The list of messages under a key, each with "role" and "content" of the kinds that all templates know."""
    messages = entry.get(key)
    if key not in entry:
        text_at(entry, key, where)  # says what is there instead
    if not isinstance(messages, list) or not messages:
        raise Problem(f"{where}: \"{key}\" is not a list of messages but {kind_of(messages)}"
                      f"{' of none' if messages == [] else ''}")
    return [message_of(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)]


def objects_at(entry, key, where):
    """A list of objects, or None: templates go through it, and a string would go in letter by letter."""
    value = entry.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        hint = "; it holds JSON: decode it first" if isinstance(value, str) else ""
        raise Problem(f"{where}: \"{key}\" is not a list of objects but {kind_of(value)}{hint}")
    return value


def message_of(message, where):
    if not isinstance(message, dict):
        raise Problem(f"{where}: expected an object with \"role\" and \"content\", found {kind_of(message)}")
    names = ("from", "value") if "role" not in message and "from" in message else ("role", "content")
    role = text_at(message, names[0], where)
    if names[0] == "from":
        role = ROLE_NAMES.get(role, role)
    if role not in ROLES:
        raise Problem(f"{where}: the role \"{role}\" is not known; expected {', '.join(ROLES)}")
    calls = bool(objects_at(message, "tool_calls", where))  # those may come without a content
    content = text_at(message, names[1], where, optional=calls)
    others = {key: value for key, value in message.items() if key not in names}
    if others.pop("weight", None) not in (None, 1):
        raise Problem(f"{where}: a \"weight\" other than 1 is not known here: messages of a role are treated alike")
    return {"role": role, "content": content, **others}


class Reader:
    """Yields the documents of files in the format that was asked for, and counts those that it leaves out."""

    def __init__(self, arguments, chat, counts):
        self.arguments, self.chat, self.counts = arguments, chat, counts

    def documents_of(self, path):
        try:
            file, ending = open_input(path)
            with file:
                yield from self.documents_in(file, path, ending)
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # those of the system name the file themselves
                raise
            raise Problem(f"{path}: it cannot be unpacked: {error}") from None

    def documents_in(self, file, path, ending):
        form = self.arguments.format
        # A .json file may be text to learn, or a list of documents: --suffixes and --format say which.
        wanted = any(path.name.endswith(suffix) for suffix in self.arguments.suffixes or ())
        listed = ending == ".json" and (form != "text" or not wanted)
        if ending not in LINES and not listed:
            if form != "text":
                raise Problem(f"{path}: --format {form} reads .jsonl files, and .json files that hold one list")
            yield Document(file.read(), None, str(path))
            return
        make = {"text": self.text, "prompt-response": self.prompt_response, "chat": self.messages}
        for entry, where in entries_of(file, path, ending in LINES):
            document = make[form](entry, where)
            if document is None:
                self.counts["with an empty response"] += 1
            else:
                yield document

    def text(self, entry, where):
        return Document(text_at(entry, self.arguments.text_key, where), None, where)

    def prompt_response(self, entry, where):
        keys = self.arguments.prompt_key
        parts = [text_at(entry, key, where, optional=number > 0) for number, key in enumerate(keys)]
        prompt = "\n\n".join(part for part in parts if part)
        response = text_at(entry, self.arguments.response_key, where)
        if self.chat:
            return self.rendered([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}],
                                 entry, where)
        if not response.strip():
            return None
        return Document(prompt + response, [(len(prompt), len(prompt) + len(response))], where, (prompt, response))

    def messages(self, entry, where):
        return self.rendered(messages_at(entry, self.arguments.messages_key, where), entry, where)

    def rendered(self, messages, entry, where):
        if any(message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls")
               for message in messages):
            return None
        text, spans = self.chat.render(messages, objects_at(entry, "tools", where), where)
        return Document(checked_text(text, "the template's text", where), spans, where,
                        tuple(message["content"] for message in messages))
