"""A hub of data sets: the part of the Hugging Face hub's interface that reading needs.

A data set ORG/NAME is the folder `ORG/NAME/COMMIT/` with its files, and the file `ORG/NAME/refs.json` with the
commit of each branch. Large files are sent by another address, as the hub's CDN does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.remote.server import Server, file_answer, json_answer

TOKEN = "hf_a_token_of_tests"
"""What opens private data sets: those whose names begin with `private`."""
LARGE = 1 << 12
"""Files from this size on are on the CDN, and are uploaded apart, before the commit that names them."""
_PAGE = 1000


class HubServer(Server):
    """A hub of the data sets below a folder; `env` names it."""

    application = "tests.remote.hub:application"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(self.application, folder)
        self.env: Mapping[str, str | None] = {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": None,
            "HF_HUB_OFFLINE": None,
            "HF_HUB_DISABLE_XET": "1",
        }

    def commit(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files alone to a branch; returns its hash."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        refs = _refs(folder)
        commit = hashlib.sha1(f"{name}/{len(list(folder.iterdir()))}".encode()).hexdigest()
        for file, data in files.items():
            (folder / commit / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / commit / file).write_bytes(data)
        (folder / "refs.json").write_text(json.dumps({**refs, branch: commit}))
        return commit


def application(folder: str) -> Callable[..., Iterable[bytes]]:
    """The WSGI application."""
    return _Hub(Path(folder)).answer


class _Refused(Exception):
    """An answer that is an error: its status, the hub's code for it, and its words."""


class _Hub:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return self._answer(environ, start)
        except _Refused as refused:
            status, code, message = refused.args
            headers = [("X-Error-Code", code), ("X-Error-Message", message)]
            return json_answer(start, {"error": message}, status, headers)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # The path is decoded already; the raw one keeps the slashes that belong to a name.
        parts = environ["REQUEST_URI"].split("?")[0].strip("/").split("/")
        if parts[0] == "cdn":
            file = self._folder.joinpath(*map(unquote, parts[1:]))
            return file_answer(environ, start, file, [("ETag", f'"{_hash(file)}"')])
        if parts[:2] == ["api", "datasets"]:
            return self._about(environ, start, parts[2:])
        if parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            return self._file(environ, start, parts)
        raise _Refused("404 Not Found", "", "there is no such address")

    def _about(self, environ: dict[str, Any], start: Callable[..., Any], parts: list[str]) -> Iterable[bytes]:
        folder = self._repository(environ, "/".join(parts[:2]))
        action, revision = (parts[2], unquote(parts[3])) if len(parts) > 3 else ("revision", "main")
        commit = _commit(folder, revision)
        if action == "revision":
            about = {"id": "/".join(parts[:2]), "sha": commit, "private": False, "siblings": [], "tags": []}
            return json_answer(start, about)
        if action == "paths-info":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)).decode()
            paths = parse_qs(body).get("paths", []) if not body.startswith("{") else json.loads(body)["paths"]
            below = [folder / commit / path for path in paths]
            return json_answer(start, [_entry(path, folder / commit) for path in below if path.exists()])
        if action == "tree":
            return self._tree(environ, start, folder / commit, unquote("/".join(parts[4:])))
        raise _Refused("404 Not Found", "", "there is no such address")

    def _tree(self, environ: dict[str, Any], start: Callable[..., Any], root: Path, below: str) -> Iterable[bytes]:
        folder = root / below
        if not folder.is_dir():
            raise _Refused("404 Not Found", "EntryNotFound", f"{below} is no folder")
        query = parse_qs(environ.get("QUERY_STRING", ""))
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        paths = sorted(folder.rglob("*") if recursive else folder.iterdir())
        first = int(query.get("cursor", ["0"])[0])
        headers = []
        if first + _PAGE < len(paths):
            address = f"http://{environ['HTTP_HOST']}{environ['PATH_INFO']}"
            more = f"{address}?recursive={recursive}&cursor={first + _PAGE}"
            headers = [("Link", f'<{more}>; rel="next"')]
        return json_answer(start, [_entry(path, root) for path in paths[first : first + _PAGE]], headers=headers)

    def _file(self, environ: dict[str, Any], start: Callable[..., Any], parts: list[str]) -> Iterable[bytes]:
        folder = self._repository(environ, "/".join(parts[1:3]))
        commit = _commit(folder, unquote(parts[4]))
        path = "/".join(map(unquote, parts[5:]))
        file = folder / commit / path
        if not file.is_file():
            raise _Refused("404 Not Found", "EntryNotFound", f"{path} is not in the data set")
        size = file.stat().st_size
        headers = [("X-Repo-Commit", commit), ("ETag", f'"{_hash(file)}"')]
        if size < LARGE:
            return file_answer(environ, start, file, headers)
        place = (
            f"http://{environ['HTTP_HOST']}/cdn/{'/'.join(parts[1:3])}/{commit}/{'/'.join(parts[5:])}?sig=secret"
        )
        linked = [("X-Linked-Size", str(size)), ("X-Linked-Etag", f'"{_hash(file)}"'), ("Location", place)]
        start("302 Found", [*headers, *linked, ("Content-Length", "0")])
        return []

    def _repository(self, environ: dict[str, Any], name: str) -> Path:
        folder = self._folder / name
        token = environ.get("HTTP_AUTHORIZATION", "")
        if token and token != f"Bearer {TOKEN}":
            raise _Refused("401 Unauthorized", "", "Invalid credentials in Authorization header")
        if not (folder / "refs.json").is_file() or (name.split("/")[-1].startswith("private") and not token):
            raise _Refused("401 Unauthorized", "RepoNotFound", "Repository not found")
        if name.split("/")[-1].startswith("gated"):
            raise _Refused("403 Forbidden", "GatedRepo", f"Access to dataset {name} is restricted")
        return folder


def _refs(folder: Path) -> dict[str, str]:
    file = folder / "refs.json"
    refs: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    return refs


def _commit(folder: Path, revision: str) -> str:
    commit = _refs(folder).get(revision, revision)
    if not (folder / commit).is_dir():
        raise _Refused("404 Not Found", "RevisionNotFound", f"Invalid rev id: {revision}")
    return commit


def _entry(path: Path, root: Path) -> dict[str, Any]:
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
    size = path.stat().st_size
    entry: dict[str, Any] = {"type": "file", "oid": _hash(path), "size": size, "path": name}
    if size >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(path.read_bytes()).hexdigest(), "size": size, "pointerSize": 128}
    return entry


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
