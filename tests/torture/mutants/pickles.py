"""Pickles and Torch files, which must never run what they hold: it would write the file that `TRAP` names."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from random import Random

from tests.torture.attack import Mutant
from tests.torture.mutants.bytes_ import damaged
from tests.torture.sources import Source

__all__ = ["MUTATORS", "TRAP"]

TRAP = "torture-trap"
"""The file that appears in the working folder if the code of a log runs."""


class _Trap:
    def __reduce__(self) -> object:
        return os.mkdir, (TRAP,)


def _pickle(dice: Random, source: Source) -> bytes:
    rows = source.rows(dice)
    value: object = dice.choice(
        (_Trap(), [_Trap()], {"samples": [_Trap()]}, {"samples": rows}, rows, (rows, _Trap()))
    )
    return pickle.dumps(value, protocol=dice.choice((0, 2, 4, 5)))


def _plain(dice: Random, source: Source) -> Mutant:
    suffix = dice.choice((".pkl", ".pickle", ".pt", ".jsonl", ".bin", ".parquet", ".json"))
    return Mutant(f"log{suffix}", _pickle(dice, source), f"a pickle of {source.name}")


def _archive(dice: Random, source: Source) -> Mutant:
    """A Torch file: a zip archive with a pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in (
            ("log/data.pkl", _pickle(dice, source)),
            ("log/byteorder", b"little"),
            ("log/data/0", dice.randbytes(64)),
            ("log/version", b"3\n"),
        ):
            if dice.random() < 0.9:
                archive.writestr(zipfile.ZipInfo(name), data)
    data = buffer.getvalue()
    broken = dice.random() < 0.5
    return Mutant("log.pt", damaged(dice, data) if broken else data, f"a Torch file of {source.name}")


def _opcodes(dice: Random, source: Source) -> Mutant:
    """A pickle of any opcodes."""
    data = b"\x80\x04" + bytes(dice.choice(pickle_codes()) for _ in range(dice.choice((3, 30, 300)))) + b"."
    return Mutant(dice.choice(("log.pt", "log.pkl")), data, "a pickle of any opcodes")


def pickle_codes() -> bytes:
    """Every opcode of pickles."""
    import pickletools

    return b"".join(opcode.code.encode("latin-1") for opcode in pickletools.opcodes)


MUTATORS = {_plain: 3, _archive: 3, _opcodes: 1}
