"""A worker whose command has a fault for each kind of failure, chosen by the name of the log."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.torture import worker
from tito_audit import cli

__all__ = ["FAULTS"]

_real = cli.main
_held: list[bytes] = []


def _log() -> Path:
    return Path(next(word for word in sys.argv[2:] if "/in/" in word))


def _traceback() -> None:
    raise KeyError("planted")


def _hang() -> None:
    time.sleep(60)


def _memory() -> None:
    _held.append(b"x" * (300 << 20))  # a fresh virtual machine takes 3 s for each GB that it touches first
    _held.clear()


def _died() -> None:
    os.abort()


def _input_changed() -> None:
    data = _log().read_bytes()
    _real_of()
    _log().write_bytes(data[:-1])


def _real_of() -> None:
    """The command as it is."""
    with suppress(SystemExit):
        _real()


def _exit() -> None:
    sys.exit(7)


def _silent() -> None:
    sys.exit(2)


def _warning() -> None:
    warnings.warn_explicit("planted", RuntimeWarning, str(Path(cli.__file__)), 1)
    _real_of()


def _below_python() -> None:
    """A warning that no code of Python prints."""
    os.write(2, b"some.c:12: RuntimeWarning: planted\n")
    _real_of()


def _control_character() -> None:
    print("planted \x1b[2J here")


def _report() -> None:
    print('{"rows": NaN}')


def _left_over() -> None:
    Path(os.environ["TMPDIR"], "planted").write_text("x")
    _real_of()


def _half() -> None:
    """A file of a run that says that it made none."""
    Path(sys.argv[sys.argv.index("-o") + 1]).write_text("{")
    print("tito-audit: planted, and nothing was written", file=sys.stderr)
    sys.exit(2)


def _changed() -> None:
    """A repair that changes a row that its report does not name."""
    _real_of()
    out = Path(sys.argv[sys.argv.index("-o") + 1])
    out.write_bytes(out.read_bytes().replace(b'"tokens"', b'"takens"'))


def _code_ran() -> None:
    Path("torture-trap").mkdir()
    _real_of()


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__[1:].replace("_", " "): fault
    for fault in (
        *(
            _traceback,
            _hang,
            _memory,
            _died,
            _input_changed,
            _exit,
            _silent,
            _warning,
            _control_character,
            _report,
        ),
        *(_left_over, _changed, _code_ran, _below_python, _half),
    )
}


def _main() -> None:
    stem = _log().name.partition(".")[0]
    try:
        FAULTS.get(stem, _real)()
    except Exception:
        import traceback

        traceback.print_exc()
        sys.exit(2)


if __name__ == "__main__":
    cli.main = _main
    worker.main()
