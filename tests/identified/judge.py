"""Whether what `identify` claims of a log writes the prompts that the log holds, without code of the tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from tests.identified.writer import Case, Prompt, encode, render, source_of

_SYSTEM = "system prompt not in the messages"
_NO_PROMPT = "no generation prompt"
_BOS_ADDED = "another BOS token before the text"
_BOS_MISSING = "no BOS token where the template writes one"
_PREFILL = "text after the generation prompt"
_CLOCK_VARIES = "the date differs from row to row"
_STATED_UNUSED = "the template arguments that the log states were not used"
_KNOWN = {_SYSTEM, _NO_PROMPT, _BOS_ADDED, _BOS_MISSING, _PREFILL, _CLOCK_VARIES, _STATED_UNUSED}


def writes_all(claim: Mapping[str, Any], prompts: Sequence[Prompt]) -> bool:
    """Whether the claimed settings and departures write every prompt that is not broken, token by token."""
    whole, forms = (prompt for prompt in prompts if not prompt.broken), _forms(claim)
    return all(any(_ids(claim, prompt, as_object) == prompt.ids for as_object in forms) for prompt in whole)


def named_template(claim: Mapping[str, Any]) -> str | None:
    """The file of the claimed template; None for the tokenizer's own."""
    file = claim["template"]["chat_template"]
    return None if file is None else Path(file).name


def says_the_case(claim: Mapping[str, Any], case: Case) -> bool:
    """Whether a claim names the tokenizer and the template of a case."""
    return Path(claim["tokenizer"]).name == case.tokenizer and named_template(claim) == case.template


def _forms(claim: Mapping[str, Any]) -> tuple[bool, ...]:
    """How tool-call arguments are given: `auto` leaves that to the template."""
    return {"object": (True,), "string": (False,), "auto": (True, False)}[claim["tool_arguments"]]


def _ids(claim: Mapping[str, Any], prompt: Prompt, as_object: bool) -> list[int] | None:
    departures = {departure["kind"]: departure["text"] for departure in claim["departures"]}
    assert set(departures) <= _KNOWN, f"nothing of the kind was written: {departures}"
    tokenizer = Path(claim["tokenizer"]).name
    messages = prompt.messages[:-1]
    if _SYSTEM in departures:
        messages = [{"role": "system", "content": departures[_SYSTEM]}, *messages]
    at = datetime.fromisoformat(claim["clock"]) if claim["clock"] is not None else None
    try:
        text = render(
            tokenizer,
            source_of(tokenizer, named_template(claim)),
            messages,
            None if claim["without_tools"] else prompt.tools,
            arguments={**claim["template_args"], **({} if _STATED_UNUSED in departures else prompt.stated)},
            at=prompt.at if _CLOCK_VARIES in departures else at,
            as_object=as_object,
            generation_prompt=_NO_PROMPT not in departures,
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    ids = encode(tokenizer, text + departures.get(_PREFILL, ""))
    if _BOS_ADDED in departures:
        return ids[:1] + ids
    return ids[1:] if _BOS_MISSING in departures else ids
