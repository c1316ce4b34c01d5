"""An attack: a command line and the files that it is run on, made of a seed and a number and of nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["IN", "OUT", "ROOT_WORD", "Attack", "Mutant"]

IN, OUT, ROOT_WORD = "{in}", "{out}", "{root}"
"""What stands in the words of a command for the folder of the files, the folder of outputs, and the repository."""


@dataclass(frozen=True)
class Mutant:
    """A mutated log.

    name      the name of its file, with the suffix
    data      its bytes
    made      what was done to it, for people
    seconds   time that it may take over the usual limit, where it is large
    """

    name: str
    data: bytes
    made: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Attack:
    """One run of the command.

    words     the command line without the program; `{in}`, `{out}` and `{root}` stand for folders
    files     paths below `{in}`, and their bytes
    made      what was done to the files, for people
    ours      whether every file is made from fixtures of this repository, and so may be kept in it
    process   whether it runs as a process of its own
    seconds   time that it may take over the usual limit
    stdin     what the command reads from its standard input
    """

    words: tuple[str, ...]
    files: dict[str, bytes]
    made: str = ""
    ours: bool = True
    process: bool = False
    seconds: float = 0.0
    stdin: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command that is run: scan, repair and so on."""
        return self.words[0]

    def with_files(self, files: dict[str, bytes]) -> Attack:
        """The same run over other files."""
        return replace(self, files=files)


def dice(seed: int, number: int) -> random.Random:
    """The source of every choice of one mutant."""
    return random.Random(f"{seed}:{number}")
