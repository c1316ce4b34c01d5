"""Why system prompts read from recorded prompts, and missing from the messages, may be something else.  Reading a
text from each prompt proves nothing: whatever another template writes there would be read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from json import dumps

from tito_audit.identify.confirm import Confirmed
from tito_audit.identify.observe import Observation
from tito_audit.identify.readings import MARK
from tito_audit.identify.search import common_start
from tito_audit.identify.ways import CHARACTERS, SYSTEM, Writer

_LEAST = 4
"""How many system prompts with different first messages are needed."""
_BEGINNING, _END = 24, 16
"""A common start or end of all system prompts that is at least this long may be a template's."""
_SAID = 24
"""A message text of this many characters is not in a system prompt by accident."""
_LOOKED = 200
_LIKELIER = "another template is likelier"


def doubt_of_systems(best: Confirmed, others: Iterable[Confirmed], rest: Sequence[Observation]) -> str:
    """Why the system prompts that an explanation reads may be something else; "" if it reads none, or they are
    certain.
    """
    if SYSTEM in best.way.varies:
        read: Mapping[int, str] = best.read
    elif best.way.system is not None:
        read = dict.fromkeys(best.written, best.way.system)
    else:
        return ""
    if any(_holds(text, rest[at], best) for at, text in read.items()):
        return f"the system prompt that it needs holds what the messages or tools say: {_LIKELIER}"
    return _doubt_of_own(best, others, rest) if SYSTEM in best.way.varies else ""


def _doubt_of_own(best: Confirmed, others: Iterable[Confirmed], rest: Sequence[Observation]) -> str:
    """The same where each prompt has a system prompt of its own."""
    if len({(text, _first(rest[at])) for at, text in best.read.items()}) < _LEAST:
        return "too few prompts open with a system prompt that the messages lack"
    groups = _groups(best, rest)
    if not all(_in_own_message(best, rest[max(group, key=lambda at: len(_first(rest[at])))]) for group in groups):
        return "the text that the messages lack is not written as a separate message"
    texts = [sorted({best.read[at] for at in group}) for group in groups]
    if all(len(group) == 1 for group in texts):
        return f"the system prompts that it needs depend on tools or arguments alone: {_LIKELIER}"
    if any(_share_text(group) for group in texts):
        return f"the system prompts that it needs begin or end with the same text: {_LIKELIER}"
    if any(_rivals(best, other) for other in others):
        return "another explanation writes as many prompts, with other system prompts"
    return ""


def _groups(best: Confirmed, rest: Sequence[Observation]) -> list[list[int]]:
    """The prompts with a system prompt of their own, those of the same tools and stated arguments together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for at in best.read:
        one = rest[at]
        groups.setdefault((bool(one.tools), repr(sorted(one.stated.items()))), []).append(at)
    return list(groups.values())


def _in_own_message(best: Confirmed, one: Observation) -> bool:
    """Whether the system prompt is between control tokens, before the first message."""
    way = best.writer.resolved(best.way.with_system(MARK), one)
    text = best.writer.text(way, one) if way is not None else None
    if text is None:
        return False
    before, _, after = text.partition(MARK)
    said = _first(one)
    start = after.find(said) if said else len(after)
    return _has_control(best.writer, before) and _has_control(best.writer, after[: max(start, 0)])


def _has_control(writer: Writer, text: str) -> bool:
    return any(token in text for token in writer.renderer.control_texts)


def _first(one: Observation) -> str:
    return one.messages[0].text.strip()


def _share_text(texts: Sequence[str]) -> bool:
    """Whether all of several texts, or all but one, begin or end with the same text."""
    for some in _all_but_one(texts):
        first, last = min(some), max(some)
        beginning = first[: common_start(first, last)]
        turned = [text[::-1] for text in some]
        if len(beginning) >= _BEGINNING or "\n" in beginning or common_start(min(turned), max(turned)) >= _END:
            return True
    return False


def _all_but_one(texts: Sequence[str]) -> Iterator[list[str]]:
    if len(texts) > 1:
        yield list(texts)
    if len(texts) > 2:
        yield from ([*texts[:at], *texts[at + 1 :]] for at in range(len(texts)))


def _rivals(best: Confirmed, other: Confirmed) -> bool:
    """Whether another template writes the same prompts with other system prompts that are not all longer."""
    if other.writer is best.writer or not best.written <= other.written:
        return False
    if SYSTEM not in other.way.varies or other.read == best.read:
        return False
    mine, theirs = best.read, other.read
    more = [len(theirs.get(at, "")) - len(mine.get(at, "")) for at in {*mine, *theirs}]
    return min(more) < 0 or max(more) < CHARACTERS


def _holds(text: str, one: Observation, best: Confirmed) -> bool:
    """Whether a text read as the system prompt holds the message's text, or tools that are not rendered."""
    first = one.messages[0]
    said = first.text.strip()
    if first.role in ("system", "developer") and said and said in text and said != text.strip():
        return True
    if first.role not in ("system", "developer") and len(said) >= _SAID and said[:_LOOKED] in text:
        return True
    written = best.writer.text(best.way, one) or ""
    functions = [tool.get("function", tool) for tool in one.tools]
    return any(_writes_tool(text, written, each) for each in functions if isinstance(each, Mapping))


def _writes_tool(text: str, written: str, function: Mapping[str, object]) -> bool:
    """Whether a tool is defined only in a system prompt; an example may name it elsewhere."""
    name, about = function.get("name"), function.get("description")
    if not isinstance(name, str) or f'"{name}"' not in text:
        return False
    if written.count(f'"{name}"') != text.count(f'"{name}"'):
        return False
    if not isinstance(about, str) or not about.strip():
        return True
    return any(form[:_SAID] in text for form in (about.strip(), dumps(about.strip())[1:-1]))
