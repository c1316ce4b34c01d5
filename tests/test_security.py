"""SECURITY.md is true: the tests that it names exist, its dependencies are ours, and no data is loaded as code."""

from __future__ import annotations

import ast
import base64
import importlib
import io
import pickle
import re
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import run
from tests.tables import table
from tests.world import ROOT
from tito_audit.errors import StorageError
from tito_audit.storage import open_log
from tito_audit.storage.remote import remote_file
from tools.audit import said_of

LOADS_ANEW = True

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
OWN_PICKLES = {
    "join/_call_rows.py": "rows in a temporary file without a name",
    "run/ray_tasks.py": "work and answers of this run, from its own cluster",
    "run/tasks.py": "answers of this run's own processes",
    "run/workers.py": "work and answers of this run's own processes",
    "storage/in_memory.py": "rows in a temporary file without a name",
    "storage/spool.py": "rows in a temporary file without a name",
}
"""Modules that load pickles, and whose."""
LOADED_BY_NAME = {"__init__.py", "cli/_command.py", "registry.py", "tables/display.py", "storage/_store.py"}
"""Modules that import others by a name that is not written where they do."""
CODE = {"eval", "exec", "compile", "__import__", "input"}
ATTRIBUTES = {
    *("os.system", "os.popen", "marshal.load", "marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load"),
    *("code.interact", "runpy.run_path", "runpy.run_module", "pickle.Unpickler", "numpy.fromfile"),
}
MODULES = {"cloudpickle", "dill", "joblib", "shelve", "jsonpickle", "yaml"}
SEEN = re.compile(rf"\b(?:{'|'.join(sorted(CODE))}|system|popen|(?<!json\.)loads?|interact|run_path|run_module)\(")
"""What a file that is worth a closer look holds; so are imports of these modules, shells and import_module."""
ALSO = re.compile(rf"{'|'.join(sorted(MODULES))}|shell|import_module|Unpickler|fromfile")


def literal(node: ast.Call, name: str) -> Any:
    """The literal value of a keyword of a call; None without one."""
    values = (keyword.value for keyword in node.keywords if keyword.arg == name)
    return next((value.value for value in values if hasattr(value, "value")), None)


def dangers(path: Path) -> Iterator[str]:
    """What a module calls or imports that could run code of the data it reads."""
    name, text = str(path.relative_to(ROOT / "tito_audit")), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if SEEN.search(text) or ALSO.search(text) else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            parts = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            yield from (f"{name} imports {part}" for part in parts if part.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if called in CODE or called in ATTRIBUTES:
            yield f"{name}:{node.lineno} calls {called}"
        elif called in ("pickle.loads", "pickle.load") and name not in OWN_PICKLES:
            yield f"{name}:{node.lineno} loads a pickle"
        elif called == "torch.load" and literal(node, "weights_only") is not True:
            yield f"{name}:{node.lineno} loads a Torch file without weights_only"
        elif called in ("np.load", "numpy.load") and literal(node, "allow_pickle") is not False:
            yield f"{name}:{node.lineno} loads numpy files without allow_pickle=False"
        elif literal(node, "shell"):
            yield f"{name}:{node.lineno} calls {called} in a shell"
        elif last == "import_module" and not isinstance(node.args[0], ast.Constant) and name not in LOADED_BY_NAME:
            yield f"{name}:{node.lineno} imports a module by a name that it computes"


def test_no_module_loads_code_from_data() -> None:
    assert [danger for path in (ROOT / "tito_audit").rglob("*.py") for danger in dangers(path)] == []


@pytest.mark.parametrize(
    "line",
    ["eval(text)", "pickle.loads(data)", "import yaml", "torch.load(f)", "np.load(f)", "run(words, shell=True)"],
)
def test_a_danger_is_noticed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "tito_audit").mkdir()
    (tmp_path / "tito_audit" / "one.py").write_text(line, encoding="utf-8")
    assert len(list(dangers(tmp_path / "tito_audit" / "one.py"))) == 1


class Hostile:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def hostile_files(folder: Path, place: Path) -> Iterator[Path]:
    """Files that run code in readers that are not careful."""
    data = pickle.dumps(Hostile(place))
    for name in ("rows.pkl", "rows.jsonl"):
        (folder / name).write_bytes(data)
        yield folder / name
    with zipfile.ZipFile(folder / "rows.pt", "w") as torch:
        torch.writestr("archive/data.pkl", pickle.dumps({"samples": [Hostile(place)]}, 2))
        torch.writestr("archive/version", "3\n")
    yield folder / "rows.pt"
    objects = np.array([Hostile(place)], dtype=object)
    np.save(folder / "rows.npy", objects, allow_pickle=True)
    np.savez(folder / "rows.npz", token_ids=objects)
    yield from (folder / "rows.npy", folder / "rows.npz")
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": data}
    field = pa.field("token_ids", pa.list_(pa.int64()), metadata=extension)
    table = pa.table([pa.array([[1, 2], [3]])], schema=pa.schema([field]))
    pq.write_table(table, folder / "rows.parquet")
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as arrow:
        arrow.write_table(table)
    yield from (folder / "rows.parquet", folder / "rows.arrow")
    line = b'{"token_ids": [1], "a": "' + base64.b64encode(data) + b'", "__reduce__": ["os.system", ["true"]]}\n'
    (folder / "rows.ndjson").write_bytes(line)
    yield folder / "rows.ndjson"


def test_a_scan_of_hostile_files_runs_no_code(tmp_path: Path) -> None:
    place = tmp_path / "code-ran"
    pickle.loads(pickle.dumps(Hostile(place)))
    assert place.exists(), "the trap works"
    place.unlink()
    for file in hostile_files(tmp_path, place):
        others = (("inspect", file), ("repair", file, "--dry-run")) if file.suffix in (".pt", ".parquet") else ()
        for command in (("scan", file), *others):
            code, _, err = run(*command)
            assert code in (0, 1, 2), (file, err)
            assert "Traceback" not in err
            assert not place.exists(), f"{command[0]} ran the code of {file.name}"


@pytest.mark.parametrize(
    ("version", "safe"), [("2.9.1+cpu", False), ("1.13", False), ("?", False), ("2.10.0", True)]
)
def test_a_torch_with_a_known_hole_is_refused(
    version: str, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "rows.pt", "w") as torch:
        torch.writestr("archive/data.pkl", pickle.dumps({"samples": []}, 2))
    opened = []
    serialization = SimpleNamespace(safe_globals=lambda types: io.BytesIO())
    fake = SimpleNamespace(__version__=version, serialization=serialization, load=lambda *a, **k: opened.append(k))
    others = importlib.import_module
    monkeypatch.setattr("importlib.import_module", lambda name: fake if name == "torch" else others(name))
    with pytest.raises(StorageError) as refused:
        list(open_log(tmp_path / "rows.pt"))
    assert ("CVE-2026-24747" not in str(refused.value)) == safe
    assert not opened or safe


def test_credentials_do_not_follow_a_redirect_to_another_host(tmp_path: Path) -> None:
    seen: list[str | None] = []

    class Second(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"{}\n")

        def log_message(self, *_: object) -> None:
            pass

    class First(Second):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{second.server_port}/rows.jsonl")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Second) as second,
        ThreadingHTTPServer(("127.0.0.1", 0), First) as first,
    ):
        for server in (first, second):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        remote_file(f"http://user:secret@127.0.0.1:{first.server_port}/rows.jsonl").stat()
        for server in (first, second):
            server.shutdown()
    assert seen[0] is not None
    assert seen[0].startswith("Basic ")
    assert set(seen[1::2]) == {None}


def test_the_tests_that_the_page_names_exist() -> None:
    there = {
        name
        for path in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 25
    assert named <= there, named - there


def test_the_page_names_every_dependency_and_its_bounds_are_kept() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"]]
    needed += [bound for name, listed in extras.items() if name not in ("dev", "docs") for bound in listed]
    named = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in needed} - {"tito-audit"}
    listed = PAGE.partition("## Dependencies")[2]
    rows = [line for line in listed.splitlines() if line.startswith("| `")]
    shown = {name for line in rows for name in re.findall(r"`([\w.-]+)`", line.split("|")[1])}
    assert shown == named
    for requirement in (*needed, *extras["dev"], *extras["docs"]):
        bound = requirement.partition(";")[0]
        if not bound.startswith(("tito-audit", "readme_renderer")):
            assert "==" in bound or ("<" in bound and ">=" in bound), f"{requirement} is not bounded"
    lowest = {re.split(r"[\[<>=]", requirement)[0]: requirement for requirement in needed}
    for name, least in (("jinja2", "3.1.6"), ("orjson", "3.11.6"), ("aiohttp", "3.13.4"), ("torch", "2.10")):
        assert f">={least}," in lowest[name]
        assert least in listed


@pytest.mark.parametrize(*table(__file__, "an_audit_of_nothing_is_never_clean"))
def test_an_audit_of_nothing_is_never_clean(answer: str, code: int, words: str) -> None:
    lines, ended = said_of(answer, "pypi")
    assert (-1 if ended is None else ended, words in lines[0]) == (code, True)
