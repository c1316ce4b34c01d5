"""Content parts before a gateway: each template is given them in the form that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.serving import PLAIN, asked, client, codes_of, gated, logged, make_gateway, plain, served
from tests.tables import stored
from tests.toy import toy_tokenizer
from tito_audit.render.renderer import make_renderer
from tito_audit.sessions.content import as_served, takes_parts
from tito_audit.sessions.engine import Conversations

CHAT = "/v1/chat/completions"
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = stored(__file__, "FORMS")


def test_a_template_takes_parts_where_it_loops_over_content() -> None:
    assert {source: takes_parts(source) for source in FORMS} == FORMS


def with_parts(*texts: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, "cache_control": {}} for text in texts]}


def test_text_parts_are_given_in_the_form_that_the_template_reads(tmp_path: Path) -> None:
    for name, template, written in (("text", None, "One\nTwo"), ("parts", PARTS, "[One][Two]")):
        log = tmp_path / f"{name}.jsonl"
        gateway, provider = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
        if template is not None:
            renderer = make_renderer(gateway.tokenizer, chat_template=template)
            gateway.conversations = Conversations(gateway.tokenizer, renderer)
        with served(gateway) as address:
            chat = client(address).chat.completions
            history: list[Any] = [with_parts("One", "Two")]
            first = chat.create(model="toy", messages=history)
            answer = with_parts(first.choices[0].message.content or "", role="assistant")
            history += [answer, with_parts("More")]
            chat.create(model="toy", messages=history)
        prompt = gateway.tokenizer.vocabulary.text(np.array(provider.prompts[0], np.int32))
        assert f"user\n{written}<|im_end|>" in prompt
        assert "cache_control" not in prompt
        rows = logged(log)
        assert [row["branch"] for row in rows] == ["start", "continues"]
        assert rows[0]["messages"] == history[:1], "as the client sent them"
        if template is None:
            assert rows[0]["template_messages"] == [{"role": "user", "content": written}]
            assert codes_of(log) == []


WANTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EITHER = WANTS.replace("{% if m.role == 'tool' %}", "{% if m.content is string %}")
PRINTS = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + WANTS


def test_texts_stay_texts_where_the_template_would_print_a_list() -> None:
    renderer = make_renderer(toy_tokenizer(), chat_template=PRINTS)
    assert as_served(renderer) is renderer
    wants = make_renderer(toy_tokenizer(), chat_template=WANTS)
    served = as_served(wants)
    assert served.wraps_texts


def test_texts_are_given_as_parts_where_the_template_writes_nothing_for_a_text(tmp_path: Path) -> None:
    for name, template in (("wants", WANTS), ("either", EITHER)):
        log = tmp_path / f"{name}.jsonl"
        gateway, provider = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
        renderer = make_renderer(gateway.tokenizer, chat_template=template)
        gateway.conversations = Conversations(gateway.tokenizer, renderer)
        with served(gateway) as address:
            chat = client(address).chat.completions
            history: list[Any] = [{"role": "user", "content": "One"}]
            first = chat.create(model="toy", messages=history)
            history += [
                {"role": "assistant", "content": first.choices[0].message.content},
                {"role": "tool", "content": "Two", "tool_call_id": "x"},
                {"role": "user", "content": "Three"},
            ]
            chat.create(model="toy", messages=history)
        first_prompt, prompt = (
            gateway.tokenizer.vocabulary.text(np.array(ids, np.int32)) for ids in provider.prompts
        )
        assert first_prompt == "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n"
        added = "tool\nTwo<|im_end|>\n<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.startswith(first_prompt)
        assert prompt.endswith(added)
        rows = logged(log)
        assert [row["branch"] for row in rows] == ["start", "continues"]
        assert rows[1]["messages"] == history, "as the client sent them"
        if name == "either":
            assert "template_messages" not in rows[1]
            continue
        contents = [message["content"] for message in rows[1]["template_messages"]]
        assert contents[0] == [{"type": "text", "text": "One"}]
        assert contents[2:] == ["Two", [{"type": "text", "text": "Three"}]]
        file = tmp_path / "wants.jinja"
        file.write_text(template, "utf-8")
        assert codes_of(log, "--chat-template", str(file)) == []


def test_parts_that_are_no_text_are_refused_by_kind(tmp_path: Path) -> None:
    with gated(tmp_path, []) as (address, provider, _):
        for part, kind in (
            ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
            ({"type": "input_audio"}, "input_audio"),
            ({"type": "text"}, "text"),
            ({"type": ["text"]}, "text"),
        ):
            status, said = asked(address, CHAT, {"messages": [{"role": "user", "content": [part]}]})
            assert (status, said["error"]["param"]) == (400, "messages")
            assert kind in said["error"]["message"]
    assert not provider.prompts
