"""What a runner of GitHub Actions does with the lines that a step prints, as its source says."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Command", "commands"]

NAMES = {
    "add-mask",
    "add-matcher",
    "add-path",
    "debug",
    "echo",
    "endgroup",
    "error",
    "group",
    "notice",
    "remove-matcher",
    "save-state",
    "set-env",
    "set-output",
    "stop-commands",
    "warning",
}


@dataclass(frozen=True)
class Command:
    """A command that a line gave."""

    name: str
    properties: dict[str, str]
    data: str


def commands(output: str) -> list[Command]:
    """Every command in what a step printed: `::name …::data` at the start of a line, `##[name …]data` anywhere."""
    lines = output.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [command for line in lines if (command := _at_start(line) or _anywhere(line)) is not None]


def _at_start(line: str) -> Command | None:
    line = line.lstrip()
    if not line.startswith("::"):
        return None
    head, between, data = line[2:].partition("::")
    name, _, properties = head.partition(" ")
    if not between or name.lower() not in NAMES:
        return None
    pairs = [pair.split("=", 1) for pair in properties.strip().split(",") if "=" in pair]
    return Command(name, {key: _unescaped(value, ":,") for key, value in pairs}, _unescaped(data, ""))


def _anywhere(line: str) -> Command | None:
    _, start, rest = line.partition("##[")
    head, end, data = rest.partition("]")
    name = head.partition(" ")[0]
    return Command(name, {}, data) if start and end and name.lower() in NAMES else None


def _unescaped(text: str, also: str) -> str:
    for char in "\r\n" + also + "%":
        text = text.replace(f"%{ord(char):02X}", char)
    return text
