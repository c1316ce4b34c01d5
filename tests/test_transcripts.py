"""Commands as their users see them: a line, what it prints, how it exits, and which files it writes.

`tests/transcripts/*.txt` hold scenes. A scene has a title, `# …`, and works in a folder of its own with the logs
of `tests/transcripts/logs` and a link to `fixtures`; `// …` is a remark:

    + name                  a file to write first, its lines indented by two
    + name < log            a file with the content of one in `tests/transcripts/stored`
    + name = 3*clean broken a log of rows of `tests/transcripts/stored/rows.jsonl`, by their names
    $ tito-audit …          a command; variables may stand before it
    $ cat name              a file to show
    $ cd name               a folder to go on in
    $ mv name name          a file to move; `$ rm name`, one to remove

Beneath a command stands, indented by two, what it prints, with `! ` before a line of stderr; then `[1]` for an
exit code other than 0, and `> name` for a file that it wrote, `< name` for one that it removed. For a time stands
`0.00 s`, for the folder `$HERE`, for the version `$VERSION`, for the address of a server with the toy tokenizer
`$SERVER`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.command import run
from tests.prompt_server import running
from tests.world import ROOT, json_lines, lines_of
from tito_audit.version import VERSION

PLAYS = sorted((ROOT / "tests" / "transcripts").glob("*.txt"))
LOGS = ROOT / "tests" / "transcripts" / "logs"
STORED = ROOT / "tests" / "transcripts" / "stored"
ROWS = {entry["name"]: entry["row"] for entry in lines_of(STORED / "rows.jsonl")}
CLOCKS = re.compile(r"\b[0-9.]+ s\b(, [0-9,]+ tokens/s)?")


def scenes(play: Path) -> list[str]:
    return re.split(r"\n(?=# )", play.read_text(encoding="utf-8").rstrip("\n"))


def indented(text: str, before: str = "  ") -> list[str]:
    return [(before + line).rstrip() for line in text.splitlines()]


def files_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def log_of(names: str) -> bytes:
    """A log of these rows; one that has an id has that of its name and place."""
    named: list[str] = []
    for word in names.split():
        times, _, name = word.rpartition("*")
        named += [name] * int(times or 1)
    rows = [ROWS[name] | ({"id": f"{name}{n}"} if "id" in ROWS[name] else {}) for n, name in enumerate(named)]
    return json_lines(rows)


def performed(line: str, folder: Path, server: str) -> list[str]:
    """The lines beneath a command, once it has run."""
    words = shlex.split(line.replace("$SERVER", server or "$SERVER"))
    if words[0] == "cat":
        return indented(Path(words[1]).read_text(encoding="utf-8").replace(VERSION, "$VERSION"))
    if words[0] == "cd":
        os.chdir(folder / words[1])
        return []
    if words[0] in ("mv", "rm"):
        Path(words[1]).rename(words[2]) if words[0] == "mv" else Path(words[1]).unlink()
        return []
    env: dict[str, str | None] = {"COLUMNS": "100", "NO_COLOR": None, "FORCE_COLOR": None}
    while "=" in words[0]:
        name, _, env[name] = words.pop(0).partition("=")
    assert words[0] == "tito-audit", line
    before = files_in(folder)
    code, out, err = run(*words[1:], env=env)
    after = files_in(folder)
    out, err = (CLOCKS.sub("0.00 s", text.replace(str(folder), "$HERE")) for text in (out, err))
    out, err = (text.replace(server, "$SERVER") if server else text for text in (out, err))
    lines = indented(out) + indented(err, "  ! ") + [f"[{code}]"] * bool(code)
    lines += [f"> {name}" for name in after if after[name] != before.get(name)]
    return lines + [f"< {name}" for name in before if name not in after]


def played(scene: str, folder: Path) -> str:
    """The scene with what its commands do today."""
    if "$SERVER" not in scene:
        return acted(scene, folder)
    with running() as server:
        return acted(scene, folder, server.url)


def acted(scene: str, folder: Path, server: str = "") -> str:
    """The same, with a server at this address if it needs one."""
    lines: list[str] = []
    script = iter([*scene.split("\n"), ""])
    line = next(script)
    for following in script:
        if line.startswith("+ "):
            lines.append(line)
            content = []
            while following.startswith("  "):
                content.append(following[2:])
                following = next(script)
            name, kind, source = re.fullmatch(r"(.+?)(?: ([<=]) (.*))?", line[2:]).groups()
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{row}\n" for row in content).encode()
            if kind:
                text = log_of(source) if kind == "=" else (STORED / source).read_bytes()
            file.write_bytes(text)
            lines += [f"  {row}" for row in content]
        elif line.startswith("$ "):
            lines += [line, *performed(line[2:], folder, server)]
        elif line.startswith(("# ", "// ")):
            lines.append(line)
        line = following
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("play", "scene"),
    [
        pytest.param(play, scene, id=f"{play.stem}: {scene.partition(chr(10))[0][2:]}")
        for play in PLAYS
        for scene in scenes(play)
    ],
)
def test_a_scene_goes_as_it_is_written(
    play: Path, scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(LOGS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    today = played(scene, tmp_path)
    if os.environ.get("UPDATE_GOLDENS"):
        text = play.read_text(encoding="utf-8")
        play.write_text(text.replace(scene.rstrip("\n"), today.rstrip("\n"), 1), encoding="utf-8")
        return
    expected = scene.rstrip("\n").splitlines()
    assert today.rstrip("\n").splitlines() == expected, (
        "UPDATE_GOLDENS=1 pytest tests/test_transcripts.py renews it"
    )
