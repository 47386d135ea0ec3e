# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/prepare_data.py with tokenizers and chat templates: needs the packages that scripts/setup.sh installs."""
import json
import unittest

from prepare_support import PrepareCase, use_the_projects_python

if __name__ == "__main__":
    use_the_projects_python()
try:
    import jinja2  # noqa: F401
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors
    MISSING = None
except ImportError as error:
    MISSING = f"{error}: scripts/setup.sh installs it"
from spillway_data import template as template_module

NO = -100
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


class TokenizerCase(PrepareCase):
    """A byte-level tokenizer with a few merges, whose file has truncation, padding, trimmed offsets and a first token."""

    def setUp(self):
        super().setUp()
        if MISSING:
            self.skipTest(MISSING)
        self.model = self.folder / "model"
        self.model.mkdir()
        merges = [("=", "4"), ("l", "l"), ("e", "ll"), ("\u0120", "y"), ("\u010a", "\u010a")]
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
        self.tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=merges))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(SPECIAL)
        self.end = self.tokenizer.token_to_id("<|endoftext|>")
        self.tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=True),
             processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", self.end)])])
        self.tokenizer.enable_truncation(4)
        self.tokenizer.enable_padding(length=12)
        self.tokenizer.save(str(self.model / "tokenizer.json"))

    def spelled(self, numbers):
        return [self.tokenizer.id_to_token(number) for number in numbers]

    def targets(self, *arguments):
        """The tokens of the only document, and the text of each run of labels."""
        tensors, printed = self.packed(400, "--tokenizer", self.model, "--targets", "responses", *arguments)
        self.assertEqual(len(tensors["tokens"]), 1)
        used = [place for place, document in enumerate(tensors["documents"][0]) if document == 0]
        tokens, labels = ([tensors[name][0][place] for place in used] for name in ("tokens", "labels"))
        self.assertTrue(all(label in (NO, token) for token, label in zip(tokens, labels)))
        runs, run = [], []
        for label in [*labels, NO]:
            if label != NO:
                run.append(label)
            elif run:
                runs.append(self.tokenizer.decode(run, skip_special_tokens=False))
                run = []
        return tokens, runs, printed

    def put_template(self, source, **more):
        (self.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **more}))


class Tokenizer(TokenizerCase):
    def prompt(self, prompt, response, *more):
        lines = self.write_lines("in.jsonl", {"prompt": prompt, "response": response})
        return self.targets("--format", "prompt-response", *more, lines)

    def test_documents_are_neither_truncated_nor_padded_and_get_no_token_of_the_files_own(self):
        lines = self.write_lines("in.jsonl", {"text": "well, hello"})
        self.expect_success("--output", self.folder / "out.bin", "--tokenizer", self.model / "tokenizer.json", lines)
        self.assertEqual(self.spelled(self.tokens("out.bin")), ["w", "ell", ",", "\u0120", "h", "ell", "o"])

    def test_a_token_that_straddles_the_border_is_a_target(self):
        tokens, runs, _ = self.prompt("2+2=", "4!")
        self.assertEqual((self.spelled(tokens), runs), (["2", "+", "2", "=4", "!"], ["=4!"]))

    def test_white_space_at_the_border_belongs_to_the_side_that_has_it(self):
        for prompt, response, expected in (("Q", "  yes", "  yes"), ("Q ", " yes", " yes"), ("Q\n", "\nyes", "\n\nyes"),
                                           ("Q  ", "no", "no"), ("Q", "\u20ac\U0001f600 ", "\u20ac\U0001f600 ")):
            with self.subTest(prompt=prompt, response=response):
                self.assertEqual(self.prompt(prompt, response)[1], [expected])

    def test_the_separator_may_be_named_and_ends_the_response(self):
        tokens, runs, out = self.prompt("Q", "ok", "--separator", "<|endoftext|>")
        self.assertEqual((tokens[-1], runs), (self.end, ["ok<|endoftext|>"]))
        self.assertNotIn("note", out)
        lines = self.write_lines("in.jsonl", {"text": "t"})
        self.expect_refusal(["--separator <eos>", "no such token"], "--tokenizer", self.model, "--separator", "<eos>", lines)

    def test_special_tokens_in_the_datas_own_text_are_reported(self):
        self.assertIn("note: 1 documents hold special tokens", self.prompt("say <|im_end|>", "no")[2])
        self.assertNotIn("special tokens", self.prompt("say", "no")[2])

    def test_numbers_beyond_16_bits_need_the_wider_file(self):
        vocabulary = {chr(0x4E00 + number % 20000) + str(number): number for number in range(70000)}
        vocabulary["\u20ac"] = 70000
        wide = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="\u20ac"))
        wide.save(str(self.folder / "wide.json"))
        lines = self.write_lines("in.jsonl", {"text": "\u20ac"})
        self.expect_refusal(["line 1", "70000", ".u32.bin"], "--tokenizer", self.folder / "wide.json", lines)
        self.expect_success("--output", self.folder / "out.u32.bin", "--tokenizer", self.folder / "wide.json", lines)
        self.assertEqual(self.tokens("out.u32.bin", "I"), [70000])

    def test_files_that_are_no_tokenizers_are_named(self):
        lines = self.write_lines("in.jsonl", {"text": "t"})
        whole = (self.model / "tokenizer.json").read_bytes()
        for content in (whole[:len(whole) // 2], b"[]", b"{}", b"", b'{"model": {"type": "BPE"}}'):
            (self.model / "tokenizer.json").write_bytes(content)
            self.expect_refusal(["tokenizer.json", "not a tokenizer.json"], "--tokenizer", self.model, lines)
        self.expect_refusal(["no such tokenizer file"], "--tokenizer", self.folder, lines)
        (self.model / "tokenizer.json").write_bytes(whole)
        self.expect_refusal(["not UTF-8 text at byte 1"], "--tokenizer", self.model, self.write("t.txt", b"a\xff"))


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello "},
        {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Well"}]
SIMPLE = ("{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


class Templates(TokenizerCase):
    def chat(self, *more, messages=None, **line):
        lines = self.write_lines("in.jsonl", {"messages": messages or CHAT, **line})
        return self.targets("--format", "chat", *more, lines)

    def test_the_tokenizers_own_template_is_used_and_each_end_of_turn_is_a_target(self):
        self.put_template(SIMPLE, bos_token={"content": "<|endoftext|>"})
        tokens, runs, out = self.chat()
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        self.assertEqual(text, "<|endoftext|>" + "".join(
            f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in
            (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Well"))))
        self.assertEqual(tokens.count(self.end), 1)  # not the tokenizer's and the template's
        self.assertEqual(runs, ["Hello<|im_end|>", "Well<|im_end|>"])
        self.assertIn("tokenizer_config.json", out)

    def test_templates_stand_in_a_file_of_their_own_in_a_list_or_are_given(self):
        other = SIMPLE.replace("<|im_end|>", "<|endoftext|>")
        self.put_template([{"name": "tool_use", "template": "x"}, {"name": "default", "template": other}])
        self.assertEqual(self.chat()[1][-1], "Well<|endoftext|>")
        (self.model / "chat_template.jinja").write_text(SIMPLE)
        self.assertEqual(self.chat()[1][-1], "Well<|im_end|>")
        file = self.write("mine.jinja", other)
        self.assertEqual(self.chat("--chat-template", file)[1][-1], "Well<|endoftext|>")
        self.assertIn("chat template: chatml", self.chat("--chat-template", "chatml")[2])

    def test_without_a_template_chatml_is_used_and_marks_that_are_no_tokens_are_reported(self):
        self.assertEqual(self.chat()[1], [" Hello <|im_end|>", "Well<|im_end|>"])
        plain = tokenizers.Tokenizer(self.tokenizer.model)
        plain.pre_tokenizer = self.tokenizer.pre_tokenizer
        plain.add_special_tokens(["<s>"])
        plain.save(str(self.model / "tokenizer.json"))
        lines = self.write_lines("in.jsonl", {"messages": CHAT})
        out = self.packed(400, "--tokenizer", self.model, "--format", "chat", lines)[1]
        self.assertIn("note: <|im_end|> is no special token", out)

    def test_a_template_without_an_end_of_turn_has_its_white_space_as_the_end(self):
        self.put_template("{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA:{% else %} {{ m.content | trim }}\n"
                          "\n{% endif %}{% endfor %}")
        self.assertEqual(self.chat()[1], [" Hello\n\n", " Well\n\n"])

    def test_responses_that_the_template_marks_are_taken_as_marked(self):
        self.put_template("{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
                          "{{ m.content | trim }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}")
        self.assertEqual(self.chat()[1], ["Hello!", "Well!"])
        self.put_template("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}")
        self.refused(["inside each other"])

    def test_a_last_response_that_is_rendered_differently_is_found(self):
        self.put_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n"
                          "</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
                          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
        self.assertEqual(self.chat()[1], [" Hello <|im_end|>", "<think>\n</think>\nWell<|im_end|>"])

    def test_a_template_that_asks_in_other_words_than_it_answers_is_refused(self):
        self.put_template("{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
                          "{% if add_generation_prompt %}<assistant><think>{% endif %}")
        self.refused(["line 1, message 2", "words that ask for it", "{% generation %}"])
        self.assertEqual(len(self.packed(400, "--tokenizer", self.model, "--format", "chat",
                                         self.write_lines("in.jsonl", {"messages": CHAT}))[0]), 2)  # all are targets

    def test_responses_that_nothing_ends_are_reported(self):
        self.put_template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
                          "{% if add_generation_prompt %}<assistant>{% endif %}")
        _, runs, out = self.chat()
        self.assertEqual(runs, ["Hello", "Well"])
        self.assertIn("note: the template puts nothing behind 2 responses", out)

    def test_a_template_that_changes_what_was_said_is_refused_with_the_way_out(self):
        self.put_template("{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}{% else %}...{% endif %};{% endfor %}")
        self.refused(["line 1, message 2", "{% generation %}", "--chat-template FILE", "last-response"])
        self.put_template("{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}{{ m.content }}"
                          "{% else %}...{% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
        self.refused(["line 1, message 2", "once others follow"])
        self.assertEqual(self.chat("--targets", "last-response")[1], ["Well;"])

    def test_tools_and_further_keys_reach_the_template(self):
        self.put_template("{{ tools | tojson(ensure_ascii=False) }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if "
                          "m.tool_calls }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
        messages = [CHAT[0], {"role": "assistant", "content": "ok", "tool_calls": [{"name": "\u00e9"}]},
                    {"role": "tool", "content": "3"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "g"}]}]
        tokens, runs, _ = self.chat(messages=messages, tools=[{"name": "f"}])
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        self.assertTrue(text.startswith('[{"name": "f"}]<user>'), text)
        self.assertEqual(runs, ['ok[{"name": "\u00e9"}];', '[{"name": "g"}];'])

    def refused(self, words):
        lines = self.write_lines("in.jsonl", {"messages": CHAT})
        self.expect_refusal(words, "--pack", 400, "--tokenizer", self.model, "--format", "chat", "--targets", "responses",
                            lines, output="out.safetensors")

    def test_hostile_templates_end_in_a_refusal(self):
        template_module.SECONDS, seconds = 0.2, template_module.SECONDS
        self.addCleanup(setattr, template_module, "SECONDS", seconds)
        many = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
        for source, words in (
                ("{{ raise_exception('roles must alternate') }}", ("line 1", "roles must alternate")),
                ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ("SecurityError",)),
                ("{{ messages.append(1) }}", ("SecurityError",)),
                ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.os }}", ("SecurityError",)),
                ("{% include '/etc/passwd' %}", ("TypeError",)),
                (many, ("did not end within 0.2 s",)),
                ("{{ 9 ** 9 ** 9 }}", ("SecurityError", "**")),
                ("{{ 'x' * 10000000000 }}", ("SecurityError",)),
                ("{{ [1] * 10000000000 }}", ("SecurityError",)),
                ("{{ 'x'.ljust(20000000000) }}", ("more than 2048 MiB",)),
                ("{{ 'x' | center(20000000000) }}", ("more than 2048 MiB",)),
                ("{% for i in range(10000000) %}{% endfor %}", ("OverflowError",)),
                ("a\n{% for %}", ("line 2", "TemplateSyntaxError")),
                ("{{ strftime_now('%Y') }}", ("strftime_now",)),
                ("{{ 1 / 0 }}", ("ZeroDivisionError",))):
            with self.subTest(source=source[:60]):
                self.put_template(source)
                self.refused(("tokenizer_config.json", *words))

    def test_configurations_that_are_none_are_named(self):
        config = self.model / "tokenizer_config.json"
        for content, words in ((b'{"chat_templ', ("not JSON",)), (b"[]", ("expected an object",)),
                               (b'{"chat_template": 5}', ("not a string",)), (b'{"chat_template": []}', ("\"default\"",))):
            config.write_bytes(content)
            self.refused(("tokenizer_config.json", *words))
        config.unlink()
        lines = self.write_lines("in.jsonl", {"messages": CHAT})
        asked = ("--tokenizer", self.model, "--format", "chat", lines, "--chat-template")
        self.expect_refusal(["no chat_template beside"], *asked, "tokenizer")
        self.expect_refusal(["no such file"], *asked, "chatlm")
        self.expect_refusal(["not UTF-8"], *asked, self.write("t.jinja", b"\xff"))


if __name__ == "__main__":
    unittest.main()
