"""Content parts before a gateway: each template is given them in the form that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import PLAIN, client, codes_of, logged, make_gateway, plain, served
from tests.tables import stored
from tests.toy import toy_tokenizer
from tito_audit.render.renderer import make_renderer
from tito_audit.sessions.engine import Conversations, renderer_as_served, takes_parts

FORMS = stored(__file__, "FORMS")
PARTS, WANTS = (stored(__file__, "templates")[name] for name in ("parts", "wants"))


def test_a_template_takes_parts_where_it_loops_over_content() -> None:
    assert {source: takes_parts(source) for source in FORMS} == FORMS


def with_parts(*texts: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, "cache_control": {}} for text in texts]}


def talked(
    folder: Path, template: str | None, messages: list[Any], more: list[Any]
) -> tuple[list[str], list[Any]]:
    """The prompts and lines of two calls, the second of which goes on; the log has what the client sent."""
    gateway, provider = make_gateway(folder / "log.jsonl", [PLAIN, PLAIN], start_parser=plain)
    if template is not None:
        renderer = make_renderer(gateway.tokenizer, chat_template=template)
        gateway.conversations = Conversations(gateway.tokenizer, renderer)
    with served(gateway) as address:
        chat = client(address).chat.completions
        text = chat.create(model="toy", messages=messages).choices[0].message.content
        history = [*messages, *({"role": "assistant", "content": text} if turn is None else turn for turn in more)]
        chat.create(model="toy", messages=history)
    rows = logged(folder / "log.jsonl")
    assert [row["branch"] for row in rows] == ["start", "continues"]
    assert (rows[0]["messages"], rows[1]["messages"]) == (messages, history)
    return [gateway.tokenizer.vocabulary.text(np.array(ids, np.int32)) for ids in provider.prompts], rows


@pytest.mark.parametrize(
    ("template", "written"), [(None, "One\nTwo"), (PARTS, "[One][Two]")], ids=["text", "parts"]
)
def test_text_parts_are_given_in_the_form_that_the_template_reads(
    tmp_path: Path, template: str | None, written: str
) -> None:
    answer = with_parts(PLAIN.removesuffix("<|im_end|>"), role="assistant")
    (prompt, _), (first, _) = talked(tmp_path, template, [with_parts("One", "Two")], [answer, with_parts("More")])
    assert f"user\n{written}<|im_end|>" in prompt
    assert "cache_control" not in prompt
    if template is None:
        assert first["template_messages"] == [{"role": "user", "content": written}]
        assert codes_of(tmp_path / "log.jsonl", passes="warning") == []


EITHER = WANTS.replace("{% if m.role == 'tool' %}", "{% if m.content is string %}")
PRINTS = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + WANTS


def test_texts_stay_texts_where_the_template_would_print_a_list() -> None:
    renderer = make_renderer(toy_tokenizer(), chat_template=PRINTS)
    assert renderer_as_served(renderer) is renderer
    wants = make_renderer(toy_tokenizer(), chat_template=WANTS)
    served = renderer_as_served(wants)
    assert served.wraps_texts


@pytest.mark.parametrize("template", [WANTS, EITHER], ids=["wants", "either"])
def test_texts_are_given_as_parts_where_the_template_writes_nothing_for_a_text(
    tmp_path: Path, template: str
) -> None:
    more = [None, {"role": "tool", "content": "Two", "tool_call_id": "x"}, {"role": "user", "content": "Three"}]
    (first, prompt), (_, row) = talked(tmp_path, template, [{"role": "user", "content": "One"}], more)
    assert first == "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n"
    added = "tool\nTwo<|im_end|>\n<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.startswith(first)
    assert prompt.endswith(added)
    if template is EITHER:
        assert "template_messages" not in row
        return
    contents = [message["content"] for message in row["template_messages"]]
    assert contents[0] == [{"type": "text", "text": "One"}]
    assert contents[2:] == ["Two", [{"type": "text", "text": "Three"}]]
    file = tmp_path / "wants.jinja"
    file.write_text(template, "utf-8")
    assert codes_of(tmp_path / "log.jsonl", "--chat-template", str(file), passes="warning") == []
