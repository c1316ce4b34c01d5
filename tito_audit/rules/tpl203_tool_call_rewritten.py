"""TPL203: tool call rewritten."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.finding import Severity, Where
from tito_audit.rule import Reason, cause
from tito_audit.rules._drift import in_answer, texts_in_context

_WRAPPERS = re.compile(
    r"</?tool_calls?>|```\w*|<\|tool_call(?:s_begin|_begin|_end)?\|>|\[/?TOOL_CALLS?\]|<function=|</function>|<\|python_tag\|>"
)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _SpelledCall:
    """A call found in text: its spelling, its value, and whether it is Python rather than JSON."""

    text: str
    value: dict[str, Any]
    python: bool = False


def _calls(text: str) -> list[_SpelledCall]:
    """Every tool call in a text, in order: JSON objects with a `name` and `arguments` or `parameters`, or Python
    literals of them."""
    calls, at = [], text.find("{")
    while at >= 0:
        value, keys, python = None, {"arguments", "parameters"}, False
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            # A Python literal on one line: `{'name': 'f', 'arguments': {'x': True}}`.
            line = text[at:].split("\n", 1)[0]
            end, keys, python = at + line.rfind("}") + 1, {"arguments"}, True
            if at < end <= at + 20_000 and "name" in line:
                with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                    value = ast.literal_eval(text[at:end])
        after = at + 1
        if isinstance(value, dict) and "name" in value and not keys.isdisjoint(value):
            calls.append(_SpelledCall(text[at:end], value, python))
            after = end
        at = text.find("{", after)
    return calls


def _name_change(left: _SpelledCall, right: _SpelledCall) -> str:
    """How two calls differ: in their spelling if their values are equal, else in their values."""
    a, b = left.value, right.value
    if a == b:
        if left.python != right.python:
            return "Python literal instead of JSON"
        if re.sub(r"\s+", "", left.text) == re.sub(r"\s+", "", right.text):
            return "spacing"
        if _canonical_text(a) != _canonical_text(b):
            return "number spelling"  # 1 and 1.0 are equal, and so are 1 and True
        if str(a) != str(b):
            return "key order"
        return "escapes" if "\\" in left.text + right.text else "number or string spelling"
    x, y = (value.get("arguments", value.get("parameters")) for value in (a, b))
    if a.get("name") != b.get("name"):
        return "another name"
    if not x and not y and x != y:
        return "empty arguments written otherwise"
    if isinstance(x, str) != isinstance(y, str):
        return "arguments as a string instead of an object"
    if x == y:
        return "`parameters` instead of `arguments`" if _fields(a) == _fields(b) else "fields beside the arguments"
    if _as_strings(x) == _as_strings(y):
        return "booleans or numbers as strings"
    return "letter case" if _canonical_text(x).lower() == _canonical_text(y).lower() else "other keys or values"


def _fields(call: dict[str, Any]) -> set[str]:
    """The fields of a call, with `parameters` counted as `arguments`."""
    return {"arguments" if key == "parameters" else key for key in call}


def _as_strings(value: Any) -> str:
    """A value as text in which `true`, `"true"` and `"True"` are equal."""
    text = _canonical_text(value).replace("'", "")
    return text.replace("True", "true").replace("False", "false").replace("None", "null")


def _canonical_text(value: Any) -> str:
    """A value as text, independent of the order of keys."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{key!r}:{_canonical_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical_text, value)) + "]"
    return repr(value)


@cause(
    "TPL203",
    Severity.ERROR,
    headline="{n} with a tool call rewritten by the template",
    precedence=70,
    needs=(Needs.TOKENIZER, Needs.RENDERING | Needs.SEVERAL_CALLS),
)
def tool_call_rewritten(difference: Difference, evidence: Evidence) -> Reason | None:
    """Tool call rewritten.

    ## What it finds
    A tool call whose text differs between the sampled tokens and the template, a later prompt or the training row.
    The cause says how: the markers around it, spacing, key order, escapes, a Python literal, values as strings,
    empty arguments, extra fields beside the arguments, or a call on one side only.

    ## Why it matters
    Parsers turn a call into an object, and templates write that object in their own style. The call is the same
    and its tokens are not: the prefix breaks, and the trainer sees a call that the model did not sample.

    ## Example
    A bare call comes back wrapped in markers:

    ```text
    error TPL203 turn 0 completion at 0
      the tool call is rewritten (wrapped in other markers): sampled nothing, turn 1's prompt has
      '<tool_call>'+'\\n'; turn 1 saw tokens that turn 0 lacks
      sampled      │               │{" │name│": │
                                    299 330  270
      next prompt  │<tool_call>│⏎  │{" │name│": │
                    2003        198 299 330  270
    error TPL203 turn 0 completion 14:16
      the tool call is rewritten (wrapped in other markers): sampled '}'+'}', turn 1's prompt has
      '}}\\n'+'</tool_call>'; turn 1 saw the rewritten tokens
      sampled      │": │·tr│ue │} │}            │<|im_end|>│
                    270 411 360 92 92            2002
      next prompt  │": │·tr│ue │}}⏎│</tool_call>│<|im_end|>│
                    270 411 360 400 2004         2002
    ```

    ## Repair
    `splice` puts the sampled ids back where the log proves that the sampler saw them. `fork` gives one row per
    unbroken run of calls. `mask` takes the span out of the loss.
    """
    if difference.where is Where.PROMPT and not in_answer(difference):
        return None
    recorded, canonical = texts_in_context(difference)
    left, right = _calls(recorded), _calls(canonical)
    aspects: list[str] = []
    if len(left) != len(right):
        aspects = ["only one side has it" if not left or not right else "another number of calls"]
    elif left and _WRAPPERS.findall(recorded) != _WRAPPERS.findall(canonical):
        aspects = ["wrapped in other markers"]
    for a, b in zip(left, right, strict=True) if len(left) == len(right) else ():
        if a.text != b.text:
            try:
                aspects.append(_name_change(a, b))
            except RecursionError:  # nested too deep to be worth comparing
                aspects.append("other keys or values")
    how = ", ".join(dict.fromkeys(aspects))
    return Reason(f"tool call: {how}", f"the tool call is rewritten ({how})") if how else None
