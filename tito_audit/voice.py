"""How messages name options: as flags on the command line, elsewhere as what a Python program passes.

Messages are written with flags; for Python, `--tokenizer DIR` becomes `Settings(tokenizer="DIR")`. Commands stay
(`tito-audit rescore LOG --resume`), unless a function of the package does the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CLASSES = {
    "Settings": "tokenizer chat-template template-name template-arg template-seconds tool-arguments clock "
    "sampled-role convention assume encoder format kind map rows-at messages tools on session join no-join select "
    "extend-select ignore fail-on require-level limit sample max-row-bytes trust-remote-code jobs engine address",
    "GateSettings": "max-rate require min-audited baseline update-baseline notes",
    "RepairSettings": "with unsafe quarantine force",
    "RepairChoices": "mask-by sentinel mask-style padding",
}
"""By settings class: the flags that it has arguments for."""
_CLASS_OF = {flag: name for name, flags in _CLASSES.items() for flag in flags.split()}
_NAMES = {"t": "tokenizer", "max-rate": "max_rates", "require": "required", "with": "strategies"}
_NAMES |= {flag: flag.replace("-", "_") + "s" for flag in ("template-arg", "sampled-role", "convention")}
"""By flag: the argument, where it has another name."""
_SWITCHES = ("update-baseline", "notes", "trust-remote-code", "unsafe", "force", "join", "no-join")
_PAIRS = ("map", "template-arg", "on", "convention", "assume")
_LISTS = ("with", "sampled-role", "select", "extend-select", "ignore")
_WORDS = (
    "none|recorded|never|error|warning|note|auto|local|ray|null|fastokens|tokenizers|string|object|splice|mask|fork|"
    "realign|normalize|once|canonical|rescore|drop|span|turn|sft|rl|first-divergence|labels|binary|float|bool|left|right"
)
"""Values of lowercase letters alone; others are known by a capital, digit or sign: NAME, 0.1, ./folder."""
_OTHER = r"(?=[^\s`]*[A-Z0-9_=/.…])[^\s`'-][^\s`]*?(?=[.,:;)]*(?:[\s`]|$))"
_VALUE = rf"(?:'[^']*'|(?:{_WORDS})(?:,(?:{_WORDS}))*(?![\w-])|(?<=--sampled-role )[\w-]+|{_OTHER})"
_FLAG = rf"(?:--(?:{'|'.join(sorted(_CLASS_OF, key=len, reverse=True))})(?![\w-])|-t(?!\S))(?: {_VALUE})?"
_COMMAND = (
    rf"(?:tito-audit [a-z]+(?: [^\s`'-][^\s`]*)?|repair(?= --))(?: (?:--?[a-z][a-z-]*(?: {_VALUE})?|{_VALUE}|-))*"
)
_QUOTED = r"'(?:[^'\\\n]|\\.)*(?:'|\\?$)|\"(?:[^\"\\\n]|\\.)*(?:\"|\\?$)"
# Not compiled here: a command never uses them.
_MENTION = rf"(?m)(?<![\w-])(?:(?P<quoted>{_QUOTED})|(?P<command>{_COMMAND})|{_FLAG}(?: {_FLAG})*)"
"""Flags and commands in a message. Quoted text may come from a log, so it is matched to be left alone."""
_FUNCTION = rf"tito-audit (?P<name>inspect|scan) (?P<log>'[^']*'|[^\s-]\S*)(?: {_FLAG})*"
"""A command that a function of the package replaces."""
_PART = rf"(?<!\S)--?(?P<flag>[a-z-]+)(?: (?P<value>{_VALUE}))?"
_HEAD = rf"\A--(?P<flag>{'|'.join(_CLASS_OF)}) (?P<value>[^\n:,]+): "
"""The beginning of a message about one value: `--on some key: there is no such column`."""


class _RunningCommands:
    running = 0
    """How many commands run in this process; they may nest in tests."""


@contextmanager
def messages_name_flags() -> Iterator[None]:
    """Inside this block messages name flags, for users of the command line."""
    _RunningCommands.running += 1
    try:
        yield
    finally:
        _RunningCommands.running -= 1


def for_reader(message: str) -> str:
    """The message in its reader's terms: flags in a command, arguments of Python elsewhere."""
    return message if _RunningCommands.running else with_python_arguments(message)


def with_python_arguments(message: str) -> str:
    """The message with arguments for flags: `pass -t DIR` becomes `pass Settings(tokenizer="DIR")`."""
    head = re.match(_HEAD, message)
    begin = f"{_constructor_calls([(head['flag'], head['value'])])}: " if head else ""
    return begin + re.sub(_MENTION, _replace_mention, message[head.end() if head else 0 :])


def _replace_mention(mention: re.Match[str]) -> str:
    if mention["quoted"] is not None:
        return mention["quoted"]
    command = mention["command"]
    parts = [(part["flag"], part["value"]) for part in re.finditer(_PART, command or mention[0])]
    if command is None:
        return _constructor_calls(parts)
    if command.startswith("repair "):
        return f"repair_rollouts(…, repairs={_constructor_calls(parts)})"
    function = re.fullmatch(_FUNCTION, command)
    if function is None:
        return str(command).replace("'<rows>'", "LOG")  # no command reads rows in memory
    log = function["log"].strip("'")
    log = "rows" if log == "<rows>" else log if log in ("LOG", "…") else _literal(log)
    return f"{function['name']}_rollouts({', '.join(filter(None, (log, _constructor_calls(parts))))})"


def _constructor_calls(parts: list[tuple[str, str | None]]) -> str:
    """`Settings(tokenizer="DIR", template_args={"enable_thinking": False})` for flags with their values."""
    arguments: dict[str, dict[str, Any]] = {}
    for flag, value in parts:
        of_class = arguments.setdefault(_CLASS_OF.get(flag, "Settings"), {})
        name = _NAMES.get(flag, flag.replace("-", "_"))
        if flag in _SWITCHES:
            of_class[name.removeprefix("no_")] = repr(not flag.startswith("no-"))
        elif value is None or flag in ("max-rate", "require"):
            of_class.setdefault(name, "…")
        elif flag in _PAIRS:
            key, equals, text = value.strip("'").partition("=")
            of_class.setdefault(name, {})[key] = _literal(text, as_json=flag == "template-arg") if equals else "…"
        elif flag in _LISTS:
            of_class[name] = (*of_class.get(name, ()), *map(_literal, value.strip("'").split(",")))
        else:
            of_class[name] = _literal(value.strip("'"))
    calls = []
    for class_name, passed in arguments.items():
        written = []
        for name, value in passed.items():  # a dict for pairs, a tuple for several values, code as it is
            if isinstance(value, dict):
                pairs = ", ".join(f"{_literal(key)}: {text}" for key, text in value.items())
                value = f"{{{pairs}}}"
            elif isinstance(value, tuple):
                value = f"({', '.join(value)}{',' * (len(value) < 2)})"
            written.append(f"{name}={value}")
        calls.append(f"{class_name}({', '.join(written)})")
    return ", ".join(calls)


def _literal(text: str, *, as_json: bool = False) -> str:
    """A flag's value as a Python literal; `as_json` reads it as JSON, so that `false` is False."""
    if not text or text == "…":
        return "…"
    if as_json or re.fullmatch(r"[+-]?[0-9]+(?:\.[0-9]+)?", text):
        try:
            return repr(json.loads(text.removeprefix("+")))
        except ValueError:
            pass
    return json.dumps(text, ensure_ascii=False)
