"""A hub that also has models, branches to list and commits: for tokenizers by revision, and for writing.

A model is kept as a data set of the same name would be, in the folder of the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.remote.hub import LARGE, TOKEN, HubServer
from tests.remote.hub import application as of_data_sets
from tests.remote.server import json_answer


class ModelHub(HubServer):
    """A hub of the models and data sets below a folder; `env` names it, `writer` holds a token that may write."""

    application = "tests.remote.model_hub:application"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writer = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN}

    def head(self, name: str, branch: str = "main") -> str:
        """The hash of the commit that a branch of a repository has now."""
        refs: dict[str, str] = json.loads((self.folder / name / "refs.json").read_text())
        return refs[branch]

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a branch, by name."""
        root = self.folder / name / self.head(name, branch)
        return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def application(folder: str) -> Callable[..., Iterable[bytes]]:
    """The WSGI application."""
    others, commits = of_data_sets(folder), _Commits(Path(folder))

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        address = environ["REQUEST_URI"].split("?")[0]
        parts = address.strip("/").split("/")
        refs = Path(folder).joinpath(*parts[2:4], "refs.json")
        if parts[:1] == ["api"] and parts[4:] == ["refs"] and refs.is_file():
            named = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                for name, commit in json.loads(refs.read_text()).items()
            ]
            return json_answer(start, {"branches": named, "tags": [], "converts": []})
        if environ["REQUEST_METHOD"] in ("POST", "PUT") and "paths-info" not in parts:
            return commits.answer(environ, start, parts)
        if parts[:2] == ["api", "models"]:
            address = address.replace("/api/models/", "/api/datasets/", 1)
        elif parts[2:3] == ["resolve"]:
            address = f"/datasets{address}"

        def started(line: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            # The CDN has another name: the client reads the headers of a hub's own answer only.
            renamed = [(name, value.replace("//127.0.0.1:", "//localhost:")) for name, value in headers]
            return start(line, renamed, *more)

        return others({**environ, "REQUEST_URI": address, "PATH_INFO": address}, started)

    return answer


class _Commits:
    """Uploads and commits to data sets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._large = folder / ".large"
        self._large.mkdir(parents=True, exist_ok=True)

    def answer(self, environ: dict[str, Any], start: Callable[..., Any], parts: list[str]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if parts[0] == "upload":
            if hashlib.sha256(body).hexdigest() != parts[1]:
                return json_answer(start, {"error": "another file"}, "400 Bad Request")
            (self._large / parts[1]).write_bytes(body)
            return json_answer(start, {})
        if environ.get("HTTP_AUTHORIZATION") != f"Bearer {TOKEN}":
            return json_answer(start, {"error": "You may not write"}, "403 Forbidden")
        if parts[-2:] == ["objects", "batch"]:
            objects = json.loads(body)["objects"]
            place = f"http://{environ['HTTP_HOST']}/upload"
            upload = [{**entry, "actions": {"upload": {"href": f"{place}/{entry['oid']}"}}} for entry in objects]
            return json_answer(start, {"transfer": "basic", "objects": upload})
        name, action, branch = "/".join(parts[2:4]), parts[4], parts[5]
        if action == "preupload":
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["size"] >= LARGE else "regular"}
                | {"shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return json_answer(start, {"files": modes})
        with self._lock:
            return self._commit(start, name, branch, [json.loads(line) for line in body.splitlines()])

    def _commit(
        self, start: Callable[..., Any], name: str, branch: str, entries: list[dict[str, Any]]
    ) -> Iterable[bytes]:
        folder = self._folder / name
        refs = json.loads((folder / "refs.json").read_text())
        parent = entries[0]["value"].get("parentCommit")
        if parent is not None and parent != refs[branch]:
            return json_answer(start, {"error": "A commit has happened since"}, "412 Precondition Failed")
        commit = hashlib.sha1(f"{name}/{len(list(folder.iterdir()))}".encode()).hexdigest()
        shutil.copytree(folder / refs[branch], folder / commit)
        for entry in entries[1:]:
            value = entry["value"]
            file = folder / commit / value["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            if entry["key"] == "lfsFile":
                shutil.copy(self._large / value["oid"], file)
            else:
                file.write_bytes(base64.b64decode(value["content"]))
        (folder / "refs.json").write_text(json.dumps({**refs, branch: commit}))
        address = f"/datasets/{name}/commit/{commit}"
        return json_answer(start, {"commitOid": commit, "commitUrl": address, "success": True})
