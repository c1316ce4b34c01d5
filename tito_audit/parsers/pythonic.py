"""Pythonic calls: a list like `[get_weather(city="Rome", days=2)]`, as Llama 3.2 and 4 write it."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from tito_audit.parser import ParsedCall, Parser, Reads
from tito_audit.parsers._runs import is_encodable, tool_parser
from tito_audit.parsers._source import Reader, TextSource, literal, skip_spaces, word

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.]+")
_PLAIN = re.compile(r"[^()\[\]{}'\"#]+")
_IN_STRING = {quote: re.compile(rf"[^\\\n{quote}]+") for quote in "'\""}
_IN_LONG_STRING = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _read_calls(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
    """Read a list of calls, all with literal arguments; Llama 4 puts it between tags."""
    tagged = yield from literal(source, _BEGIN)
    yield from skip_spaces(source)
    start = source.offset
    if not (yield from _read_list(source)):
        return False
    calls: list[ParsedCall] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            body = ast.parse(source.text(start, source.offset), mode="eval").body
        for node in body.elts if isinstance(body, ast.List) else ():
            if not isinstance(node, ast.Call) or node.args:
                return False
            arguments: dict[str, Any] = {}
            for keyword in node.keywords:
                if keyword.arg is None or keyword.arg in arguments:  # `**`, or a name twice
                    return False
                arguments[keyword.arg] = _literal_value(keyword.value)
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            if not is_encodable(written):
                return False
            calls.append(ParsedCall(_dotted_name(node.func), written))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no literals, or none that JSON can hold
        return False
    for call in calls:
        add(call)
    if tagged and calls and (yield from skip_spaces(source)):
        yield from literal(source, _END)
    return bool(calls)


def _read_list(source: TextSource) -> Reader[bool]:
    """Read up to the end of a list that begins with a call; whether there is one."""
    start, open_ = source.offset, ["]"]
    if not (yield from literal(source, "[")):
        return False
    yield from skip_spaces(source)
    name = yield from word(source, _NAME)
    yield from skip_spaces(source)
    if name is None or not (yield from source.has_more()) or source.peek() != "(":
        return False
    while (yield from source.has_more()) and source.offset - start < 1 << 20:
        if source.take(_PLAIN):
            continue
        character = source.peek()
        if character in "'\"":
            if not (yield from _read_string(source, character)):
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


def _read_string(source: TextSource, quote: str) -> Reader[bool]:
    """Read a string; whether it ends. In three quotes it may have line breaks."""
    long = yield from literal(source, quote * 3)
    if not long:
        source.skip()
    end, inside = (quote * 3, _IN_LONG_STRING[quote]) if long else (quote, _IN_STRING[quote])
    while (yield from source.has_more()):
        if source.take(inside):
            continue
        if source.peek() == "\\":
            source.skip()
            if not (yield from source.has_more()):
                return False
        elif (yield from literal(source, end)):
            return True
        elif not long:
            return False
        source.skip()
    return False


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("a name")


def _literal_value(node: ast.expr) -> Any:
    """The value of a literal; ValueError if JSON has no such value."""
    match node:
        case ast.Constant(value=None | str() | int() | float()):
            return node.value
        case ast.Name() if node.id in _JSON_NAMES:
            return _JSON_NAMES[node.id]
        case ast.List() | ast.Tuple() | ast.Set():
            return [_literal_value(entry) for entry in node.elts]
        case ast.Dict():
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(keys) == len(node.keys):
                return dict(zip(keys, map(_literal_value, node.values), strict=True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("a literal")


PARSER = Parser(
    name="pythonic",
    title="a list of Python calls: Llama 3.2, Llama 4, ToolACE",
    reads=Reads.TOOLS,
    start=tool_parser(lambda options: {_BEGIN: _read_calls, "[": _read_calls}, only_first=True),
    aliases=("llama4_pythonic",),
    templates=("[func_name1(params_name1=params_value1",),
)
