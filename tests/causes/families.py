"""Tokenizers and chat templates read with `tokenizers` and jinja2 alone; no code of the audit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from tests.tables import stored

SHARED = Path(__file__).resolve().parents[3] / "shared"
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class Marks:
    """How a family writes what stands around messages."""

    end: str
    opener: str
    """The generation prompt."""
    other_end: str | None = None
    pad: str | None = None
    bos: str | None = None
    trims: bool = False
    """Whether the template trims contents."""
    tools: bool = False
    """Whether the template writes tools and tool calls."""
    default_system: bool = False


MARKS = {name: Marks(**marks) for name, marks in stored("causes", "MARKS").items()}


class Family:
    """One tokenizer with its template."""

    def __init__(self, name: str) -> None:
        self.name, self.marks = name, MARKS[name]
        self.folder = SHARED / "tokenizers" / name
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._content = json.loads((self.folder / "tokenizer.json").read_text())
        config = json.loads((self.folder / "tokenizer_config.json").read_text())
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )

        def refuse(message: str) -> None:
            raise ValueError(message)

        environment.globals["raise_exception"] = refuse
        self._template = environment.from_string(config["chat_template"])
        bos = config.get("bos_token") or ""
        self._bos = bos["content"] if isinstance(bos, dict) else bos

    def write(self, messages: Messages, tools: Tools | None = None, *, opened: bool = False) -> str:
        """What the template writes; arguments of calls are given as objects."""
        return str(
            self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=opened, bos_token=self._bos
            )
        )

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str) -> list[int]:
        """The tokens of a text in which no control token is read."""
        out: list[int] = []
        for piece in self._cut_apart(text):
            out += self.ids(piece)
        return out

    def _cut_apart(self, text: str) -> list[str]:
        for mark in sorted(self.added, key=len, reverse=True):
            at = text.find(mark)
            if at >= 0 and len(mark) > 2:
                half = at + 1
                return [*self._cut_apart(text[:half]), *self._cut_apart(text[half:])]
        return [text] if text else []

    def id_of(self, text: str) -> int:
        """The id of one token that reads so."""
        token = self.tokenizer.token_to_id(text)
        assert token is not None, (self.name, text)
        return int(token)

    def has(self, text: str) -> bool:
        """Whether the vocabulary has this token."""
        return self.tokenizer.token_to_id(text) is not None

    @cached_property
    def added(self) -> dict[str, int]:
        """The added tokens."""
        return {entry["content"]: entry["id"] for entry in self._content["added_tokens"]}

    @cached_property
    def composes(self) -> bool:
        """Whether the tokenizer applies NFC."""
        return "NFC" in json.dumps(self._content.get("normalizer"))

    @cached_property
    def _spelled(self) -> dict[int, int] | None:
        """What turns the characters that stand for bytes into those bytes as Latin-1, and others into none."""
        if "ByteLevel" not in json.dumps(self._content["decoder"]):
            return None
        own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        rest = [byte for byte in range(256) if byte not in own]
        return dict.fromkeys(rest, 0xFFFF) | {256 + at: byte for at, byte in enumerate(rest)}

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        data_of: dict[int, bytes] = {}
        special = set(self.added.values())
        for piece, token in self.tokenizer.get_vocab(with_added_tokens=False).items():
            if token in special:
                continue
            if self._spelled is not None:
                data_of[token] = piece.translate(self._spelled).encode("latin-1")
            elif len(piece) == 6 and piece.startswith("<0x"):
                data_of[token] = bytes([int(piece[3:5], 16)])
            else:
                data_of[token] = piece.replace("▁", " ").encode()
        return data_of

    def data(self, token: int) -> bytes | None:
        """The bytes of an ordinary token; None for an added one."""
        return self._bytes.get(token)

    @cached_property
    def of_bytes(self) -> dict[bytes, int]:
        """The ordinary token of these bytes; of several, one that is no single-byte fallback."""
        return {data: token for token, data in sorted(self._bytes.items())}


@cache
def family(name: str) -> Family:
    """A family, loaded once."""
    return Family(name)
