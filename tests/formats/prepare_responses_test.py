# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/prepare_data.py on prompts with responses and on chats, byte by byte: needs no package."""
import json
import unittest

from prepare_support import PrepareCase

NO = -100


def said(text, *responses):
    """The labels of a text of which the responses alone are targets, in the order in which they stand."""
    labels, at = [NO] * len(text.encode()), 0
    for response in responses:
        at = text.index(response, at)
        for place in range(len(text[:at].encode()), len(text[:at + len(response)].encode())):
            labels[place] = text.encode()[place]
        at += len(response)
    return labels


class RowCase(PrepareCase):
    def one_row(self, text, labels, *arguments):
        """Expects that one row comes out, with this text and these labels."""
        length = len(text.encode()) + 3
        tensors, printed = self.packed(length, *arguments)
        self.assertEqual(sorted(tensors), ["documents", "labels", "tokens"])
        padding = [length + 1 - len(text.encode())]
        self.assertEqual(tensors["tokens"], [[*text.encode()] + [0] * padding[0]])
        self.assertEqual(tensors["labels"], [labels + [NO] * padding[0]])
        self.assertEqual(tensors["documents"], [[0] * len(labels) + [-1] * padding[0]])
        return printed

    def responses(self, *more):
        return ("--format", "prompt-response", "--targets", "responses", *more)


class Responses(RowCase):
    def test_a_response_is_a_target_and_its_prompt_is_not(self):
        lines = self.write_lines("in.jsonl", {"prompt": "2+2=", "response": "four"})
        out = self.one_row("2+2=four", said("2+2=four", "four"), *self.responses(), lines)
        self.assertIn("8 tokens of 32 bits, 4 of them targets, in 1 rows of 11", out)
        self.assertIn("note: without --separator", out)

    def test_the_first_byte_of_a_response_is_a_target_whatever_its_width(self):
        lines = self.write_lines("in.jsonl", {"prompt": "\u00e9?", "response": "\u20ac\U0001f600!"})
        text = "\u00e9?\u20ac\U0001f600!"
        self.one_row(text, said(text, "\u20ac\U0001f600!"), *self.responses(), lines)

    def test_the_separator_behind_a_response_is_a_target(self):
        lines = self.write_lines("in.jsonl", {"prompt": "Q", "response": "A\n"})
        tensors, out = self.packed(5, *self.responses("--separator", 7), lines)
        self.assertEqual(tensors["tokens"], [[81, 65, 10, 7, 0, 0]])
        self.assertEqual(tensors["labels"], [[NO, 65, 10, 7, NO, NO]])
        self.assertNotIn("note", out)

    def test_keys_are_chosen_and_further_parts_of_a_prompt_may_be_missing(self):
        entries = ({"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Say.", "input": "", "output": "x"},
                   {"instruction": "Say.", "output": "y"})
        keys = ("--prompt-key", "instruction,input", "--response-key", "output")
        for entry, text in zip(entries, ("Add.\n\n1 23", "Say.x", "Say.y")):
            lines = self.write_lines("in.jsonl", entry)
            self.one_row(text, [NO] * (len(text) - 1) + [ord(text[-1])], *self.responses(*keys), lines)

    def test_all_tokens_are_targets_unless_asked_otherwise(self):
        lines = self.write_lines("in.jsonl", {"prompt": "ab", "response": "cd"})
        tensors, out = self.packed(5, "--format", "prompt-response", lines)
        self.assertEqual(sorted(tensors), ["documents", "tokens"])
        self.assertIn("4 tokens of 32 bits, 3 of them targets", out)
        self.expect_success("--output", self.folder / "out.bin", "--format", "prompt-response", lines)
        self.assertEqual(bytes(self.tokens("out.bin")), b"abcd")

    def test_labels_stay_with_their_tokens_through_packing_cutting_and_validation(self):
        entries = [{"prompt": "p" * (1 + number % 3), "response": "RSTUVWX"[:1 + number % 7]} for number in range(40)]
        entries[5] = {"prompt": "p", "response": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
        lines = self.write_lines("in.jsonl", *entries)
        self.packed(9, *self.responses("--validation-fraction", 0.3), lines)
        predicted = ""
        for name in ("out.safetensors", "out.validation.safetensors"):
            tensors = self.rows(name)
            for tokens, labels, documents in zip(tensors["tokens"], tensors["labels"], tensors["documents"]):
                self.assertEqual(labels, [token if chr(token).isupper() else NO for token in tokens])
                predicted += "".join(chr(label) for label, own, before in zip(labels[1:], documents[1:], documents)
                                     if label != NO and own == before)
        self.assertEqual(sorted(predicted), sorted("".join(entry["response"] for entry in entries)))

    def test_what_is_left_out_is_counted(self):
        lines = self.write_lines("in.jsonl", {"prompt": "p", "response": " \n"}, {"prompt": "q", "response": "a"},
                                 {"prompt": "long prompts", "response": "b"})
        tensors, out = self.packed(3, *self.responses("--long", "truncate"), lines)
        self.assertEqual(tensors["tokens"], [[113, 97, 0, 0]])
        for words in ("from 3 documents in 1 files", "truncated: 1", "left out, with an empty response: 1",
                      "left out, without a target: 1"):
            self.assertIn(words + "\n", out)
        tensors, out = self.packed(3, *self.responses(), lines)
        self.assertEqual([bytes(row) for row in tensors["tokens"]], [b"qa\0\0", b"ptsb"])
        self.assertIn("cut into parts: 1\n", out)
        self.assertIn("left out, parts without a target: 3\n", out)

    def test_a_response_that_nothing_precedes_has_no_target_at_its_first_token(self):
        lines = self.write_lines("in.jsonl", {"prompt": "", "response": "a"}, {"prompt": "", "response": "bc"})
        tensors, out = self.packed(3, *self.responses(), lines)
        self.assertEqual(tensors["labels"], [[98, 99, NO, NO]])
        self.assertIn("2 tokens of 32 bits, 1 of them targets", out)
        self.assertIn("left out, shorter than two tokens: 1", out)

    def test_refusals_name_the_line_and_leave_everything_as_it_was(self):
        asked = ("--pack", 4, *self.responses())
        good = {"prompt": "p", "response": "r"}
        self.packed(4, *self.responses(), self.write_lines("good.jsonl", good))
        for content, words in (
                (b'{"prompt": "p", "respon', ("line 2", "not JSON")),  # cut short
                (b'{"prompt": "p", "response": "\xff"}', ("line 2", "not JSON")),
                (b'{"prompt": "p", "prompt": "q", "response": "r"}', ("line 2", "\"prompt\" stands twice")),
                (b'[' * 100000, ("line 2", "not JSON")),
                (b'[1]', ("line 2", "expected an object, found a list")),
                (b'{"prompt": "p"}', ("line 2", "\"response\"")),
                (b'{"prompt": 5, "response": "r"}', ("line 2", "\"prompt\" is not a string but a number")),
                (b'{"prompt": "p", "response": null}', ("line 2", "\"response\" is not a string but null")),
                (b'{"prompt": "p", "response": "\\ud800"}', ("line 2", "surrogate")),
                (b'{"messages": []}', ("line 2", "--format chat")),
                (b'{"instruction": ""}', ("line 2", "--prompt-key instruction,input"))):
            lines = self.write("bad.jsonl", json.dumps(good).encode() + b"\n" + content)
            self.expect_refusal(words, *asked, lines, output="out.safetensors")
        self.expect_refusal(["no text", "1 documents with an empty response"], *asked,
                            self.write_lines("bad.jsonl", {"prompt": "p", "response": ""}), output="out.safetensors")

    def test_targets_need_responses_and_rows_that_can_say_so(self):
        lines = self.write_lines("in.jsonl", {"text": "t"})
        self.expect_refusal(["no responses"], "--targets", "responses", lines)
        self.expect_refusal(["--pack LENGTH"], *self.responses(), lines)
        self.expect_refusal(["reads .jsonl"], "--format", "chat", self.write("t.txt", b"text"))
        self.expect_refusal(["no messages"], "--chat-template", "chatml", lines)
        self.expect_refusal(["is a number"], "--separator", "<eos>", lines)
        self.expect_refusal(["at least one key"], "--prompt-key", ",", lines)


class Chats(RowCase):
    CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye\n"},
            {"role": "assistant", "content": "Bye"}]
    TEXT = ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
            "<|im_start|>user\nBye\n<|im_end|>\n<|im_start|>assistant\nBye<|im_end|>\n")

    def chat(self, *more):
        return ("--format", "chat", "--targets", "responses", *more)

    def test_each_response_with_its_end_of_turn_is_a_target_and_nothing_else(self):
        lines = self.write_lines("in.jsonl", {"messages": self.CHAT})
        labels = said(self.TEXT, "Hello<|im_end|>", "Bye\n<|im_end|>", "Bye<|im_end|>")
        at = self.TEXT.index("Bye\n")
        labels[at:at + 14] = [NO] * 14  # the user's
        out = self.one_row(self.TEXT, labels, *self.chat(), lines)
        self.assertIn("chat template: chatml", out)
        only_last = [NO] * len(self.TEXT)
        only_last[-14:-1] = b"Bye<|im_end|>\n"[:-1]
        self.one_row(self.TEXT, only_last, "--format", "chat", "--targets", "last-response", lines)

    def test_conversations_that_say_from_and_value_are_the_same(self):
        names = {"user": "human", "assistant": "gpt"}
        chat = [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in self.CHAT]
        one, _ = self.packed(250, *self.chat(), self.write_lines("a.jsonl", {"messages": self.CHAT}))
        two, _ = self.packed(250, *self.chat("--messages-key", "conversations"),
                             self.write_lines("b.jsonl", {"conversations": chat}))
        self.assertEqual(one, two)

    def test_prompts_and_responses_are_rendered_as_chats_where_a_template_is_asked_for(self):
        text = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        lines = self.write_lines("in.jsonl", {"prompt": "Q", "response": "A"})
        self.one_row(text, said(text, "A<|im_end|>"), *self.responses("--chat-template", "chatml"), lines)

    def test_a_separator_behind_a_chat_is_a_target_only_where_a_response_ends_it(self):
        for chat, mark in ((self.CHAT, 9), (self.CHAT[:4], NO)):
            tensors, _ = self.packed(250, *self.chat("--separator", 9), self.write_lines("in.jsonl", {"messages": chat}))
            last = tensors["documents"][0].index(-1) - 1
            self.assertEqual((tensors["tokens"][0][last], tensors["labels"][0][last]), (9, mark))

    def test_chats_without_responses_or_with_empty_ones_are_counted(self):
        entries = ({"messages": self.CHAT}, {"messages": self.CHAT[:2]},
                   {"messages": [*self.CHAT, {"role": "assistant", "content": ""}]})
        out = self.packed(250, *self.chat(), self.write_lines("in.jsonl", *entries))[1]
        for words in ("from 3 documents in 1 files", "left out, with an empty response: 1", "left out, without a target: 1"):
            self.assertIn(words + "\n", out)

    def test_messages_that_are_none_are_named(self):
        def refused(words, *messages):
            lines = self.write_lines("bad.jsonl", {"messages": self.CHAT}, {"messages": list(messages)})
            self.expect_refusal(["line 2", *words], "--pack", 250, *self.chat(), lines, output="out.safetensors")
        user = self.CHAT[1]
        refused(["a list of none"])
        refused(["message 2", "found a string"], user, "hi")
        refused(["message 1", "the role \"bot\"", "assistant"], {"role": "bot", "content": "x"})
        refused(["message 1", "\"role\" is not a string"], {"role": None, "content": "x"})
        refused(["message 1", "\"content\" is not a string but null"], {"role": "assistant", "content": None})
        refused(["message 1", "\"content\" is not a string but a list"], {"role": "user", "content": [{"type": "text"}]})
        refused(["message 1", "\"content\""], {"role": "user"})
        refused(["message 1", "weight"], {"role": "assistant", "content": "x", "weight": 0})
        refused(["message 2", "\"tool_calls\"", "--chat-template"], user,
                {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]})
        lines = self.write_lines("bad.jsonl", {"messages": "Hi"})
        self.expect_refusal(["\"messages\" is not a list of messages but a string"], "--format", "chat", lines)
        lines = self.write_lines("bad.jsonl", {"messages": [user], "tools": [{"name": "f"}]})
        self.expect_refusal(["\"tools\""], "--format", "chat", lines)

    def test_lists_that_stand_in_strings_do_not_go_in_letter_by_letter(self):
        user = {"role": "user", "content": "x"}
        for entry in ({"messages": [user, {"role": "assistant", "content": "y"}], "tools": "[{\"name\": \"f\"}]"},
                      {"messages": [user, {"role": "assistant", "content": "y", "tool_calls": "[]"}]},
                      {"messages": [user, {"role": "assistant", "content": "y"}], "tools": ["f"]}):
            lines = self.write_lines("bad.jsonl", entry)
            self.expect_refusal(["is not a list of objects but"], "--format", "chat", lines)
        lines = self.write_lines("bad.jsonl", {"conversations": [user]})
        self.expect_refusal(["--messages-key conversations"], "--format", "chat", lines)


if __name__ == "__main__":
    unittest.main()
