"""Store: where remote files are, in four operations; and the ways in which one can fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

TRIES = 5
"""How often a request that failed in passing is made, in all."""
PAUSE = 0.25
"""Seconds before the second try; twice as long before each further one."""
CONNECT_SECONDS = 10
READ_SECONDS = 30
"""How long a server may take to accept a connection, and to send the next bytes."""


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """What the store says of a file, under the names of `os.stat_result`."""

    st_size: int
    """Bytes."""
    st_mtime_ns: int = 0
    """When it was last written, in nanoseconds since 1970; 0 if the store does not say."""
    etag: str | None = None
    """Changes whenever the content does; None if the store does not say."""
    key: str = ""
    """How the store names exactly this version of the file."""
    ranges: bool = True
    """Whether the store sends parts of the file."""


class Refused(Exception):
    """The store refuses, in words for people: what it says and what to do. Caught within this room."""


class Missing(Refused):
    """There is no such file, folder, bucket or repository."""


class Changed(Refused):
    """The file is no longer what it was when the run began."""

    def __init__(self) -> None:
        super().__init__("the file was changed while it was read. Run again once nobody writes it.")


class Passing(Refused):
    """A failure that may be over when the request is made again."""

    after: float = 0.0
    """Seconds that the server asks to wait."""


def dropped() -> Passing:
    """The failure of a connection that was closed in the middle of an answer."""
    return Passing("the connection was dropped again and again. Look at the network and run again.")


class Store:
    """The files of one service. `url` is exactly what was asked for, a folder without a slash at its end.

    Every operation raises Refused with a reason free of secrets; Passing where another try may help.
    """

    def status(self, url: str) -> RemoteStatus:
        """What the store says of a file; Missing if there is none."""
        raise NotImplementedError

    def is_folder(self, url: str) -> bool:
        """Whether files are below this URL."""
        raise NotImplementedError

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """The URL and status of each file below a folder, at any depth."""
        raise NotImplementedError

    def entries(self, url: str) -> list[str]:
        """URLs of what is directly in a folder, the first thousand or so; for suggestions."""
        raise NotImplementedError

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes from `start` on, at most up to `stop`; fewer if the connection was dropped after some of them.

        Changed if the file is not the one that `status` describes.
        """
        raise NotImplementedError


def retried(operation: Callable[[], T]) -> T:
    """What the operation returns, tried again while it fails in passing; the last Passing after `TRIES` tries."""
    for tried in range(1, TRIES + 1):
        try:
            return operation()
        except Passing as failure:
            if tried == TRIES:
                raise
            wait(tried, failure)
    raise AssertionError


def wait(tried: int, failure: Passing) -> None:
    """Wait before the next try."""
    time.sleep(max(PAUSE * 2 ** (tried - 1), min(failure.after, READ_SECONDS)))
