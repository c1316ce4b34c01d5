"""A plain web server of a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tests.remote.server import Server, file_answer


class WebServer(Server):
    """Serves the files below a folder, with ranges unless told not to."""

    def __init__(self, folder: Path, *, ranges: bool = True) -> None:
        super().__init__("tests.remote.web:application", folder, "ranges" if ranges else "whole")


def application(folder: str, how: str) -> Callable[..., Iterable[bytes]]:
    """The WSGI application."""
    root = Path(folder)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        file = root / environ["PATH_INFO"].lstrip("/")
        if not file.is_file():
            start("404 Not Found", [("Content-Length", "0")])
            return []
        about = file.stat()
        etag = hashlib.sha256(f"{about.st_size}-{about.st_mtime_ns}".encode()).hexdigest()[:16]
        headers = [("ETag", f'"{etag}"'), ("Last-Modified", formatdate(about.st_mtime, usegmt=True))]
        if how != "whole":
            return file_answer(environ, start, file, headers)
        environ.pop("HTTP_RANGE", None)
        return file_answer(environ, start, file, [*headers, ("Accept-Ranges", "none")])

    return answer
