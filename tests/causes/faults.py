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


def with_fault(chosen: Fault, family: Family, talk: Talk) -> Recorded | None:
    """A record with the fault; None where family or conversation do not allow it."""
    try:
        return chosen.make(family, talk)
    except NotAppendOnlyError:
        return None


def inner(recorded: Recorded) -> int:
    """The answer to put a fault into: the first, so that later prompts show it, if there are any."""
    return 0


# ---------------------------------------------------------------- clean


@fault("clean", None, also=frozenset(), any_talk=True)
def _clean(family: Family, talk: Talk) -> Recorded | None:
    return record(family, talk)


@fault("clean, last answer cut by length", None, also=frozenset(), any_talk=True)
def _cut_clean(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    recorded.sampled[-1] = recorded.sampled[-1][:-1]
    recorded.cut.add(recorded.last)
    return recorded


# ---------------------------------------------------------------- TOK


def _swapped(family: Family, talk: Talk, kinds: Callable[[Family, list[int], int], Any]) -> Recorded | None:
    """An answer in which other ids stand for the same bytes; later prompts hold today's."""
    recorded = record(family, talk)
    k = inner(recorded)
    ids = recorded.sampled[k]
    for at in range(1, len(ids) - 2):
        for width, new in kinds(family, ids, at):
            recorded.sampled[k], recorded.heard[k] = [*ids[:at], *new, *ids[at + width :]], ids
            return recorded
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
    recorded = record(family, talk)
    k = inner(recorded)
    if k == recorded.last and family.name == "qwen3":
        return None  # its last answer opens with reasoning
    before = family.marks.opener
    text = "\n\n" + recorded.sampled_texts[k]
    joined, apart = family.ids(before + text), family.ids(before) + family.ids(text)
    if joined == apart:
        return None
    recorded.sampled[k] = family.ids(text)
    head = recorded.gaps[k][: len(recorded.gaps[k]) - len(family.ids(before))]
    at = talk.answers[k]
    recorded.messages[at]["content"] = "\n\n" + recorded.messages[at]["content"]
    done = recorded.prompt(k)[: -len(recorded.gaps[k])] if k else []
    for later in range(k + 1, len(recorded)):
        middle = [i for j in range(k + 1, later) for i in recorded.gaps[j] + recorded.sampled[j]]
        recorded.prompts[later] = done + head + joined + middle + recorded.gaps[later]
    return recorded


def _spelled(family: Family, talk: Talk, where: str) -> Recorded | None:
    mark = family.marks.end
    recorded = record(family, talk)
    k = inner(recorded)
    at = talk.answers[k]
    if where == "user":
        at = max(i for i in range(at) if talk.messages[i]["role"] == "user")
    if family.name == "qwen3" and where != "user" and k == recorded.last:
        return None
    text = talk.messages[at]["content"]
    head, space, tail = text.partition(" ")
    if not space:
        return None
    recorded.messages[at]["content"] = f"{head} {mark} {tail}"
    pieces = family.ids(head), family.plain(mark), family.ids(space + tail)
    part = recorded.gap_texts[k] if where == "user" else recorded.sampled_texts[k]
    before, _, after = part.rpartition(text)
    ids = family.ids(before + head) + family.ids(" ") + pieces[1] + family.ids(" " + tail + after)
    if where == "user":
        recorded.gaps[k] = ids
        return recorded
    recorded.sampled[k] = ids
    recorded.heard[k] = family.ids(f"{before}{head} {mark} {tail}{after}")
    return recorded


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
    recorded = record(family, talk)
    k = inner(recorded)
    ids = recorded.sampled[k]
    half = len(ids) // 2
    recorded.sampled[k], recorded.heard[k] = [*ids[:half], family.id_of(mark), *ids[half:]], ids
    return recorded


@fault("broken character", "TOK106", "broken", also=_TEXT | {"MSK404"})
def _broken(family: Family, talk: Talk) -> Recorded | None:
    """The answer ends inside a character; everything later holds what decoding made of it."""
    recorded = record(family, talk)
    k = inner(recorded)
    at = talk.answers[k]
    if family.name == "qwen3" and k == recorded.last:
        return None
    end = family.marks.end
    text = recorded.sampled_texts[k].removesuffix(end)
    for character in ("𐎀", "🦣", "🪿", "\u1bc0"):
        whole = family.ids(text + " " + character)
        data = b"".join(family.data(i) or b"" for i in whole[:-1])
        broken = data.decode("utf-8", "replace")
        if broken.count("\ufffd") and broken.rstrip("\ufffd") == text + " ":
            recorded.sampled[k] = whole[:-1]
            recorded.cut.add(k)
            clean = broken.rstrip("\ufffd") + "\ufffd"
            recorded.messages[at]["content"] = clean
            close = [family.id_of(end)]
            recorded.heard[k] = family.ids(clean) + close
            if k < recorded.last:
                recorded.closes[k] = close
            return recorded
    return None


@fault("text composed by the tokenizer", "TOK107", "nfc", also=_PREFIX)
def _composed(family: Family, talk: Talk) -> Recorded | None:
    if not family.composes:
        return None
    recorded = record(family, talk)
    k = inner(recorded)
    if family.name == "qwen3" and k == recorded.last:
        return None
    accent = family.of_bytes.get("\u0301".encode())
    if accent is None:
        return None
    end = family.marks.end
    text = recorded.sampled_texts[k].removesuffix(end) + " cafe"
    recorded.sampled[k] = [*family.ids(text), accent, family.id_of(end)]
    recorded.messages[talk.answers[k]]["content"] += " cafe\u0301"
    recorded.heard[k] = family.ids(unicodedata.normalize("NFC", text + "\u0301") + end)
    return recorded


# ---------------------------------------------------------------- TPL: scaffold


@fault("prompt without its template", "TPL201", "no template", also=frozenset(("SEQ305",)))
def _bare(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    texts = [message["content"] for message in talk.messages]
    recorded.gaps[0] = family.ids("\n".join(texts[: talk.answers[0]]) + "\n")
    recorded.sampled[0] = family.ids(texts[talk.answers[0]])
    del recorded.gaps[1:], recorded.sampled[1:], recorded.messages[talk.answers[0] + 1 :]
    recorded.cut.add(0)
    return recorded


@fault("line feed too many in the scaffold", "TPL202", "extra in the scaffold", also=frozenset())
def _more_space(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    opener = family.marks.opener
    text = recorded.gap_texts[0]
    recorded.gaps[0] = family.ids(text[: -len(opener)] + "\n" + opener)
    return recorded


@fault("line feed missing in the scaffold", "TPL202", "missing in the scaffold", also=frozenset())
def _less_space(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    opener = family.marks.opener
    text = recorded.gap_texts[0]
    if not text.endswith("\n" + opener):
        return None
    recorded.gaps[0] = family.ids(text[: -len(opener) - 1] + opener)
    return recorded


@fault("line feed at the end of an answer trimmed", "TPL202", "in an answer")
def _trimmed_end(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    k = inner(recorded)
    end = family.marks.end
    text = recorded.sampled_texts[k].removesuffix(end)
    recorded.heard[k], recorded.sampled[k] = recorded.sampled[k], family.ids(f"{text}\n{end}")
    return recorded


def _leading(family: Family, talk: Talk, *, raw: bool) -> Recorded | None:
    recorded = record(family, talk)
    k = inner(recorded)
    if (raw and not family.marks.trims) or (family.name == "qwen3" and k == recorded.last):
        return None
    recorded.heard[k], recorded.sampled[k] = recorded.sampled[k], family.ids("\n\n" + recorded.sampled_texts[k])
    if raw:
        at = talk.answers[k]
        recorded.messages[at]["content"] = "\n\n" + recorded.messages[at]["content"]
    return recorded


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


def _without_default(family: Family, recorded: Recorded) -> bool:
    """Take the default that a template wrote out of the first gap."""
    if not family.marks.default_system:
        return False
    text = recorded.gap_texts[0]
    start = text.index("<|im_start|>user")
    recorded.gaps[0] = family.ids(text[start:])
    return True


@fault("system prompt missing", "TPL206", "system prompt missing", also=frozenset())
def _system_missing(family: Family, talk: Talk) -> Recorded | None:
    with_it, without = _system(family, talk)
    recorded = record(family, without)
    _without_default(family, recorded)
    recorded.messages = with_it.messages
    return recorded


@fault("system prompt not in the messages", "TPL206", "not in the messages|in place of", also=frozenset())
def _system_unlogged(family: Family, talk: Talk) -> Recorded | None:
    with_it, without = _system(family, talk)
    recorded = record(family, with_it)
    recorded.messages = without.messages
    return recorded


@fault("another system prompt", "TPL206", "another system prompt", also=frozenset())
def _system_other(family: Family, talk: Talk) -> Recorded | None:
    with_it, _ = _system(family, talk)
    recorded = record(family, with_it)
    recorded.messages = copy.deepcopy(with_it.messages)
    recorded.messages[0]["content"] = "You know the tides and the stars; answer with care."
    return recorded


@fault("default system prompt missing", "TPL206", "default system prompt", also=frozenset())
def _default_missing(family: Family, talk: Talk) -> Recorded | None:
    _, without = _system(family, talk)
    recorded = record(family, without)
    return recorded if _without_default(family, recorded) else None


@fault("default system prompt in place of the log's", "TPL206", "default system prompt", also=frozenset())
def _default_used(family: Family, talk: Talk) -> Recorded | None:
    if not family.marks.default_system:
        return None
    with_it, without = _system(family, talk)
    recorded = record(family, without)
    recorded.messages = with_it.messages
    return recorded


@fault("system prompt folded into the user's", "TPL206", "folded", also=frozenset())
def _folded(family: Family, talk: Talk) -> Recorded | None:
    with_it, without = _system(family, talk)
    if family.name == "gemma-3":
        return None  # its template does so
    folded = without.copy()
    folded.messages[0]["content"] = f"{with_it.system}\n\n{folded.messages[0]['content']}"
    recorded = record(family, folded)
    _without_default(family, recorded)
    recorded.messages = with_it.messages
    return recorded


@fault("system prompt as a turn of its own", "TPL206", "own turn|turn of its own|not folded", also=frozenset())
def _unfolded(family: Family, talk: Talk) -> Recorded | None:
    if family.name != "gemma-3":
        return None
    with_it, without = _system(family, talk)
    recorded = record(family, without)
    text = recorded.gap_texts[0].removeprefix("<bos>")
    recorded.gaps[0] = family.ids(f"<bos><start_of_turn>system\n{with_it.system}<end_of_turn>\n{text}")
    recorded.messages = with_it.messages
    return recorded


@fault("generation prompt missing", "TPL207", "generation prompt missing", also=frozenset(("SEQ302", "TOK104")))
def _unopened(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    opener = family.marks.opener
    recorded.gaps[-1] = family.ids(recorded.gap_texts[-1].removesuffix(opener))
    return recorded


@fault("generation prompt doubled", "TPL207", "generation prompt doubled", also=frozenset(("SEQ302",)))
def _opened_twice(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    recorded.gaps[-1] = recorded.gaps[-1] + family.ids(family.marks.opener)
    return recorded


_END = _PREFIX | {"MSK404"}


@fault("turn end missing", "TPL208", "turn end", also=_END)
def _end_missing(family: Family, talk: Talk) -> Recorded | None:
    """An answer was cut, and whoever wrote the next prompt did not close it."""
    recorded = record(family, talk)
    k = inner(recorded)
    if k == recorded.last:
        return None
    recorded.sampled[k] = recorded.sampled[k][:-1]
    recorded.cut.add(k)
    return recorded


@fault("turn end doubled", "TPL208", "turn end doubled", also=_END)
def _end_doubled(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    k = inner(recorded)
    if k == recorded.last:
        return None
    recorded.gaps[k + 1] = [recorded.sampled[k][-1], *recorded.gaps[k + 1]]
    return recorded


@fault("another stop token", "TPL208", "another stop token", also=_END)
def _end_other(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.other_end is None:
        return None
    recorded = record(family, talk)
    k = inner(recorded)
    ids = recorded.sampled[k]
    recorded.sampled[k], recorded.heard[k] = [*ids[:-1], family.id_of(family.marks.other_end)], ids
    return recorded


@fault("turn end merged with its neighbours", "TPL208", "turn end", also=_END)
def _end_merged(family: Family, talk: Talk) -> Recorded | None:
    """The end is left out, and the line feed behind it becomes one token with the answer's last."""
    recorded = record(family, talk)
    k = inner(recorded)
    if k == recorded.last or not recorded.gap_texts[k + 1].startswith("\n"):
        return None
    text = recorded.sampled_texts[k].removesuffix(family.marks.end)
    joined = family.ids(text + "\n")
    if joined == family.ids(text) + family.ids("\n"):
        return None
    rest = family.ids(recorded.gap_texts[k + 1][1:])
    # As a row, the merged token was trained; as calls, the next prompt was encoded so.
    recorded.heard[k], recorded.gaps[k + 1] = joined, rest
    recorded.cut.add(k)
    recorded.sampled[k] = recorded.sampled[k][:-1]
    recorded.trained[k] = joined
    return recorded


@fault("BOS missing", "TPL209", "bos missing", also=frozenset())
def _no_bos(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.bos is None:
        return None
    recorded = record(family, talk)
    recorded.gaps[0] = recorded.gaps[0][1:]
    return recorded


@fault("BOS doubled", "TPL209", "bos doubled", also=frozenset())
def _two_bos(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.bos is None:
        return None
    recorded = record(family, talk)
    recorded.gaps[0] = [recorded.gaps[0][0], *recorded.gaps[0]]
    return recorded


@fault("padding in the prompt ids", None, "", also=frozenset(("PADDING",)))
def _padded(family: Family, talk: Talk) -> Recorded | None:
    if family.marks.pad is None:
        return None
    recorded = record(family, talk)
    recorded.gaps[0] = [family.id_of(family.marks.pad)] * 7 + recorded.gaps[0]
    return recorded


# ---------------------------------------------------------------- TPL: answers


def _rewritten(
    family: Family, talk: Talk, sampled: Callable[[str], str | None], logged: Callable[[str], str]
) -> Recorded | None:
    """An answer that was sampled as one text and comes back as another."""
    recorded = record(family, talk)
    k = inner(recorded)
    if family.name == "qwen3" and k == recorded.last:
        return None
    end = family.marks.end
    at = talk.answers[k]
    text = recorded.sampled_texts[k].removesuffix(end)
    new = sampled(text)
    if new is None:
        return None
    recorded.sampled[k] = family.ids(new + end)
    recorded.heard[k] = family.ids(logged(text) + end)
    recorded.messages[at]["content"] = logged(text)
    return recorded


@fault("reasoning stripped", "TPL204", "reasoning stripped", also=_TEXT)
def _stripped(family: Family, talk: Talk) -> Recorded | None:
    return _rewritten(family, talk, lambda text: f"<think>\nLet me see: {text[:9]}.\n</think>\n\n{text}", str)


@fault("reasoning emptied", "TPL204", "reasoning emptied", also=_TEXT)
def _emptied(family: Family, talk: Talk) -> Recorded | None:
    if family.name == "qwen3":
        recorded = record(family, talk)
        text = recorded.sampled_texts[-1].replace("<think>\n", "<think>\nThat is not so hard to say.", 1)
        recorded.sampled[-1] = family.ids(text)
        return recorded
    return _rewritten(
        family,
        talk,
        lambda text: f"<think>\nLet me see: {text[:9]}.\n</think>\n\n{text}",
        lambda text: f"<think>\n\n</think>\n\n{text}",
    )


@fault("reasoning inserted", "TPL205", "empty reasoning inserted", also=_TEXT)
def _inserted(family: Family, talk: Talk) -> Recorded | None:
    if family.name == "qwen3":
        recorded = record(family, talk)
        recorded.sampled[-1] = family.ids(recorded.sampled_texts[-1].replace("<think>\n\n</think>\n\n", "", 1))
        return recorded
    return _rewritten(family, talk, str, lambda text: f"<think>\n\n</think>\n\n{text}")


@fault("reasoning filled in", "TPL205", "reasoning inserted", also=_TEXT | {"REC005"})
def _filled(family: Family, talk: Talk) -> Recorded | None:
    if family.name == "qwen3":
        recorded = record(family, talk)
        at = talk.answers[-1]
        recorded.messages[at]["reasoning_content"] = "That is not so hard to say."
        return recorded
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
        recorded = record(family, talk)
        k = talk.answers.index(at)
        text = recorded.sampled_texts[k]
        new = text.replace(_dump(call), spell(call), 1)
        if new == text:
            return None
        recorded.sampled[k], recorded.heard[k] = family.ids(new), recorded.sampled[k]
        return recorded

    return in_call


for _kind in SPELLINGS:
    _word = "string instead of an object" if _kind == "string" else _kind
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
    recorded = record(family, sampled)
    recorded.tools = with_it.tools
    return recorded


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
    recorded = record(family, talk)
    recorded.tools = []
    return recorded


@fault(
    "tools changed between calls",
    "TPL212",
    "tool",
    forms=CALLS,
    also=frozenset(("SEQ302",)),
    tool_talks=True,
)
def _changed_tools(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    fewer = talk.copy()
    fewer.tools = fewer.tools[:-1]
    recorded.gaps[0] = record(family, fewer).gaps[0]
    full = record(family, talk)
    if family.marks.tools:
        recorded.prompts = {k: full.prompt(k) for k in range(1, len(full))}
        return recorded
    return None


# ---------------------------------------------------------------- SEQ


@fault("history truncated", "SEQ303", "", forms=CALLS, also=frozenset())
def _truncated(family: Family, talk: Talk) -> Recorded | None:
    recorded = record(family, talk)
    if len(recorded) < 3:
        return None
    short = talk.copy()
    first = 1 if talk.system is not None else 0
    del short.messages[first : first + 2]
    recorded.prompts[recorded.last] = record(family, short).prompt(recorded.last - 1)
    return recorded


@fault("history truncated in the row", "SEQ303", "", forms=ROW, also=frozenset())
def _truncated_row(family: Family, talk: Talk) -> Recorded | None:
    if len(talk.answers) < 3:
        return None
    short = talk.copy()
    first = 1 if talk.system is not None else 0
    del short.messages[first : first + 2]
    recorded = record(family, short)
    recorded.messages = copy.deepcopy(talk.messages)
    return recorded
