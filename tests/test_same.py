"""The comparison of two checkouts: what it takes for a difference, what it masks, and its figures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.same.allow import allowed_from, is_allowed
from tests.same.cases import Case, rules_of
from tests.same.compare import Difference, Ran, Step, differences, snapshot
from tests.same.lines import circles, figures
from tests.same.mutate import Vocabulary, broken_lines, rows_of
from tests.same.runner import run

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe" / "tokenizer.json"


def ran(out: str = "", err: str = "", code: int = 0, **files: bytes) -> Ran:
    named = {name.replace("_", "."): data for name, data in files.items()}
    return Ran((Step("tito-audit scan log", code, out.encode(), err.encode()),), named)


def differing(old: Ran, new: Ran) -> list[Difference]:
    return list(differences(old, new))


def test_equal_runs_have_no_difference() -> None:
    same_run = ran("a\nb\n", "c", 1, out_jsonl=b"\xff\x00")
    assert differing(same_run, same_run) == []


@pytest.mark.parametrize(
    ("old", "new", "place", "lines"),
    [
        (ran(code=1), ran(code=2), "exit code", ("-1", "+2")),
        (ran("a\nb\nc\n"), ran("a\nB\nc\n"), "stdout", ("-b", "+B")),
        (ran("a\nc\n"), ran("a\nb\nc\n"), "stdout", ("+b",)),
        (ran("a\nb"), ran("a"), "stdout", ("-b",)),
        (ran("a\n"), ran("a"), "stdout", ("-",)),
        (ran(err="x"), ran(err="x "), "stderr", ("-x", "+x ")),
        (ran(out_bin=b"\xff\x00\x01"), ran(out_bin=b"\xff\x00\x02"), "out.bin", None),
        (ran(out_bin=b"\xff"), ran(), "out.bin", ("-file written", "+no file")),
        (ran(), ran(out_bin=b"\xff"), "out.bin", ("-no file", "+file written")),
    ],
)
def test_any_other_byte_is_a_difference(old: Ran, new: Ran, place: str, lines: tuple[str, ...] | None) -> None:
    (difference,) = differing(old, new)
    assert difference.place == place
    assert lines is None or difference.lines == lines


def test_a_long_line_is_cut_around_its_first_difference() -> None:
    (difference,) = differing(ran("x" * 5000 + "old" + "y" * 5000), ran("x" * 5000 + "new" + "y" * 5000))
    assert all(len(line) < 200 for line in difference.lines)
    assert "old" in difference.lines[0]
    assert "new" in difference.lines[1]


def test_seconds_are_masked_where_they_are_printed_and_nothing_else() -> None:
    head = "encoder tokenizers · {} s, {} tokens/s\n"
    assert differing(ran(head.format("1.2", "4,957")), ran(head.format("30", "12"))) == []
    assert differing(ran('{"seconds":1.5}'), ran('{"seconds":2e-05}')) == []
    assert differing(ran(report_json=b'{"seconds":1.5}'), ran(report_json=b'{"seconds":2}')) == []
    suites = '<testsuites name="a" tests="4" time="{}">\n  <testsuite name="b" time="0">'
    assert differing(ran(suites.format("0.850")), ran(suites.format("1.076"))) == []
    took = "<div><dt>took</dt><dd>{}</dd></div><div><dt>rows</dt><dd>{}</dd></div>"
    assert differing(ran(took.format("0.8 s", 3)), ran(took.format("1 min", 3))) == []
    assert len(differing(ran(took.format("0.8 s", 3)), ran(took.format("0.8 s", 4)))) == 1
    assert len(differing(ran(out_jsonl=b'{"seconds":1.5}'), ran(out_jsonl=b'{"seconds":2}'))) == 1
    assert len(differing(ran("1 error · 20 rows"), ran("1 error · 21 rows"))) == 1
    assert len(differing(ran("gave up after 10 s"), ran("gave up after 11 s"))) == 1


def test_of_a_crash_only_the_error_is_compared() -> None:
    crash = 'before\nTraceback (most recent call last):\n  File "{}", line {}, in f\n    x()\n    ^^^\n{}\nafter\n'
    crashed = ran(err=crash.format("/a/b.py", 3, "TypeError: no"))
    assert differing(crashed, ran(err=crash.format("/c/d.py", 14, "TypeError: no"))) == []
    (other,) = differing(crashed, ran(err=crash.format("/a/b.py", 3, "TypeError: yes")))
    assert other.lines == ("-TypeError: no", "+TypeError: yes")


def test_a_snapshot_holds_files_rights_and_links(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_bytes(b"1")
    (tmp_path / "inner" / "a").chmod(0o600)
    (tmp_path / "in").symlink_to("/nowhere")
    files = snapshot(tmp_path)
    assert files["inner/a"] == b"1"
    assert files["inner/a (rights)"] == b"0o600"
    assert files["in (link)"] == b"/nowhere"


def test_a_difference_is_allowed_once_all_its_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "allow.toml"
    path.write_text(
        "[[allow]]\ncommand = '^tito-audit scan'\n"
        "line = 'this is no baseline|not a baseline file'\nreason = 'plain'\n",
        encoding="utf-8",
    )
    entries = allowed_from(path)
    lines = ("-this is no baseline", "+not a baseline file")
    assert is_allowed(Difference("tito-audit scan log", "stderr", lines), entries)
    assert not is_allowed(Difference("tito-audit show log", "stderr", lines), entries)
    assert not is_allowed(Difference("tito-audit scan log", "stderr", (*lines, "+more")), entries)
    assert entries[0].met == 1


def test_what_is_allowed_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "allow.toml"
    path.write_text("[[allow]]\ncommand = ''\nline = ''\nreason = ' '\n", encoding="utf-8")
    with pytest.raises(ValueError, match="without a reason"):
        allowed_from(path)


def test_the_codes_are_read_from_the_list() -> None:
    assert rules_of("code    severity\nTOK101  error  one\nREC001  error  TOK102 named\n") == ["REC001", "TOK101"]


def checkout(folder: Path, says: str) -> Path:
    """A checkout with a tito_audit that says something, writes a file and ends with 3."""
    package = folder / "tito_audit"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    code = f"""
import sys, pathlib
pathlib.Path("out").write_text({says!r})
print({says!r}, *sys.argv[1:])
sys.exit(3)
"""
    (package / "__main__.py").write_text(code, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("says", "count"), [("old", 0), ("new", 2)])
def test_two_checkouts_are_run_and_held_against_each_other(tmp_path: Path, says: str, count: int) -> None:
    pair = checkout(tmp_path / "a", "old"), checkout(tmp_path / "b", says)
    (tmp_path / "inputs").mkdir()
    cases = [Case("scan", (("scan", "in/x"),)), Case("show", (("show", "in/x"),), alone=True)]
    outcome = run(pair, cases, tmp_path / "work", tmp_path / "inputs", jobs=1, tell=lambda done, differ: None)
    assert outcome.unlike == []
    assert (outcome.commands, outcome.equal) == (2, 2 if not count else 0)
    assert outcome.codes == {3: 2}
    assert outcome.sampled == 2
    assert len(outcome.different) == 2 * count
    folder = tmp_path / "work" / "different" / "1"
    assert folder.is_dir() == bool(count)
    if count:
        assert (folder / "old" / "0.out").read_bytes() == b"old show in/x\n"
        assert (folder / "new" / "files" / "out").read_bytes() == b"new"
        assert {(difference.place, difference.lines) for difference in outcome.different} == {
            ("stdout", ("-old scan in/x", "+new scan in/x")),
            ("stdout", ("-old show in/x", "+new show in/x")),
            ("out", ("-old", "+new")),
        }


def test_rows_get_faults_and_the_same_ones_each_time() -> None:
    vocabulary = Vocabulary(json.loads(TOY.read_text(encoding="utf-8")))
    rows = rows_of((ROOT / "fixtures" / "formats" / "generic.jsonl").read_text(encoding="utf-8"))
    first, other = (list(broken_lines(rows, 60, vocabulary, random.Random(1))) for _ in range(2))
    assert first == other
    clean = [json.dumps(row) for row in rows]
    assert sum(line in clean for line in first) < 10
    assert len(set(first)) > 50


def test_json_values_one_after_another_are_rows() -> None:
    assert rows_of('{"a": 1}\n{\n"a": 2}\n[3, 4]\n') == [{"a": 1}, {"a": 2}, 3, 4]


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"f", "a"}}
    assert circles(edges) == [["a", "b", "c"], ["d", "e"]]


def test_the_figures_of_a_structure(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "one/__init__.py": "from .a import shown\n",
        "one/a.py": "from tito_audit.two import _b\n\n\ndef shown():\n    from tito_audit.two._b import c\n",
        "two/__init__.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from tito_audit.one import a\n",
        "two/_b.py": "from tito_audit.one.a import shown, _hidden\n\nc = 1\nshown = 2\n_hidden = 3\n" + "\n" * 400,
    }
    for name, text in files.items():
        path = tmp_path / "tito_audit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    page = "\n".join(figures(tmp_path))
    assert "414 lines in 5 modules" in page
    assert "modules of more than 400 lines: 1\n  two._b 405" in page
    assert "private parts: 3 names (2 out of private modules, 1 private names" in page
    assert "import circles, at any level: 1, of [2] modules\n  one.a, two._b" in page
    assert "import circles, at top level only: 1, of [2] modules" in page
    assert "public names defined in more than one room: 1\n  shown (2)" in page
