"""Pythonic calls: a list like `[get_weather(city="Rome", days=2)]`, as Llama 3.2 and 4 write it."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tito_audit.parser import ParsedCall, Parser, Reads
from tito_audit.parsers._runs import is_text, with_tools
from tito_audit.parsers._source import Reader, TextSource, literal, spaces, word

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_PLAIN = re.compile(r"[^()\[\]{}'\"#]+")
_IN_STRING = {quote: re.compile(rf"[^\\\n{quote}]+") for quote in "'\""}
_IN_LONG_STRING = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _calls(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
    """The calls of a list, none unless all of them have literal arguments; Llama 4 puts it between tags."""
    tagged = yield from literal(source, _BEGIN)
    yield from spaces(source)
    start = source.at
    if not (yield from _list(source)):
        return False
    calls: list[ParsedCall] = []
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        body = ast.parse(source.text(start, source.at), mode="eval").body
        calls = [_call(node) for node in body.elts] if isinstance(body, ast.List) else []
    for call in calls:
        add(call)
    if tagged and calls and (yield from spaces(source)):
        yield from literal(source, _END)
    return bool(calls)


def _list(source: TextSource) -> Reader[bool]:
    """Whether a list is here that begins like a call, which is then read."""
    start, open_ = source.at, ["]"]
    if not (yield from literal(source, "[")):
        return False
    yield from spaces(source)
    name = yield from word(source, _NAME)
    yield from spaces(source)
    if name is None or not (yield from source.more()) or source.peek() != "(":
        return False
    while (yield from source.more()) and source.at - start < 1 << 20:
        if source.take(_PLAIN):
            continue
        character = source.peek()
        if character in "'\"":
            if not (yield from _string(source, character)):
                return False
            continue
        if character in _CLOSES:
            open_.append(_CLOSES[character])
        elif character != open_.pop():
            return False
        source.skip()
        if not open_:
            return True
        if len(open_) > 50:
            return False
    return False


def _string(source: TextSource, quote: str) -> Reader[bool]:
    """Whether a string ends, which is then read; in three quotes it may have line breaks."""
    long = yield from literal(source, quote * 3)
    if not long:
        source.skip()
    end, inside = (quote * 3, _IN_LONG_STRING[quote]) if long else (quote, _IN_STRING[quote])
    while (yield from source.more()):
        if source.take(inside):
            continue
        if source.peek() == "\\":
            source.skip()
            if not (yield from source.more()):
                return False
        elif (yield from literal(source, end)):
            return True
        elif not long:
            return False
        source.skip()
    return False


def _call(node: ast.expr) -> ParsedCall:
    """One call; ValueError if it is not a call or has arguments that JSON cannot hold."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call by names")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("each argument has a name of its own")
        arguments[keyword.arg] = _value(keyword.value)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not is_text(written):
        raise ValueError("half a character")
    return ParsedCall(_dotted(node.func), written)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("a name")


def _value(node: ast.expr) -> Any:
    """The value of a literal; ValueError if JSON has no such value."""
    match node:
        case ast.Constant(value=None | str() | int() | float()):
            return node.value
        case ast.Name() if node.id in _JSON_NAMES:
            return _JSON_NAMES[node.id]
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(entry) for entry in node.elts]
        case ast.Dict():
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(keys) == len(node.keys):
                return dict(zip(keys, map(_value, node.values), strict=True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("a literal")


PARSER = Parser(
    name="pythonic",
    title="a list of Python calls: Llama 3.2, Llama 4, ToolACE",
    reads=Reads.TOOLS,
    start=with_tools(lambda options: {_BEGIN: _calls, "[": _calls}, only_first=True),
    aliases=("llama4_pythonic",),
    templates=("[func_name1(params_name1=params_value1",),
)
