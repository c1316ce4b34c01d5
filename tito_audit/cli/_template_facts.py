"""The table of facts on the page of `template`."""

from __future__ import annotations

from collections.abc import Iterator

from tito_audit.templates import Partial, Return, Stop, TemplateFacts
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import listed

_LONGEST = 80


def fact_rows(facts: TemplateFacts, has_ids: bool) -> list[tuple[str, str]]:
    """Names and values of the table."""
    return list(_rows(facts, has_ids))


def _rows(facts: TemplateFacts, has_ids: bool) -> Iterator[tuple[str, str]]:
    opener = facts.generation_prompt
    texts = listed([quoted(text) for text in opener.texts[:4]]) or "none"
    yield "generation prompt", texts + ("" if len(opener.texts) < 2 else ", depending on the messages")
    yield "answers continue it", "yes" if opener.continued else "no: a rendered answer begins differently"
    yield "end tokens", "; ".join(_stop(stop) for stop in facts.stops) or "none"
    yield "beginning token", _bos(facts, has_ids)
    yield "clock", _clock(facts)
    if facts.contents:
        yield "contents of messages", _contents(facts)
    for one in facts.partial:
        yield one.case, _partial(one)
    if not has_ids:
        yield "token ids", "unknown: without a tokenizer, <bos> and <eos> are placeholders"


def quoted(text: str) -> str:
    """A text in quotes, made visible and short."""
    return f"“{visible(elided(text, _LONGEST))}”"


def _stop(stop: Stop) -> str:
    facts = [str(stop.id)] if stop.id is not None else []
    facts += ["ends answers"] if stop.written else []
    facts += ["named by the tokenizer"] if stop.of_tokenizer else []
    return f"{visible(stop.text)} ({', '.join(facts)})" if facts else visible(stop.text)


def _bos(facts: TemplateFacts, has_ids: bool) -> str:
    bos = facts.bos
    if not bos.text:
        return "the tokenizer has none" if has_ids else "unknown"
    if bos.doubled:
        return (
            f"{visible(bos.text)}, written by the template and added by the tokenizer: encode with "
            "add_special_tokens=False, or it occurs twice"
        )
    added = {True: ", added by the tokenizer", False: ", not added by the tokenizer", None: ""}[bos.added]
    return f"{visible(bos.text)}, {'' if bos.written else 'not '}written by the template{added}"


def _clock(facts: TemplateFacts) -> str:
    if facts.clock_formats is None:
        return "not read"
    formats = listed([quoted(one) for one in facts.clock_formats])
    return f"read{f' as {formats}' if formats else ''}: prompts differ from day to day; pass --clock DATE"


def _contents(facts: TemplateFacts) -> str:
    roles: dict[str, list[str]] = {}
    for one in facts.contents:
        example = f", such as {quoted(one.unlike)}" if one.unlike is not None else ""
        roles.setdefault(f"{one.writing}{example}", []).append(one.role)
    return "; ".join(f"{how} ({listed(names)})" for how, names in roles.items())


def _partial(one: Partial) -> str:
    if one.outcome is Return.REFUSED:
        return "refused"
    if one.outcome is Return.REWRITTEN:
        return "does not come back as sampled"
    where = "written before it" if one.case.startswith("prefill") else "added after it, never sampled"
    return f"stays, with {quoted(one.added)} {where}" if one.added else "stays as it is"
