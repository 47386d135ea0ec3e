# SPDX-License-Identifier: Apache-2.0
"""From documents to token numbers, and which of them are targets."""
import bisect
import json
import re

from spillway_data import Problem, load_package


class Bytes:
    """A token is a byte of the text in UTF-8."""

    def encode(self, document):
        """Token numbers, and a mark for each: 1 where it is part of a response (None: the document has none)."""
        text, spans = document.text, document.spans
        if isinstance(text, bytes):
            return text, None
        if spans is None:
            return text.encode("utf-8"), None
        tokens, marks, at = bytearray(), bytearray(), 0
        for start, end in spans:
            for part, mark in ((text[at:start], 0), (text[start:end], 1)):
                tokens += part.encode("utf-8")
                marks += bytes([mark]) * (len(tokens) - len(marks))
            at = end
        tokens += text[at:].encode("utf-8")
        return bytes(tokens), marks + bytes(len(tokens) - len(marks))

    def number_of(self, name):
        raise Problem(f"--separator {name}: without --tokenizer it is a number")

    def special_tokens(self):
        return []


class TokenizerFile:
    """A Hugging Face tokenizer.json. Neither its truncation, its padding nor its special tokens at both ends are used."""

    def __init__(self, path):
        tokenizers = load_package("tokenizers", "--tokenizer")
        if not path.is_file():
            raise Problem(f"{path}: no such tokenizer file")
        try:
            description = json.loads(path.read_bytes())
            # What comes after the model adds special tokens and moves offsets off white space: neither is wanted.
            for key in ("post_processor", "truncation", "padding"):
                description[key] = None
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
        except (ValueError, RecursionError, TypeError) as error:
            raise Problem(f"{path}: not a tokenizer.json: {error}") from None
        except Exception as error:  # the package raises a plain Exception
            raise Problem(f"{path}: not a tokenizer.json: {error}") from None

    def encode(self, document):
        text = document.text
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise Problem(f"{document.where}: not UTF-8 text at byte {error.start}") from None
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, None if document.spans is None else mark(encoded.offsets, document.spans)

    def number_of(self, name):
        number = self.tokenizer.token_to_id(name)
        if number is None:
            raise Problem(f"--separator {name}: the tokenizer has no such token")
        return number

    def special_tokens(self):
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special]


def mark(offsets, spans):
    """1 for each token that holds at least one character of a span: one that straddles a border is a target."""
    ends = [end for _, end in spans]
    marks = bytearray(len(offsets))
    for number, (start, end) in enumerate(offsets):
        nearest = bisect.bisect_right(ends, start)  # the first span that ends after the token's first character
        if nearest < len(spans) and spans[nearest][0] < max(end, start + 1):
            marks[number] = 1
    return marks


def make_encoder(tokenizer):
    """For a tokenizer.json, the folder it is in, or None."""
    if tokenizer is None:
        return Bytes()
    return TokenizerFile(tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer)


class Targets:
    """Tokens and marks of documents: which tokens are targets, that behind the document included."""

    def __init__(self, encoder, which, separator):
        self.encoder, self.which = encoder, which
        self.separator = None if separator is None else self.resolve(separator)
        special = sorted(encoder.special_tokens(), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special))) if special else None
        self.with_special = 0  # documents whose own text holds a special token

    def resolve(self, separator):
        number = int(separator) if re.fullmatch(r"-?[0-9]+", separator) else self.encoder.number_of(separator)
        if number < 0:
            raise Problem(f"--separator {separator}: must not be negative")
        return number

    def parts_of(self, document):
        """Yields token numbers with a mark for each (None: all are targets): the document, and its separator."""
        if self.which == "last-response" and document.spans:
            document.spans = document.spans[-1:]
        tokens, marks = self.encoder.encode(document)
        if self.special and any(self.special.search(text) for text in document.own_texts):
            self.with_special += 1
        masked = self.which != "all"
        yield tokens, marks if masked else None
        if self.separator is not None:
            yield [self.separator], bytes([ends_in_a_response(document)]) if masked else None


def ends_in_a_response(document):
    """Whether what follows the document is for a model to say: white space of a template does not count."""
    return 1 if document.spans and not document.text[document.spans[-1][1]:].strip() else 0
