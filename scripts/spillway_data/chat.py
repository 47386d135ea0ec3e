# SPDX-License-Identifier: Apache-2.0
"""From messages to a text, and which of its characters a model is to say: the responses with the mark that ends them."""
import json

from spillway_data import Problem
from spillway_data.template import SourceTemplate

CHATML = "chatml"


class ChatML:
    """<|im_start|>ROLE, a new line, the content, <|im_end|>, a new line: for each message."""
    name = CHATML
    end_of_turn = "<|im_end|>"
    without_end = 0

    def render(self, messages, tools, where):
        if tools:
            raise Problem(f"{where}: \"tools\" needs a template that knows them: --chat-template FILE")
        text, spans = "", []
        for number, message in enumerate(messages, 1):
            others = [key for key, value in message.items()
                      if key not in ("role", "content") and value not in (None, "", [], {})]
            if others:
                raise Problem(f"{where}, message {number}: \"{others[0]}\" needs a template that knows it: "
                              "--chat-template FILE")
            text += f"<|im_start|>{message['role']}\n"
            start = len(text)
            text += message["content"] + self.end_of_turn
            if message["role"] == "assistant":
                spans.append((start, len(text)))
            text += "\n"
        return text, spans


class Chat:
    """A Hugging Face chat template.

    Which characters are responses is said by the template itself, in {% generation %} blocks, or found by rendering the
    chat up to each response, with the words that ask for one, and with it. Where all is trained on, nothing is looked for.
    """
    end_of_turn = None

    def __init__(self, name, source, special, targets):
        self.name, self.special, self.targets = name, special, targets
        self.template = SourceTemplate(name, source)
        self.without_end = 0  # responses that nothing follows

    def render(self, messages, tools, where):
        def render(count, ask=False):
            return self.template.render(where, messages=messages[:count], tools=tools or None, add_generation_prompt=ask,
                                        **self.special)

        text, spans = render(len(messages))
        if self.targets == "all" or self.template.marks_responses:
            return text, spans
        responses = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.targets == "last-response":
            responses = responses[-1:]
        return text, self.find(responses, messages, text, lambda *more: render(*more)[0], where)

    def find(self, responses, messages, text, text_of, where):
        starts = []
        for number in responses:
            before = text_of(number, True)
            if not text.startswith(before):
                raise self.not_found(number, "does not follow the words that ask for it", where)
            starts.append(len(before))
        spans = []
        for number, start, limit in zip(responses, starts, [*starts[1:], len(text)]):
            alone = text if number + 1 == len(messages) else text_of(number + 1)
            content = messages[number]["content"].strip()
            end = end_of(content, text, alone, start)
            if end is None or not start < end <= limit:
                raise self.not_found(number, "is rendered differently once others follow", where)
            self.without_end += 1 if content and text[start:end].endswith(content) else 0
            spans.append((start, without_space_after_the_end(text, start, end, content)))
        return spans

    def not_found(self, number, what, where):
        other = "" if self.targets == "last-response" else ", or train on --targets last-response"
        return Problem(
            f"{where}, message {number + 1}: in the chat template {self.name} this message {what}, so which part of the "
            "text it is cannot be told. Mark the responses in a copy of the template, {% generation %} before and "
            f"{{% endgeneration %}} behind what the model is to say, and give it as --chat-template FILE{other}")


def end_of(content, text, alone, start):
    """Where a response ends in the text, from the text that ends with it; None where that cannot be told."""
    if text.startswith(alone):
        return len(alone)
    # The last response is rendered differently from the others: what follows its content is what ends a turn.
    at = alone.rfind(content)
    found = text.find(alone[at:], start) if at >= 0 else -1
    return None if found < 0 else found + len(alone) - at


def without_space_after_the_end(text, start, end, content):
    """Leaves out white space behind a mark that ends the turn; where nothing marks the end, the white space does."""
    trimmed = text[start:end].rstrip()
    return end if content and trimmed.endswith(content) else start + len(trimmed)


def read_json(path):
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem(f"{path}: expected an object")
    return value


def template_of(folder, config):
    """The template that comes with a tokenizer, and where it stands; None where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file), str(file)
    found, name = config.get("chat_template"), str(folder / "tokenizer_config.json")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found, name = named.get("default"), f"{name}, the template \"default\""
        if found is None:
            raise Problem(f"{folder / 'tokenizer_config.json'}: none of its chat templates is called \"default\"; "
                          "--chat-template FILE names another")
    if found is not None and not isinstance(found, str):
        raise Problem(f"{name}: \"chat_template\" is not a string")
    return None if found is None else (found, name)


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Problem(f"{path}: not UTF-8 text at byte {error.start}") from None


def special_tokens_of(config):
    """bos_token and the like, as templates name them."""
    special = {}
    for key, value in config.items():
        if key.endswith("_token") and isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            special[key] = value
    return special


def make_chat(arguments):
    """The template of --chat-template, or the tokenizer's own, or ChatML; None where none is asked for or needed."""
    wanted = arguments.chat_template
    if arguments.format == "text" or (arguments.format == "prompt-response" and wanted is None):
        return None
    if wanted == CHATML:
        return ChatML()
    tokenizer = arguments.tokenizer
    folder = tokenizer if tokenizer is None or tokenizer.is_dir() else tokenizer.parent
    has_config = folder is not None and (folder / "tokenizer_config.json").is_file()
    config = read_json(folder / "tokenizer_config.json") if has_config else {}
    if wanted is None or wanted == "tokenizer":
        found = template_of(folder, config) if folder is not None else None
        if found is None and wanted is not None:
            raise Problem("--chat-template tokenizer: no chat_template beside the tokenizer.json")
        return ChatML() if found is None else Chat(found[1], found[0], special_tokens_of(config),
                                                   arguments.targets)
    file = arguments.chat_template_path()
    return Chat(str(file), read_text(file), special_tokens_of(config), arguments.targets)
