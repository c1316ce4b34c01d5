"""Digests that go on from earlier ones, against digests of the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.chains.histories import key_of_bytes
from tito_audit.record.message import as_message
from tito_audit.sessions.index import PrefixDigests, digest_text, message_keys
from tito_audit.sessions.model import Branch, ChatCall, Node, Prompt
from tito_audit.sessions.session import TextAnswers

END = 9


class ByLastId:
    """What `Texts` asks a writer: an answer that ends with END has a stop token."""

    def stop_text(self, node: Node) -> str | None:
        return "<end>" if node.output_ids[-1:].tolist() == [END] else None


@settings(max_examples=examples(100, 2000))
@given(st.text(st.sampled_from("aé你\ud83d\ude00🎉"), max_size=12), st.lists(st.integers(0, 14), max_size=8))
def test_a_beginning_has_the_digest_of_its_text(text, lengths):
    digests = PrefixDigests(text)
    for length in lengths:
        assert digests.digest(length) == digest_text(text[:length])
    assert digests.digest() == digest_text(text)


IDS = st.lists(st.integers(0, END), max_size=4).map(lambda ids: np.array(ids, np.int32))


@settings(max_examples=examples(100, 2000))
@given(st.data())
def test_an_answer_has_the_keys_of_its_ids(data):
    texts, nodes = TextAnswers(ByLastId()), []
    for _ in range(data.draw(st.integers(1, 7))):
        parent = data.draw(st.sampled_from([None, *nodes]))
        prompt = Prompt(Branch.START, data.draw(IDS))
        if parent is not None:
            whole = parent.prompt.length + len(parent.output_ids)
            whole_or_less = data.draw(st.sampled_from([whole, max(whole - 1, 0), whole // 2]))
            prompt = Prompt(Branch.FORK, data.draw(IDS), parent=parent, kept=whole_or_less)
        output = data.draw(IDS)
        node = _node(prompt, output)
        seen = np.concatenate([prompt.ids, output])
        expected = [key_of_bytes(b"i" + seen.tobytes())]
        if output[-1:].tolist() == [END]:
            expected.append(key_of_bytes(b"i" + seen[:-1].tobytes()))
        assert texts.add(node) == expected
        if data.draw(st.booleans()):
            texts = TextAnswers(ByLastId())  # a parent that is not held any more
        nodes.append(node)


def _node(prompt: Prompt, output: np.ndarray) -> Node:
    message = as_message({"role": "assistant", "content": "x"}, "an answer")
    return Node("c", 0, prompt, ChatCall(()), output, np.zeros(len(output)), message.wire, message)


def _key(wire: dict[str, object]) -> bytes:
    (key,) = message_keys([as_message(wire, "a message")])
    return key


@settings(max_examples=examples(50, 1000))
@given(st.integers(498, 503), st.integers(498, 503), st.sampled_from("ab"), st.sampled_from("ab"))
def test_long_texts_are_the_same_message_only_if_they_are_equal(first, second, first_end, other):
    texts = ["x" * first + first_end, "x" * second + other]
    keys = {_key({"role": "user", "content": text}) for text in texts}
    assert len(keys) == len(set(texts))


def test_a_long_text_is_the_same_as_one_part_of_it():
    text = "long " * 200
    plain = _key({"role": "user", "content": text})
    assert plain == _key({"role": "user", "content": [{"type": "text", "text": text}]})
    assert plain != _key({"role": "system", "content": text})
    halves = [{"type": "text", "text": text[:500]}, {"type": "text", "text": text[500:]}]
    assert plain != _key({"role": "user", "content": halves})
    assert _key({"role": "assistant", "content": text}) == _key({"role": "assistant", "content": halves})
