"""What all tests share: nothing that a run keeps on disk reaches another, or the cache of whoever runs them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import tests.tiers  # noqa: F401  (sets how many examples hypothesis tries)

os.environ["TITO_AUDIT_CACHE"] = "off"
os.environ.pop("COLUMNS", None)  # processes of pytest-xdist state a width; without one pages have 100 columns

# A shell starts what runs in the background deaf to Ctrl-C, and so would be each process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """For all tests of a module: the same tokenizer and template are loaded once, whatever asks for them."""
    from tests.command import loading_once  # after what is set above

    with loading_once():
        yield
