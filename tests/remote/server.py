"""A server in a process of its own: what it was asked, what it sent, and how it should fail."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

_CONTROL = "/-control/"
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request that a server answered."""

    method: str
    path: str
    query: str
    range: str
    """Its Range header; "" if there was none."""
    status: int
    sent: int
    """Bytes of body that were sent."""
    headers: Mapping[str, str]
    """What the client said, names in lower case."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with the requests that match."""

    match: str = ""
    """A regular expression found in `METHOD PATH?QUERY`."""
    skip: int = 0
    """How many matching requests are answered well first."""
    times: int = 1
    """How many then fail; -1: all."""
    status: int = 0
    """Answer with this status and `body`; 0: answer as always."""
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    """Added to the answer, in place of those with the same names."""
    drop: int = -1
    """Close the connection after so many bytes of the body; -1: never."""
    stall: float = 0.0
    """Wait so many seconds before the answer."""


class Server:
    """A running server; a context manager that ends it."""

    def __init__(self, application: str, *arguments: object) -> None:
        """`application`: `module:function`, which makes a WSGI application of the arguments, all text."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.server", application, *map(str, arguments)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{application}: the server ended at once")
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}"

    def requests(self, match: str = "") -> list[Request]:
        """The requests so far, in the order of their answers, whose `METHOD PATH?QUERY` matches."""
        requests = [Request(**entry) for entry in json.loads(self._control("requests"))]
        lines = [f"{request.method} {request.path}?{request.query}" for request in requests]
        return [request for request, line in zip(requests, lines, strict=True) if re.search(match, line)]

    def sent(self, match: str = "") -> int:
        """Bytes of all bodies sent so far to requests that match."""
        return sum(request.sent for request in self.requests(match))

    def forget(self) -> None:
        """Forget all requests and faults."""
        self._control("forget")

    def fail(self, *faults: Fault) -> None:
        """Let requests fail from now on; of several faults that match, the first with failures left decides."""
        self._control("fail", [vars(fault) for fault in faults])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def _control(self, what: str, payload: object = None) -> bytes:
        data = json.dumps(payload).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + _CONTROL + what, data=data, timeout=60) as answer:
            body: bytes = answer.read()
        return body


class Recorder:
    """A WSGI application around another that writes down requests and makes some of them fail."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._faults: list[tuple[Fault, list[int]]] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """The answer of the application, or a failure."""
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path.startswith(_CONTROL):
            payload = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = self._controlled(path.removeprefix(_CONTROL), json.loads(payload or b"null"))
            start("200 OK", [("Content-Length", str(len(body)))])
            return [body]
        fault = self._fault(f"{environ['REQUEST_METHOD']} {path}?{query}")
        if fault is not None and fault.stall:
            time.sleep(fault.stall)
        return self._answered(environ, start, fault)

    def _answered(
        self, environ: dict[str, Any], start: Callable[..., Any], fault: Fault | None
    ) -> Iterator[bytes]:
        status, sent = 0, 0

        def started(line: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            nonlocal status
            if fault is not None:
                names = {name.lower() for name, _ in fault.headers}
                headers = [pair for pair in headers if pair[0].lower() not in names]
                headers += [(name, value) for name, value in fault.headers if value]
            status = int(line.split()[0])
            return start(line, headers, *more)

        if fault is not None and fault.status:
            body = fault.body.encode()
            started(f"{fault.status} Fault", [("Content-Length", str(len(body)))])
            answer: Iterable[bytes] = [body]
        else:
            answer = self._application(environ, started)
        try:
            for block in answer:
                room = fault.drop - sent if fault is not None and fault.drop >= 0 else len(block)
                sent += min(len(block), room)
                yield block[:room]
                if room < len(block):
                    # After what was written has left: a closed socket would throw it away.
                    environ["werkzeug.socket"].shutdown(socket.SHUT_WR)
                    break
        finally:
            if hasattr(answer, "close"):
                answer.close()
            self._keep(environ, status, sent)

    def _keep(self, environ: dict[str, Any], status: int, sent: int) -> None:
        headers = {
            name[5:].lower().replace("_", "-"): value for name, value in environ.items() if name[:5] == "HTTP_"
        }
        about = (environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
        with self._lock:
            self._requests.append(Request(*about, headers.get("range", ""), status, sent, headers))

    def _controlled(self, what: str, payload: Any) -> bytes:
        with self._lock:
            if what == "requests":
                return json.dumps([vars(request) for request in self._requests]).encode()
            if what == "forget":
                self._requests, self._faults = [], []
            if what == "fail":
                names = {field.name for field in fields(Fault)}
                faults = ({name: entry[name] for name in names & entry.keys()} for entry in payload)
                self._faults = [(Fault(**values), [0]) for values in faults]
        return b"{}"

    def _fault(self, request_line: str) -> Fault | None:
        with self._lock:
            for fault, seen in self._faults:
                if not re.search(fault.match, request_line):
                    continue
                seen[0] += 1
                if seen[0] > fault.skip and (fault.times < 0 or seen[0] <= fault.skip + fault.times):
                    return fault
        return None


def file_answer(
    environ: Mapping[str, Any], start: Callable[..., Any], file: Path, headers: Iterable[tuple[str, str]] = ()
) -> Iterator[bytes]:
    """The bytes of a file, or the range of them that was asked for."""
    size = file.stat().st_size
    first, end, status = 0, size, "200 OK"
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", environ.get("HTTP_RANGE", ""))
    answer_headers = [("Accept-Ranges", "bytes"), *headers]
    if wanted is not None and any(wanted.groups()):
        low, high = wanted.groups()
        first = int(low) if low else max(size - int(high), 0)
        end = min(int(high) + 1, size) if low and high else size
        if first >= size:
            answer_headers += [("Content-Range", f"bytes */{size}"), ("Content-Length", "0")]
            start("416 Range Not Satisfiable", answer_headers)
            return
        status = "206 Partial Content"
        answer_headers.append(("Content-Range", f"bytes {first}-{end - 1}/{size}"))
    start(status, [*answer_headers, ("Content-Length", str(end - first))])
    if environ["REQUEST_METHOD"] == "HEAD":
        return
    with file.open("rb") as opened:
        opened.seek(first)
        while first < end and (block := opened.read(min(_BLOCK, end - first))):
            first += len(block)
            yield block


def json_answer(
    start: Callable[..., Any], value: object, status: str = "200 OK", headers: Iterable[tuple[str, str]] = ()
) -> Iterable[bytes]:
    """A value as JSON."""
    data = json.dumps(value).encode()
    start(status, [("Content-Type", "application/json"), ("Content-Length", str(len(data))), *headers])
    return [data]


def _serve() -> None:
    """Serve until killed; the port is the first line on standard output."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    module, name = sys.argv[1].split(":")
    application = getattr(importlib.import_module(module), name)(*sys.argv[2:])
    server = make_server("127.0.0.1", 0, Recorder(application), threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
