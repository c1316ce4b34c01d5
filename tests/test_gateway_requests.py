"""Single requests to each endpoint of the gateway: what reaches the provider, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import serving
from tests.serving import PLAIN, asked, fetched, gated, logged, make_gateway, plain, served
from tests.tables import stored, table
from tests.tiers import examples
from tito_audit.serve.app import HttpOptions
from tito_audit.serve.messages import MessagesApi

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
VALUES = {**vars(serving), "IMAGE": IMAGE}
RIGHT, WRONG, REACHES, WHOLE, MORE, DEEP = (
    stored(__file__, name) for name in ("right", "wrong", "reaches", "whole", "more", "deep")
)
SIGNATURE = MessagesApi().sign("Hm.")
ENDS = {"chat/completions": "[DONE]", "responses": "response.completed", "messages": '{"type":"message_stop"}'}
"""What a stream ends with; the object of a response comes behind it."""


def text_of(body: str, **more: Any) -> str:
    """A body as JSON, its `$NAMES` replaced."""
    values = {**VALUES, **more}
    return re.sub(
        r"\$([A-Z]+)", lambda name: values[name[1]] if name[1] in more else json.dumps(values[name[1]]), body
    )


def body_for(path: str, fields: str, **more: Any) -> bytes:
    """A right body with these fields over it; what is too deep for a parser is only put in."""
    right = json.loads(text_of(RIGHT[path.partition("?")[0]]))
    if (deep := more.pop("DEEP", None)) is not None:
        fields = fields.replace("$DEEP", '"DEEP"')
    merged = json.dumps({**right, **json.loads(text_of(fields, **more))})
    return merged.replace('"DEEP"', deep or '"DEEP"').encode()


def of(value: Any, path: str) -> Any:
    """What stands at a path."""
    name, _, rest = path.partition(".")
    if name == "#":
        return len(value)
    if name == "*":
        return [of(entry, rest) for entry in value]
    value = value[int(name)] if isinstance(value, list) else value[name]
    return of(value, rest) if rest else value


@pytest.mark.parametrize("case", REACHES, ids=lambda case: case["path"])
def test_what_a_client_asks_for_reaches_the_provider(case: dict[str, Any], tmp_path: Path) -> None:
    with gated(tmp_path, [PLAIN], start_parser=plain) as (address, provider, log):
        status, answer = asked(address, f"/v1/{case['path']}", body_for(case["path"], case["body"]))
    assert status == 200
    (sampling,), (row,) = provider.asked, logged(log)
    for name, value in case.get("sampling", {}).items():
        own = getattr(sampling, name)
        assert (list(own) if isinstance(own, tuple) else own) == value
    for path, value in case.get("logged", {}).items():
        assert of(row, path) == value
    names = {
        "$prompt": list(provider.prompts[0]),
        "$sampled": list(provider.sampled[0]),
        "$logprobs": row["logprobs"],
    }
    for path, value in case.get("answer", {}).items():
        assert of(answer, path) == (names[value] if str(value).startswith("$") else value)


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_with_a_request_is_said_of_its_field(path: str, tmp_path: Path) -> None:
    with gated(tmp_path, [], options=HttpOptions(max_body=8000)) as (address, provider, log):
        for what, fields, status, field, *words in WRONG[path]:
            got, answer = asked(
                address, f"/v1/{path}", body_for(path, fields, LARGE="x" * 9000, SIGNATURE=SIGNATURE)
            )
            assert got == status, (what, answer)
            error = answer["error"]
            assert error["message"], what
            assert all(word in error["message"] for word in words), (what, answer)
            if path != "messages":
                assert error["param"] == (field or None), (what, answer)
                continue
            kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
            assert re.search(field, error["message"]), (what, answer)
            assert (answer.keys(), error.keys()) == ({"type", "error"}, {"type", "message"})
            assert (answer["type"], error["type"]) == ("error", kinds[status])
        for body in (b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'):
            assert asked(address, f"/v1/{path}", body)[0] == 400
        assert asked(address, "/v1/other", {})[0] == 404
        assert asked(address, f"/v1/{path}", method="GET")[0] == 405
    assert provider.prompts == []
    assert logged(log) == []


@pytest.mark.parametrize(*table(__file__, "keys"))
def test_a_key_is_asked_for_and_taken_from_either_header(
    path: str, header: str, status: int, at: str, value: Any, tmp_path: Path
) -> None:
    headers = dict([header.split(": ")]) if header else {}
    body = {"messages": [serving.ASK], "max_tokens": 9} if "messages" in path else None
    with gated(tmp_path, [], options=HttpOptions(api_key="secret")) as (address, *_):
        got, answer = asked(address, path, body, **headers)
    assert got == status
    assert not at or of(answer, at) == value


@pytest.mark.parametrize("depth", [260, 500, 900, 5000])
@pytest.mark.parametrize("path", DEEP)
def test_what_is_nested_too_deep_is_refused_before_it_is_sampled(path: str, depth: int, tmp_path: Path) -> None:
    with gated(tmp_path, []) as (address, provider, _):
        for fields in DEEP[path]:
            deep = "[" * depth + "1" + "]" * depth
            status, answer = asked(address, f"/v1/{path}", body_for(path, fields, DEEP=deep))
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert not provider.prompts


JUNK = json.loads(stored(__file__, "junk")["values"])


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with something else in one place of it."""
    if dice.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return dice.choice(JUNK)
    if isinstance(value, dict):
        name = dice.choice(list(value))
        if dice.random() < 0.15:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: mutated(value[name], dice)}
    at = dice.randrange(len(value))
    return [*value[:at], mutated(value[at], dice), *value[at + 1 :]]


def answered(address: str, path: str, body: Any) -> tuple[int, str, str]:
    """Status, type and body of an answer."""
    status, headers, data = fetched(address, f"/v1/{path}", json.dumps(body).encode())
    return status, headers.get_content_type(), data.decode()


@pytest.mark.parametrize("path", WHOLE)
def test_random_bodies_are_answered_or_refused(path: str, tmp_path: Path) -> None:
    count, log, dice = examples(150, 2000), tmp_path / "log.jsonl", random.Random(7)
    gateway, _ = make_gateway(log, [PLAIN] * 128 * count, start_parser=plain)
    whole = json.loads(text_of(WHOLE[path], SIGNATURE=SIGNATURE))
    seen: Counter[tuple[int, str]] = Counter()
    with served(gateway) as address:
        for number in range(count):
            body = {**whole, "stream": dice.random() < 0.5}
            for _ in range(dice.randint(1, 2)):
                body = mutated(body, dice)
            if dice.random() < 0.3 and isinstance(body, dict):
                body = {**body, dice.choice(MORE[path]): dice.choice(JUNK)}
            status, kind, text = answered(address, path, body)
            seen[status, kind] += 1
            assert status in (200, 400, 404), (number, status, text, body)
            assert "the gateway failed" not in text, (number, text, body)
            if kind == "text/event-stream":
                last = text.rstrip()[-5000:].splitlines()[-1 if path != "responses" else -2]
                assert ENDS[path] in last, (number, text, body)
            else:
                assert (status != 200) == (json.loads(text).get("error") is not None), (number, text, body)
            if path == "messages":
                status, kind, text = answered(address, f"{path}/count_tokens", body)
                assert (status in (200, 400, 404), kind) == (True, "application/json")
        for query in ("limit=0", "limit=x", "after=x", "order=%00", "limit=" + "9" * 5000):
            assert asked(address, f"/v1/responses/resp_x/input_items?{query}", method="GET")[0] == 404
    kinds = [(200, "application/json"), (200, "text/event-stream"), (400, "application/json")]
    assert min(seen[kind] for kind in kinds) > count / 20, seen
    calls = {row["call_id"] for row in logged(log)}
    assert len(calls) == seen[kinds[0]] + seen[kinds[1]]
