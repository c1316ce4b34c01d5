"""One fault a record, each with the code and the cause that it is to be named by."""

from __future__ import annotations

import copy
import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.causes.families import Family
from tests.causes.recorded import NotAppendOnlyError, Recorded, record
from tests.causes.talks import Talk

Make = Callable[[Family, Talk], "Recorded | None"]
BOTH, CALLS, ROW = frozenset(("calls", "row")), frozenset(("calls",)), frozenset(("row",))
SYSTEM = "You are a pirate. Speak like one."


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    code: str | None
    """None: nothing loud may be found."""
    cause: str
    """What the cause has to hold, in lower case; several joined by |."""
    make: Make
    forms: frozenset[str] = BOTH
    also: frozenset[str] = frozenset()
    """Codes that may speak beside it."""
    tool_talks: bool = False
    """Whether it takes conversations with tools, or those without."""
    any_talk: bool = False


FAULTS: list[Fault] = []
_PREFIX = frozenset(("SEQ301", "SEQ302"))
_SEAM = _PREFIX | {"TOK104"}
"""Where what an answer begins with would be encoded together with the end of its prompt."""
_TEXT = _PREFIX | {"REC006"}
"""Where the log holds another text than was sampled, which a rule of the record says too."""


def fault(
    name: str,
    code: str | None,
    cause: str = "",
    *,
    forms: frozenset[str] = BOTH,
    also: frozenset[str] = _PREFIX,
    tool_talks: bool = False,
    any_talk: bool = False,
) -> Callable[[Make], Make]:
    """Register a fault."""

    def decorate(make: Make) -> Make:
        FAULTS.append(Fault(name, code, cause, make, forms, also, tool_talks, any_talk))
        return make

    return decorate


def made(one: Fault, family: Family, talk: Talk) -> Recorded | None:
    """A record with the fault; None where family or conversation do not allow it."""
    try:
        return one.make(family, talk)
    except NotAppendOnlyError:
        return None


def inner(found: Recorded) -> int:
    """The answer to put a fault into: the first, so that later prompts show it, if there are any."""
    return 0


# ---------------------------------------------------------------- clean


@fault("clean", None, also=frozenset(), any_talk=True)
def _clean(family: Family, talk: Talk) -> Recorded | None:
    return record(family, talk)


@fault("clean, last answer cut by length", None, also=frozenset(), any_talk=True)
def _cut_clean(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    found.said[-1] = found.said[-1][:-1]
    found.cut.add(found.last)
    return found


# ---------------------------------------------------------------- TOK


def _swapped(family: Family, talk: Talk, kinds: Callable[[Family, list[int], int], Any]) -> Recorded | None:
    """An answer in which other ids stand for the same bytes; later prompts hold today's."""
    found = record(family, talk)
    k = inner(found)
    ids = found.said[k]
    for at in range(1, len(ids) - 2):
        for width, new in kinds(family, ids, at):
            said = [*ids[:at], *new, *ids[at + width :]]
            found.said[k], found.heard[k] = said, ids
            return found
    return None


def _halves(family: Family, ids: list[int], at: int) -> Iterator[tuple[int, list[int]]]:
    data = family.data(ids[at])
    for cut in range(1, len(data or b"")):
        a, b = family.of_bytes.get(data[:cut]), family.of_bytes.get(data[cut:])  # type: ignore[index]
        if a is not None and b is not None and cut > 1:
            yield 1, [a, b]


def _wholes(family: Family, ids: list[int], at: int) -> Iterator[tuple[int, list[int]]]:
    a, b = family.data(ids[at]), family.data(ids[at + 1])
    joined = family.of_bytes.get(a + b) if a and b else None
    if joined is not None:
        yield 2, [joined]


def _others(family: Family, ids: list[int], at: int) -> Iterator[tuple[int, list[int]]]:
    a, b = family.data(ids[at]), family.data(ids[at + 1])
    data = (a or b"") + (b or b"")
    for cut in range(1, len(data)):
        if a and b and cut != len(a):
            x, y = family.of_bytes.get(data[:cut]), family.of_bytes.get(data[cut:])
            if x is not None and y is not None:
                yield 2, [x, y]


@fault("merge", "TOK101", "merge")
def _merge(family: Family, talk: Talk) -> Recorded | None:
    return _swapped(family, talk, _halves)


@fault("split", "TOK102", "split")
def _split(family: Family, talk: Talk) -> Recorded | None:
    return _swapped(family, talk, _wholes)


@fault("resplit", "TOK103", "resplit")
def _resplit(family: Family, talk: Talk) -> Recorded | None:
    return _swapped(family, talk, _others)


@fault("merge across the seam", "TOK104", "seam")
def _seam(family: Family, talk: Talk) -> Recorded | None:
    """The answer starts with line feeds, behind an opener that ends in one."""
    if family.marks.trims or not family.marks.opener.endswith("\n"):
        return None
    found = record(family, talk)
    k = inner(found)
    if k == found.last and family.name == "qwen3":
        return None  # its last answer opens with reasoning
    before = family.marks.opener
    text = "\n\n" + found.said_texts[k]
    joined, apart = family.ids(before + text), family.ids(before) + family.ids(text)
    if joined == apart:
        return None
    found.said[k] = family.ids(text)
    head = found.gaps[k][: len(found.gaps[k]) - len(family.ids(before))]
    at = talk.answers[k]
    found.messages[at]["content"] = "\n\n" + found.messages[at]["content"]
    done = found.prompt(k)[: -len(found.gaps[k])] if k else []
    for later in range(k + 1, len(found)):
        middle = [i for j in range(k + 1, later) for i in found.gaps[j] + found.said[j]]
        found.prompts[later] = done + head + joined + middle + found.gaps[later]
    return found


def _spelled(family: Family, talk: Talk, where: str) -> Recorded | None:
    mark = family.marks.end
    found = record(family, talk)
    k = inner(found)
    at = talk.answers[k]
    if where == "user":
        at = max(i for i in range(at) if talk.messages[i]["role"] == "user")
    if family.name == "qwen3" and where != "user" and k == found.last:
        return None
    text = talk.messages[at]["content"]
    head, space, tail = text.partition(" ")
    if not space:
        return None
    found.messages[at]["content"] = f"{head} {mark} {tail}"
    pieces = family.ids(head), family.plain(mark), family.ids(space + tail)
    part = found.gap_texts[k] if where == "user" else found.said_texts[k]
    before, _, after = part.rpartition(text)
    ids = family.ids(before + head) + family.ids(" ") + pieces[1] + family.ids(" " + tail + after)
    if where == "user":
        found.gaps[k] = ids
        return found
    found.said[k] = ids
    found.heard[k] = family.ids(f"{before}{head} {mark} {tail}{after}")
    return found


@fault("control token spelled by a user", "TOK105", "spelled", also=frozenset())
def _spelled_by_user(family: Family, talk: Talk) -> Recorded | None:
    return _spelled(family, talk, "user")


@fault("control token spelled in an answer", "TOK105", "spelled")
def _spelled_in_answer(family: Family, talk: Talk) -> Recorded | None:
    return _spelled(family, talk, "assistant")


@fault("control token dropped by decoding", "TOK105", "dropped")
def _dropped(family: Family, talk: Talk) -> Recorded | None:
    mark = {"gemma-3": "<start_of_image>", "deepseek-v3": "<|EOT|>", "llama-3.1": "<|python_tag|>"}.get(
        family.name, "<|im_start|>"
    )
    if not family.has(mark):
        return None
    found = record(family, talk)
    k = inner(found)
    ids = found.said[k]
    half = len(ids) // 2
    found.said[k], found.heard[k] = [*ids[:half], family.one(mark), *ids[half:]], ids
    return found


@fault("broken character", "TOK106", "broken", also=_TEXT | {"MSK404"})
def _broken(family: Family, talk: Talk) -> Recorded | None:
    """The answer ends inside a character; everything later holds what decoding made of it."""
    found = record(family, talk)
    k = inner(found)
    at = talk.answers[k]
    if family.name == "qwen3" and k == found.last:
        return None
    end = family.marks.end
    text = found.said_texts[k].removesuffix(end)
    for character in ("𐎀", "🦣", "🪿", "\u1bc0"):
        whole = family.ids(text + " " + character)
        data = b"".join(family.data(i) or b"" for i in whole[:-1])
        broken = data.decode("utf-8", "replace")
        if broken.count("\ufffd") and broken.rstrip("\ufffd") == text + " ":
            found.said[k] = whole[:-1]
            found.cut.add(k)
            clean = broken.rstrip("\ufffd") + "\ufffd"
            found.messages[at]["content"] = clean
            close = [family.one(end)]
            found.heard[k] = family.ids(clean) + close
            if k < found.last:
                found.closes[k] = close
            return found
    return None


@fault("text composed by the tokenizer", "TOK107", "nfc", also=_PREFIX)
def _composed(family: Family, talk: Talk) -> Recorded | None:
    if not family.composes:
        return None
    found = record(family, talk)
    k = inner(found)
    if family.name == "qwen3" and k == found.last:
        return None
    accent = family.of_bytes.get("\u0301".encode())
    if accent is None:
        return None
    end = family.marks.end
    text = found.said_texts[k].removesuffix(end) + " cafe"
    found.said[k] = [*family.ids(text), accent, family.one(end)]
    found.messages[talk.answers[k]]["content"] += " cafe\u0301"
    found.heard[k] = family.ids(unicodedata.normalize("NFC", text + "\u0301") + end)
    return found


# ---------------------------------------------------------------- TPL: scaffold


@fault("prompt without its template", "TPL201", "no template", also=frozenset(("SEQ305",)))
def _bare(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    texts = [message["content"] for message in talk.messages]
    found.gaps[0] = family.ids("\n".join(texts[: talk.answers[0]]) + "\n")
    found.said[0] = family.ids(texts[talk.answers[0]])
    del found.gaps[1:], found.said[1:], found.messages[talk.answers[0] + 1 :]
    found.cut.add(0)
    return found


@fault("line feed too many in the scaffold", "TPL202", "extra in the scaffold", also=frozenset())
def _more_space(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    opener = family.marks.opener
    text = found.gap_texts[0]
    found.gaps[0] = family.ids(text[: -len(opener)] + "\n" + opener)
    return found


@fault("line feed missing in the scaffold", "TPL202", "missing in the scaffold", also=frozenset())
def _less_space(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    opener = family.marks.opener
    text = found.gap_texts[0]
    if not text.endswith("\n" + opener):
        return None
    found.gaps[0] = family.ids(text[: -len(opener) - 1] + opener)
    return found


@fault("line feed at the end of an answer trimmed", "TPL202", "in an answer")
def _trimmed_end(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    k = inner(found)
    end = family.marks.end
    text = found.said_texts[k].removesuffix(end)
    found.heard[k], found.said[k] = found.said[k], family.ids(f"{text}\n{end}")
    return found


def _leading(family: Family, talk: Talk, *, raw: bool) -> Recorded | None:
    found = record(family, talk)
    k = inner(found)
    if (raw and not family.marks.trims) or (family.name == "qwen3" and k == found.last):
        return None
    found.heard[k], found.said[k] = found.said[k], family.ids("\n\n" + found.said_texts[k])
    if raw:
        at = talk.answers[k]
        found.messages[at]["content"] = "\n\n" + found.messages[at]["content"]
    return found


@fault("white space before an answer, trimmed by the template", "TPL202", "in an answer", also=_SEAM)
def _leading_raw(family: Family, talk: Talk) -> Recorded | None:
    return _leading(family, talk, raw=True)


@fault("white space before an answer, trimmed in the log", "TPL202", "in an answer", also=_SEAM)
def _leading_stripped(family: Family, talk: Talk) -> Recorded | None:
    return _leading(family, talk, raw=False)


def _system(family: Family, talk: Talk) -> tuple[Talk, Talk]:
    """The talk with a system prompt, and without any."""
    with_it, without = talk.copy(), talk.copy()
    if talk.system is None:
        with_it.messages.insert(0, {"role": "system", "content": SYSTEM})
    else:
        del without.messages[0]
    return with_it, without


def _without_default(family: Family, found: Recorded) -> bool:
    """Take the default that a template wrote out of the first gap."""
    if not family.marks.default_system:
        return False
    text = found.gap_texts[0]
    start = text.index("<|im_start|>user")
    found.gaps[0] = family.ids(text[start:])
    return True


@fault("system prompt missing", "TPL206", "system prompt missing", also=frozenset())
def _system_missing(family: Family, talk: Talk) -> Recorded | None:
    with_it, without = _system(family, talk)
    found = record(family, without)
    _without_default(family, found)
    found.messages = with_it.messages
    return found


@fault("system prompt not in the messages", "TPL206", "not in the messages|in place of", also=frozenset())
def _system_unlogged(family: Family, talk: Talk) -> Recorded | None:
    with_it, without = _system(family, talk)
    found = record(family, with_it)
    found.messages = without.messages
    return found


@fault("another system prompt", "TPL206", "another system prompt", also=frozenset())
def _system_other(family: Family, talk: Talk) -> Recorded | None:
    with_it, _ = _system(family, talk)
    found = record(family, with_it)
    found.messages = copy.deepcopy(with_it.messages)
    found.messages[0]["content"] = "You know the tides and the stars; answer with care."
    return found


@fault("default system prompt missing", "TPL206", "default system prompt", also=frozenset())
def _default_missing(family: Family, talk: Talk) -> Recorded | None:
    _, without = _system(family, talk)
    found = record(family, without)
    return found if _without_default(family, found) else None


@fault("default system prompt in place of the log's", "TPL206", "default system prompt", also=frozenset())
def _default_used(family: Family, talk: Talk) -> Recorded | None:
    if not family.marks.default_system:
        return None
    with_it, without = _system(family, talk)
    found = record(family, without)
    found.messages = with_it.messages
    return found


@fault("system prompt folded into the user's", "TPL206", "folded", also=frozenset())
def _folded(family: Family, talk: Talk) -> Recorded | None:
    with_it, without = _system(family, talk)
    if family.name == "gemma-3":
        return None  # its template does so
    folded = without.copy()
    folded.messages[0]["content"] = f"{with_it.system}\n\n{folded.messages[0]['content']}"
    found = record(family, folded)
    _without_default(family, found)
    found.messages = with_it.messages
    return found


@fault("system prompt as a turn of its own", "TPL206", "own turn|turn of its own|not folded", also=frozenset())
def _unfolded(family: Family, talk: Talk) -> Recorded | None:
    if family.name != "gemma-3":
        return None
    with_it, without = _system(family, talk)
    found = record(family, without)
    text = found.gap_texts[0].removeprefix("<bos>")
    found.gaps[0] = family.ids(f"<bos><start_of_turn>system\n{with_it.system}<end_of_turn>\n{text}")
    found.messages = with_it.messages
    return found


@fault("generation prompt missing", "TPL207", "generation prompt missing", also=frozenset(("SEQ302", "TOK104")))
def _unopened(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    opener = family.marks.opener
    found.gaps[-1] = family.ids(found.gap_texts[-1].removesuffix(opener))
    return found


@fault("generation prompt doubled", "TPL207", "generation prompt doubled", also=frozenset(("SEQ302",)))
def _opened_twice(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    found.gaps[-1] = found.gaps[-1] + family.ids(family.marks.opener)
    return found


_END = _PREFIX | {"MSK404"}


@fault("turn end missing", "TPL208", "turn end", also=_END)
def _end_missing(family: Family, talk: Talk) -> Recorded | None:
    """An answer was cut, and whoever wrote the next prompt did not close it."""
    found = record(family, talk)
    k = inner(found)
    if k == found.last:
        return None
    found.said[k] = found.said[k][:-1]
    found.cut.add(k)
    return found


@fault("turn end doubled", "TPL208", "turn end doubled", also=_END)
def _end_doubled(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    k = inner(found)
    if k == found.last:
        return None
    found.gaps[k + 1] = [found.said[k][-1], *found.gaps[k + 1]]
    return found


@fault("another stop token", "TPL208", "another stop token", also=_END)
def _end_other(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.other_end is None:
        return None
    found = record(family, talk)
    k = inner(found)
    ids = found.said[k]
    found.said[k], found.heard[k] = [*ids[:-1], family.one(family.marks.other_end)], ids
    return found


@fault("turn end merged with its neighbours", "TPL208", "turn end", also=_END)
def _end_merged(family: Family, talk: Talk) -> Recorded | None:
    """The end is left out, and the line feed behind it becomes one token with the answer's last."""
    found = record(family, talk)
    k = inner(found)
    if k == found.last or not found.gap_texts[k + 1].startswith("\n"):
        return None
    text = found.said_texts[k].removesuffix(family.marks.end)
    joined = family.ids(text + "\n")
    if joined == family.ids(text) + family.ids("\n"):
        return None
    rest = family.ids(found.gap_texts[k + 1][1:])
    # As a row, the merged token was trained; as calls, the next prompt was encoded so.
    found.heard[k], found.gaps[k + 1] = joined, rest
    found.cut.add(k)
    found.said[k] = found.said[k][:-1]
    found.trained[k] = joined
    return found


@fault("BOS missing", "TPL209", "bos missing", also=frozenset())
def _no_bos(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.bos is None:
        return None
    found = record(family, talk)
    found.gaps[0] = found.gaps[0][1:]
    return found


@fault("BOS doubled", "TPL209", "bos doubled", also=frozenset())
def _two_bos(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.bos is None:
        return None
    found = record(family, talk)
    found.gaps[0] = [found.gaps[0][0], *found.gaps[0]]
    return found


@fault("padding in the prompt ids", None, "", also=frozenset(("PADDING",)))
def _padded(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.pad is None:
        return None
    found = record(family, talk)
    found.gaps[0] = [family.one(family.marks.pad)] * 7 + found.gaps[0]
    return found


# ---------------------------------------------------------------- TPL: answers


def _rewritten(
    family: Family, talk: Talk, said: Callable[[str], str | None], logged: Callable[[str], str]
) -> Recorded | None:
    """An answer that was sampled as one text and comes back as another."""
    found = record(family, talk)
    k = inner(found)
    if family.name == "qwen3" and k == found.last:
        return None
    end = family.marks.end
    at = talk.answers[k]
    text = found.said_texts[k].removesuffix(end)
    new = said(text)
    if new is None:
        return None
    found.said[k] = family.ids(new + end)
    found.heard[k] = family.ids(logged(text) + end)
    found.messages[at]["content"] = logged(text)
    return found


@fault("reasoning stripped", "TPL204", "reasoning stripped", also=_TEXT)
def _stripped(family: Family, talk: Talk) -> Recorded | None:
    return _rewritten(family, talk, lambda text: f"<think>\nLet me see: {text[:9]}.\n</think>\n\n{text}", str)


@fault("reasoning emptied", "TPL204", "reasoning emptied", also=_TEXT)
def _emptied(family: Family, talk: Talk) -> Recorded | None:
    if family.name == "qwen3":
        found = record(family, talk)
        text = found.said_texts[-1].replace("<think>\n", "<think>\nThat is not so hard to say.", 1)
        found.said[-1] = family.ids(text)
        return found
    return _rewritten(
        family,
        talk,
        lambda text: f"<think>\nLet me see: {text[:9]}.\n</think>\n\n{text}",
        lambda text: f"<think>\n\n</think>\n\n{text}",
    )


@fault("reasoning inserted", "TPL205", "empty reasoning inserted", also=_TEXT)
def _inserted(family: Family, talk: Talk) -> Recorded | None:
    if family.name == "qwen3":
        found = record(family, talk)
        found.said[-1] = family.ids(found.said_texts[-1].replace("<think>\n\n</think>\n\n", "", 1))
        return found
    return _rewritten(family, talk, str, lambda text: f"<think>\n\n</think>\n\n{text}")


@fault("reasoning filled in", "TPL205", "reasoning inserted", also=_TEXT | {"REC005"})
def _filled(family: Family, talk: Talk) -> Recorded | None:
    if family.name == "qwen3":
        found = record(family, talk)
        at = talk.answers[-1]
        found.messages[at]["reasoning_content"] = "That is not so hard to say."
        return found
    return _rewritten(
        family,
        talk,
        lambda text: f"<think>\n\n</think>\n\n{text}",
        lambda text: f"<think>\nLet me see: {text[:9]}.\n</think>\n\n{text}",
    )


_CALL = {"name": "search", "arguments": {"query": "café près d'ici", "limit": 3, "open": True}}
_EMPTY: dict[str, Any] = {"name": "clock", "arguments": {}}


def _dump(value: object, **kwargs: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **kwargs})


SPELLINGS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], str]]] = {
    "spacing": (_CALL, lambda c: _dump(c, separators=(",", ":"))),
    "key order": (
        _CALL,
        lambda c: _dump({"name": c["name"], "arguments": dict(reversed(c["arguments"].items()))}),
    ),
    "escapes": (_CALL, lambda c: _dump(c, ensure_ascii=True)),
    "booleans": (_CALL, lambda c: _dump(c).replace("true", '"true"')),
    "string": (_CALL, lambda c: _dump({**c, "arguments": _dump(c["arguments"])})),
    "empty arguments": (_EMPTY, lambda c: _dump({**c, "arguments": ""})),
    "python": (_CALL, repr),
}


def _spelling(kind: str) -> Make:
    call, spell = SPELLINGS[kind]

    def in_text(family: Family, talk: Talk) -> Recorded | None:
        ahead = "Let me look.\n"
        return _rewritten(family, talk, lambda _: ahead + spell(call), lambda _: ahead + _dump(call))

    return in_text


def _spelling_in_call(kind: str) -> Make:
    call, spell = SPELLINGS[kind]

    def in_call(family: Family, talk: Talk) -> Recorded | None:
        if not family.marks.tools:
            return None
        talk = talk.copy()
        at = next(i for i, message in enumerate(talk.messages) if message.get("tool_calls"))
        talk.messages[at]["tool_calls"][0]["function"] = copy.deepcopy(call)
        found = record(family, talk)
        k = talk.answers.index(at)
        text = found.said_texts[k]
        new = text.replace(_dump(call), spell(call), 1)
        if new == text:
            return None
        found.said[k], found.heard[k] = family.ids(new), found.said[k]
        return found

    return in_call


_WORDS = {
    "spacing": "spacing",
    "key order": "key order",
    "escapes": "escapes",
    "booleans": "booleans",
    "string": "string instead of an object",
    "empty arguments": "empty arguments",
    "python": "python",
}
for _kind, _word in _WORDS.items():
    fault(f"tool call in text: {_kind}", "TPL203", _word, also=_TEXT)(_spelling(_kind))
    fault(f"tool call parsed: {_kind}", "TPL203", _word, also=_TEXT, tool_talks=True)(_spelling_in_call(_kind))


# ---------------------------------------------------------------- TPL212


def _other_tools(family: Family, talk: Talk, change: Callable[[list[Any]], list[Any]]) -> Recorded | None:
    if not family.marks.tools:
        return None
    with_it = talk.copy()
    for tool in with_it.tools:
        tool["function"]["strict"] = True
    sampled = with_it.copy()
    sampled.tools = change(sampled.tools)
    found = record(family, sampled)
    found.tools = with_it.tools
    return found


def _unstrict(tools: list[Any]) -> list[Any]:
    for tool in tools:
        del tool["function"]["strict"]
    return tools


@fault("strict dropped from the tools", "TPL212", "strict", also=frozenset(), tool_talks=True)
def _strict(family: Family, talk: Talk) -> Recorded | None:
    return _other_tools(family, talk, _unstrict)


@fault("one tool missing", "TPL212", "tool missing", also=frozenset(), tool_talks=True)
def _one_tool(family: Family, talk: Talk) -> Recorded | None:
    return _other_tools(family, talk, lambda tools: tools[:-1])


@fault("first tool missing", "TPL212", "tool missing", also=frozenset(), tool_talks=True)
def _first_tool(family: Family, talk: Talk) -> Recorded | None:
    return _other_tools(family, talk, lambda tools: tools[1:])


@fault("all tools missing", "TPL212", "tools missing", also=frozenset(), tool_talks=True)
def _no_tools(family: Family, talk: Talk) -> Recorded | None:
    return _other_tools(family, talk, lambda tools: [])


@fault("tools that the log does not name", "TPL212", "not in the log", also=frozenset(), tool_talks=True)
def _unlogged_tools(family: Family, talk: Talk) -> Recorded | None:
    if not family.marks.tools:
        return None
    found = record(family, talk)
    found.tools = []
    return found


@fault(
    "tools changed between calls",
    "TPL212",
    "tool",
    forms=CALLS,
    also=frozenset(("SEQ302",)),
    tool_talks=True,
)
def _changed_tools(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    fewer = talk.copy()
    fewer.tools = fewer.tools[:-1]
    found.gaps[0] = record(family, fewer).gaps[0]
    full = record(family, talk)
    if family.marks.tools:
        found.prompts = {k: full.prompt(k) for k in range(1, len(full))}
        return found
    return None


# ---------------------------------------------------------------- SEQ


@fault("history truncated", "SEQ303", "", forms=CALLS, also=frozenset())
def _truncated(family: Family, talk: Talk) -> Recorded | None:
    found = record(family, talk)
    if len(found) < 3:
        return None
    short = talk.copy()
    first = 1 if talk.system is not None else 0
    del short.messages[first : first + 2]
    found.prompts[found.last] = record(family, short).prompt(found.last - 1)
    return found


@fault("history truncated in the row", "SEQ303", "", forms=ROW, also=frozenset())
def _truncated_row(family: Family, talk: Talk) -> Recorded | None:
    if len(talk.answers) < 3:
        return None
    short = talk.copy()
    first = 1 if talk.system is not None else 0
    del short.messages[first : first + 2]
    found = record(family, short)
    found.messages = copy.deepcopy(talk.messages)
    return found
