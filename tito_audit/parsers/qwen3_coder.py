"""Qwen3-Coder: calls as XML, `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from tito_audit.parser import CallForm, ParsedCall, ParseOptions, Parser, Reads
from tito_audit.parsers._runs import CallReader, is_encodable, tagged_call, tool_parser
from tito_audit.parsers._source import Reader, TextSource, literal, read_until, skip_spaces, word

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]+")
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each parameter of a tool."""


def _call_readers(options: ParseOptions) -> Mapping[str, CallReader]:
    """The readers of calls by the tag that begins one: the outer tag may be missing, as in vLLM."""
    schemas: dict[str, Schemas] = {}
    for tool in options.tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        schemas[str(function.get("name"))] = properties if isinstance(properties, Mapping) else {}

    def bare(source: TextSource, add: Callable[[ParsedCall], None]) -> Reader[bool]:
        call = yield from _read_call(source, schemas)
        if call is not None:
            add(call)
        return call is not None

    tagged = tagged_call(_OPEN, partial(_read_call, schemas=schemas), _CLOSE)
    return {_OPEN: tagged, _FUNCTION: bare}


def _read_call(source: TextSource, schemas: Mapping[str, Schemas]) -> Reader[ParsedCall | None]:
    name = yield from _read_tag(source, _FUNCTION)
    if name is None:
        return None
    arguments: dict[str, str] = {}
    while (yield from skip_spaces(source)):
        if (yield from literal(source, _FUNCTION_END)):
            written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {arguments[key]}" for key in arguments)
            return ParsedCall(name, f"{{{written}}}")
        key = yield from _read_tag(source, _PARAMETER)
        start = source.offset
        end = (yield from read_until(source, _PARAMETER_END)) if key is not None else None
        if key is None or end is None:
            return None
        # The value is JSON as it was sampled, if that is of a type which the schema states; else a string.
        value = source.text(start, end).removeprefix("\n").removesuffix("\n")
        arguments[key] = json.dumps(value, ensure_ascii=not is_encodable(value))
        kinds = _schema_types(schemas.get(name, {}).get(key))
        if kinds and kinds != {"string"}:
            plain = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value.strip())
            with suppress(ValueError, RecursionError):
                parsed = json.loads(plain, parse_constant=int)  # which refuses NaN and Infinity
                if any(
                    isinstance(parsed, _PYTHON_TYPES[kind]) and (kind == "boolean" or not isinstance(parsed, bool))
                    for kind in kinds & _PYTHON_TYPES.keys()
                ):
                    arguments[key] = plain
    return None


def _read_tag(source: TextSource, mark: str) -> Reader[str | None]:
    if not (yield from literal(source, mark)):
        return None
    name = yield from word(source, _NAME)
    return name if (yield from literal(source, ">")) else None


def _schema_types(schema: object) -> set[str]:
    """The types that a JSON schema states."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    kinds = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            kinds |= _schema_types(choice)
    return {kind for kind in kinds if isinstance(kind, str)}


PARSER = Parser(
    name="qwen3_coder",
    title="XML in `<tool_call>` tags: Qwen3-Coder, Qwen3.5",
    reads=Reads.TOOLS,
    start=tool_parser(_call_readers),
    aliases=("qwen3_xml",),
    templates=(_FUNCTION, _PARAMETER),
    call_form=CallForm(
        "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "\n", "qwen_xml_parameter"
    ),
)
