"""`tito-audit view`: the site of many logs, as files, and in a browser from disk and from a server."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import random
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.browser import driver
from tests.browser.made import HOSTILE, WORDS
from tests.browser.scene import Stage, play, scenes
from tests.command import run, written
from tests.test_html_browser import assert_readable, browser, looks
from tests.world import FORMATS, TOY
from tito_audit import Settings, scan_rollouts
from tito_audit.reports._html.views import SITE_MARK
from tito_audit.reports.html import Site, write_page
from tito_audit.run.workers import InProcess
from tito_audit.viewer.grams import BUCKETS, SLOTS, GramIndex, slots_of_ids, slots_of_text
from tito_audit.viewer.model import ViewQuota, observed_of

__all__ = ["browser"]

pytestmark = pytest.mark.usefixtures("loaded_once")

ENCODER = Tokenizer.from_file(str(TOY / "tokenizer.json"))
HARMFUL = HOSTILE.encode("utf-8", "replace").decode()


def row(name: str, prompt: str, answer: str, **columns: Any) -> dict[str, Any]:
    """A training row, with a trainer's logprobs and advantages."""
    head, tail = (ENCODER.encode(text, add_special_tokens=False).ids for text in (prompt, answer))
    size = len(head) + len(tail)
    luck = random.Random(prompt + answer)
    sampled = [0.0] * len(head) + [-luck.randrange(1, 4000) / 1000 for _ in tail]
    return {
        "id": name,
        "token_ids": [*head, *tail],
        "loss_mask": [0] * len(head) + [1] * len(tail),
        "logprobs": sampled,
        "old_log_probs": [round(value - luck.randrange(20) / 1000 * (value < 0), 4) for value in sampled],
        "advantages": [0.125] * size,
        **columns,
    }


def rows(seed: int, number: int = 6) -> list[dict[str, Any]]:
    luck = random.Random(seed)
    prompts = [" ".join(random.Random(at).choices(WORDS, k=8)) for at in range(number)]
    return [row(f"task-{at}", prompt, " ".join(luck.choices(WORDS, k=12))) for at, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two steps; a row of the first is hostile, one of the second has a finding."""
    folder = tmp_path_factory.mktemp("runs")
    for at, name in enumerate(("first", "second")):
        (folder / name).mkdir()
        several = rows(at)
        several[0] = rows(0)[0]  # the same in both
        several[1] = row("task-1", "the marker zebra-4711 of ZÜRICH", "it is " + name)
        if name == "first":
            several.append(row("task-</script><img src=x onerror=window.owned=8>", HARMFUL, HARMFUL[:200]))
        else:
            several[2]["logprobs"][-1] = 0.5
        written(folder / name / "step_0.jsonl", several)
        written(folder / name / "step_1.jsonl", rows(at + 2))
    return folder


@pytest.fixture(scope="module")
def site(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "site"
    code, page, err = run("view", logs, "-t", TOY, "-o", out)
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(out))}/index.html: 4 logs, 25 rollouts, [\d.]+ MB\n", page)
    return out


def value_of(file: Path) -> Any:
    """What a file of data hands over."""
    name, data = json.loads("[" + file.read_text().removeprefix("titoAudit(").removesuffix(");\n") + "]")
    assert file.as_posix().endswith(f"/{name}.js")
    return json.loads(zlib.decompress(base64.b64decode(data)))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the folder -----------------------------------------------------------------------------------------------


def test_every_row_is_in_the_files_with_what_a_trainer_logged(site: Path, logs: Path) -> None:
    (data,) = (site / "data").iterdir()
    index = value_of(data / "first-step_0.jsonl" / "index.js")
    assert [entry[7] for entry in index][:2] == ["task-0", "task-1"]
    assert len(index) == 7
    first = json.loads((logs / "first" / "step_0.jsonl").read_text().splitlines()[0])
    (sequence,) = value_of(data / "first-step_0.jsonl" / "rows-0.js")[0]["sequences"]
    (stretch,) = sequence["stretches"]
    assert [sequence["tokens"][token][0] for token in stretch["tokens"]] == first["token_ids"]
    assert stretch["columns"] == {name: first[name] for name in ("old_log_probs", "advantages")}
    same = value_of(data / "second-step_0.jsonl" / "index.js")
    assert [entry[8] == other[8] for entry, other in zip(index, same, strict=False)] == [True] + [False] * 5


def test_a_column_of_the_response_stands_over_the_response(tmp_path: Path) -> None:
    log = FORMATS / "verl_batch.jsonl"
    assert run("view", log, "-t", TOY, "-o", tmp_path / "site", "-q") == (0, "", "")
    first = json.loads(log.read_text().splitlines()[0])
    (data,) = (tmp_path / "site" / "data").iterdir()
    (sequence,) = value_of(data / "verl_batch.jsonl" / "rows-0.js")[0]["sequences"]
    shown = [value for stretch in sequence["stretches"] for value in stretch["columns"]["advantages"]]
    length = len(shown) - shown.count(None)
    assert shown[:-length] == [None] * (sequence["length"] - length)
    assert shown[-length:] == [round(value, 5) for value in first["advantages"][0][:length]]


@pytest.mark.parametrize("chunk", [None, 1, 1000])
def test_the_same_rows_get_a_view_however_a_log_is_cut(logs: Path, chunk: int | None) -> None:
    scan = scan_rollouts([logs / "second" / "step_0.jsonl"], Settings(tokenizer=str(TOY)), observe=ViewQuota(1))
    if chunk is not None:
        scan.chunk_bytes, scan.executor = chunk, InProcess()
    views = {result.place.row: observed.view for result in scan if (observed := observed_of(result)) is not None}
    assert [row for row, view in views.items() if view is not None] == [0, 2], (
        "the first, and the one with an error"
    )
    assert [view.row_id for view in views.values() if view is not None] == ["task-0", "task-2"]


def test_a_site_is_the_same_however_many_processes_wrote_it(site: Path, logs: Path, tmp_path: Path) -> None:
    assert run("view", logs, "-t", TOY, "-o", tmp_path / "site", "-q", "--jobs", 2) == (0, "", "")
    first, other = files_in(site), files_in(tmp_path / "site")
    assert first.keys() == other.keys()
    assert {name for name in first if first[name] != other[name] and not name.startswith("logs/")} == set()


def test_rows_beyond_the_limit_are_counted_and_said(logs: Path, tmp_path: Path) -> None:
    code, printed, _ = run("view", logs / "second", "-t", TOY, "-o", tmp_path / "site", "--show-rows", 1)
    assert code == 0
    assert "9 without their tokens (--show-rows)" in printed
    (data,) = (tmp_path / "site" / "data").iterdir()
    # The row with an error is beyond it, and shown as the html report shows it.
    assert [entry[7] for entry in value_of(data / "step_0.jsonl" / "index.js")] == ["task-0", "task-2"]
    page = (tmp_path / "site" / "index.html").read_text()
    assert "the tokens of 9 rollouts, beyond <code>--show-rows</code>" in page


def test_a_folder_of_something_else_is_never_written_to(logs: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "taken"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for out, words in ((foreign, "holds files of something else"), (tmp_path / "file", "this is a file")):
        code, page, err = run("view", logs, "-t", TOY, "-o", out)
        assert (code, page) == (2, "")
        assert words in err
    assert files_in(tmp_path) == {"taken/thesis.tex": b"years of work", "file": b"x"}
    code, _, err = run("view", logs, "-o", "s3://bucket/site")
    assert code == 2
    assert "a site is written to disk" in err


def test_a_second_run_updates_a_site_and_leaves_what_is_not_of_it(logs: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "site"
    assert run("view", logs, "-t", TOY, "-o", tmp_path / "none" / "site", "-q")[0] == 0, "folders are made"
    out.mkdir(parents=True)
    assert run("view", logs, "-t", TOY, "-o", out, "-q") == (0, "", ""), "an empty folder is as good as none"
    (out / "CNAME").write_text("logs.example.org")
    before = files_in(out)
    written(out.parent / "new.jsonl", rows(9))
    assert run("view", out.parent, "-t", TOY, "-o", out, "-q") == (0, "", ""), "a site in a folder of logs is none"
    after = files_in(out)
    assert after["CNAME"] == b"logs.example.org"
    assert {name for name in after if name.startswith("logs/")} == {"logs/new.jsonl.html"}
    assert len({name.split("/")[1] for name in after if name.startswith("data/")}) == 1
    assert json.loads(after[SITE_MARK])["logs"] == ["new.jsonl"]
    assert before[SITE_MARK] != after[SITE_MARK]
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_fails_leaves_the_site_as_it_was(logs: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    assert run("view", logs / "first", "-t", TOY, "-o", out, "-q")[0] == 0
    before = files_in(tmp_path)
    assert run("view", tmp_path / "nothing.jsonl", "-t", TOY, "-o", out)[0] == 2
    assert run("view", logs, "-t", tmp_path / "no-tokenizer", "-o", out)[0] == 2
    assert files_in(tmp_path) == before


def test_logs_whose_names_are_alike_get_pages_of_their_own(logs: Path, tmp_path: Path) -> None:
    for name in ("A b.jsonl", "a?b.jsonl", "a b.jsonl"):
        written(tmp_path / "logs" / name, rows(1, 1))
    assert run("view", tmp_path / "logs", "-t", TOY, "-o", tmp_path / "site", "-q")[0] == 0
    pages = {path.name.lower() for path in (tmp_path / "site" / "logs").iterdir()}
    assert pages == {"a-b.jsonl.html", "a-b.jsonl-2.html", "a-b.jsonl-3.html"}


def test_nothing_of_a_log_acts_in_the_files_of_a_site(site: Path) -> None:
    for name, raw in files_in(site).items():
        text, up = raw.decode(), "../" * name.startswith("logs/")
        if name.endswith(".html"):
            assert re.findall(r"<script(?![^>]* type=)[^>]*>", text) == [
                f'<script src="{up}data/{next((site / "data").iterdir()).name}/page.js">'
            ]
            (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
            assert policy.replace("&#39;", "'") == (
                "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src data:; "
                "base-uri 'none'; form-action 'none'"
            )
            assert " style=" not in text
            assert "onerror=window" not in re.sub(r'<script type="application/json".*?</script>', "", text)
        elif name.startswith("data/") and not name.endswith(("page.js", "page.css")):
            assert re.fullmatch(r'titoAudit\("[\w./-]+", "[A-Za-z0-9+/=]+"\);\n', text)


# --- the index of the search ------------------------------------------------------------------------------------


def test_the_index_of_the_search_misses_no_block_and_leaves_most_out() -> None:
    luck = np.random.default_rng(7)
    grams, blocks = GramIndex(), []
    for number in range(11):
        ids = luck.integers(0, 150_000, 300).tolist()
        text = f"block {number} " + "".join(chr(code) for code in luck.integers(32, 500, 300))
        grams.add(ids, [text.encode().hex(), "e697a5…"])
        grams.end_block()
        blocks.append((ids, text))
    parts = list(grams.buckets())
    assert len(parts) == BUCKETS
    bits = np.unpackbits(np.frombuffer(b"".join(parts), np.uint8).reshape(SLOTS, grams.width), axis=1)
    grams.close()
    for number, (ids, text) in enumerate(blocks):
        for slots in (
            slots_of_ids(ids[40:44])[4:],
            slots_of_ids(ids[7:8]),
            *slots_of_text(text[20:60]),
        ):
            there = bits[slots].all(axis=0)
            assert there[number]
            assert there.sum() < 4
    assert not bits[:, 11:].any()


# --- in a browser -----------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a plain server of files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def own_files_alone(browser: driver.Browser, root: str) -> None:
    """Nothing was complained of, and nothing but files of the site was asked for."""
    browser.listen()
    assert browser.complaints == []
    assert [request for request in browser.requests if not request.startswith((root, "data:image/svg+xml"))] == []
    assert not [line for line in browser.proxy.asked if "evil" in line]
    assert browser.js("return window.owned") is None


def staged(browser: driver.Browser, root: str) -> Stage:
    """The browser, where a scene opens pages of the site at this address."""
    return Stage(browser, lambda page: f"{root}/{page}", lambda: own_files_alone(browser, root))


@pytest.mark.parametrize(("file", "scene"), scenes("site"))
def test_a_site_is_used_from_disk(browser: driver.Browser, site: Path, file: Path, scene: str) -> None:
    play(file, scene, staged(browser, site.resolve().as_uri()))


@pytest.mark.parametrize(("file", "scene"), scenes("site")[:1])
def test_a_site_is_used_from_a_server(browser: driver.Browser, site: Path, file: Path, scene: str) -> None:
    with served(site) as server:
        play(file, scene, staged(browser, server))


def test_the_differences_of_a_comparison_are_the_fewest_edits(browser: driver.Browser, site: Path) -> None:
    """Both sides are put together again from the differences, on random sequences."""
    script = (next((site / "data").iterdir()) / "page.js").read_text()
    start, end = script.index("const MOST_EDITS"), script.index("/** The first run of shown tokens")
    browser.open((site / "index.html").as_uri())
    luck = random.Random(3)
    cases = [([], []), ([1], []), ([], [1]), ([1, 2, 3], [1, 2, 3])]
    cases += [
        (
            [luck.randrange(4) for _ in range(luck.randrange(30))],
            [luck.randrange(4) for _ in range(luck.randrange(30))],
        )
        for _ in range(200)
    ]
    differences = browser.driver.execute_cdp_cmd(
        "Runtime.evaluate",
        {
            "expression": f"(() => {{ {script[start:end]} return {json.dumps(cases)}"
            ".map(([a, b]) => differences(a, b)); })()",
            "returnByValue": True,
        },
    )["result"]["value"]
    for (a, b), ranges in zip(cases, differences, strict=True):
        result: list[int] = []
        at = edits = 0
        for start, end, other, other_end in ranges:
            result += [*a[at:start], *b[other:other_end]]
            at, edits = end, edits + end - start + other_end - other
        assert result + a[at:] == b
        assert edits == len(a) + len(b) - 2 * shared(a, b)


def shared(a: list[int], b: list[int]) -> int:
    """The length of the longest common subsequence."""
    line = [0] * (len(b) + 1)
    for left in a:
        before = 0
        for at, other in enumerate(b, 1):
            before, line[at] = line[at], before + 1 if left == other else max(line[at], line[at - 1])
    return line[-1]


@looks(390, 1400)
def test_the_pages_can_be_read_at_both_widths_and_in_both_schemes(
    browser: driver.Browser, site: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    folder = Path(os.environ.get("TITO_AUDIT_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    browser.look(width=width, dark=dark)
    hostile = "#rollout=step_0.jsonl:6&over=all"
    pages = {
        "index": "index.html#q=the",
        "compare": "compare.html#a=first/step_0.jsonl&b=second/step_0.jsonl",
        "pair": "compare.html#a=first/step_0.jsonl&b=second/step_0.jsonl&rollout=task-1",
        "log": "logs/second-step_0.jsonl.html",
        "hostile": f"logs/first-step_0.jsonl.html{hostile}",
    }
    for name, page in pages.items():
        browser.open(f"{site.resolve().as_uri()}/{page}")
        if name == "index":
            browser.wait("document.querySelector('#search-hits mark')")
        if name in ("pair", "hostile"):
            browser.wait("document.querySelector('#viewer[open] .token')")
        browser.picture(folder / f"site-{name}-{width}-{'dark' if dark else 'light'}.png", whole=name == "index")
        assert_readable(browser, width)
        own_files_alone(browser, site.resolve().as_uri())


def test_a_site_is_put_in_place_only_when_it_is_complete(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", write_page)
    assert not (tmp_path / "site").exists()
    site.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_is_said(browser: driver.Browser, logs: Path, tmp_path: Path) -> None:
    assert run("view", logs / "second", "-t", TOY, "-o", tmp_path / "site", "-q")[0] == 0
    browser.look(width=1400)
    page = tmp_path / "site" / "logs" / "step_0.jsonl.html"
    browser.open(page)
    next((tmp_path / "site" / "data").glob("*/step_0.jsonl/rows-0.js")).unlink()
    browser.js("document.querySelector('#rollouts-app tbody button').click()")
    browser.wait("!document.getElementById('said').hidden")
    assert browser.texts("#said") == [
        "step_0.jsonl/rows-0.js cannot be loaded. If the site was updated, reload this page."
    ]
    assert not browser.js("return document.getElementById('viewer').open")
