"""`tito-audit rescore` with a tiny model of Hugging Face, held against plain forward passes of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command import run
from tests.rescoring import OPEN, TOY, Formula, call, log_of, rescored, sampled_rows, token_ids
from tests.tables import table
from tests.test_rescore import NEXT, SAMPLED, canonical
from tests.tiers import DEEP
from tito_audit.errors import ProviderError, SetupError
from tito_audit.providers.hf import HuggingFaceProvider
from tito_audit.rescore.journal import ScoreJournal

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


GUIDE = Path(__file__).resolve().parents[1] / "docs" / "rescore.md"


@pytest.fixture(scope="module")
def forward(tiny_model):
    """The logprobs `[T]` of ids by one plain forward pass; the first is 0."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny_model).eval()

    def logprobs(ids: list[int]) -> list[float]:
        with torch.no_grad():
            table = loaded(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return [0.0, *(float(table[at - 1, ids[at]]) for at in range(1, len(ids)))]

    return logprobs


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return token_ids(OPEN)


@pytest.fixture
def rows(logged):
    """Two rollouts, which a test may change."""
    return deepcopy(logged)


@pytest.fixture(scope="module")
def logged(prompt, forward):
    """Two rollouts: one that drifts, one whose logprobs have a gap."""
    first, second = token_ids(SAMPLED), token_ids(["4", "!", "<|im_end|>"])
    seen = [*prompt, *first]
    broken = [*prompt, *canonical(SAMPLED), *token_ids(NEXT)]
    drifts = [
        call(prompt, first, forward(seen)[len(prompt) :]),
        call(broken, second, forward([*broken, *second])[len(broken) :]),
    ]
    values: list[float | None] = list(forward([*prompt, *second])[len(prompt) :])
    values[1] = None
    return [{"calls": drifts, "id": 1}, {"calls": [call(prompt, second, values)], "id": 2}]


def command(log, model, *more, code=0):
    """What the command prints."""
    output = run("rescore", log, "--provider", f"hf={model}", "-t", TOY, *more)
    assert output[0] == code, output
    return output[1]


def test_prices_are_those_of_plain_forward_passes(tmp_path, tiny_model, rows, prompt, forward):
    report = json.loads(command(log_of(tmp_path, rows), tiny_model, "-r", "json"))
    sampled, theirs = forward([*prompt, *token_ids(SAMPLED)]), forward([*prompt, *canonical(SAMPLED)])
    (price,) = [price for price in report["rollouts"][0]["prices"] if price["finding"]["code"].startswith("TOK")]
    start, last = len(prompt), len(prompt) + len(SAMPLED) - 2
    assert price["sampled"] == pytest.approx(sum(sampled[start:last]), abs=1e-4)
    assert price["other"] == pytest.approx(sum(theirs[start : len(theirs) - 2]), abs=1e-4)
    assert report["summary"]["agreement"]["largest"] < 1e-4
    assert report["summary"]["missing"] == 1
    assert [rollout["item"] for rollout in report["rollouts"]] == [0, 0]


def test_the_page_says_what_drift_costs(tmp_path, tiny_model, rows):
    page = command(log_of(tmp_path, rows), tiny_model)
    assert "Recorded logprobs agree with the model" in page
    assert "TOK101 merge" in page
    assert "SEQ301 merge" in page
    assert "1 sampled token without a recorded logprob" in page


def test_logprobs_of_another_temperature_fail_and_are_explained(tmp_path, tiny_model, prompt):
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids = token_ids(["4", "!", "9", "3", "2", "4", "4"] * 6)
    with torch.no_grad():
        table = (loaded(torch.tensor([[*prompt, *ids]])).logits[0].float() / 0.5).log_softmax(-1)
    values = [float(table[len(prompt) + at - 1, token]) for at, token in enumerate(ids)]
    page = command(log_of(tmp_path, [{"calls": [call(prompt, ids, values)]}]), tiny_model, code=1)
    assert "Recorded logprobs disagree with the model" in page
    assert "those at temperature 0.5" in page


def test_gaps_are_filled_and_what_is_stated_stays(tmp_path, tiny_model, rows, prompt, forward):
    log, out = log_of(tmp_path, rows), tmp_path / "out.jsonl"
    before = hashlib.sha256(log.read_bytes()).hexdigest()
    command(log, tiny_model, "-o", out)
    assert hashlib.sha256(log.read_bytes()).hexdigest() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "out.jsonl"]
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first == rows[0]
    filled = second["calls"][0]["completion_logprobs"]
    model_said = forward([*prompt, *token_ids(["4", "!", "<|im_end|>"])])[len(prompt) :]
    assert filled[1] == pytest.approx(model_said[1], abs=1e-5)
    assert [filled[0], filled[2]] == [rows[1]["calls"][0]["completion_logprobs"][at] for at in (0, 2)]
    (note,) = second["tito_audit"]["notes"]
    assert f"hf={tiny_model}" in note
    assert second["tito_audit"]["cured"] == {"rescore": ["LPR503"]}
    assert run("scan", out, "-t", TOY, "--select", "LPR")[0] == 0


def test_stated_logprobs_are_replaced_only_with_unsafe_and_kept_beside_by_calls_that_lost_some(
    tmp_path, tiny_model, rows
):
    stated = [-0.5, None, -0.25]
    first, second = ({**rows[1]["calls"][0], "completion_logprobs": values} for values in (stated, [None] * 3))
    log, out = log_of(tmp_path, [{"calls": [first, second]}]), tmp_path / "out.jsonl"
    command(log, tiny_model, "-o", out)
    entry, _ = json.loads(out.read_text())["calls"]
    assert [entry["completion_logprobs"][at] for at in (0, 2)] == [-0.5, -0.25]
    assert "recorded_logprobs" not in entry
    command(log, tiny_model, "-o", out, "--unsafe", "--force")
    replaced, filled = json.loads(out.read_text())["calls"]
    assert (replaced["recorded_logprobs"], "recorded_logprobs" in filled) == (stated, False)
    assert replaced["completion_logprobs"][0] != -0.5
    assert filled["completion_logprobs"] == replaced["completion_logprobs"]
    again = json.loads(command(out, tiny_model, "-r", "json"))
    assert again["summary"]["agreement"]["largest"] < 1e-4


def test_a_row_without_a_column_gets_one(tmp_path, tiny_model, prompt, forward):
    ids = [*prompt, *token_ids(["4", "!", "<|im_end|>"])]
    row = {"token_ids": ids, "loss_mask": [0] * len(prompt) + [1, 1, 1]}
    log, out = log_of(tmp_path, [row]), tmp_path / "out.jsonl"
    command(log, tiny_model, "-o", out)
    values = json.loads(out.read_text())["logprobs"]
    assert values[: len(prompt)] == [None] * len(prompt)
    assert values[len(prompt) :] == pytest.approx(forward(ids)[len(prompt) :], abs=1e-5)


def test_a_row_with_an_id_that_no_vocabulary_has_stays_as_it_is(tmp_path, tiny_model, prompt):
    gaps = call(prompt, token_ids(["4", "!"]))
    bad = {**call(prompt, [5, 6]), "completion_ids": [-1, 6]}
    log, out = log_of(tmp_path, [{"calls": [bad]}, {"calls": [gaps]}]), tmp_path / "out.jsonl"
    code, _, err = run("rescore", log, "--provider", f"hf={tiny_model}", "-t", TOY, "-o", out)
    assert code == 1, err
    assert out.read_text().splitlines()[0] == log.read_text().splitlines()[0]


def test_the_repair_of_that_name_does_the_same(tmp_path, tiny_model, rows):
    log, out, other = log_of(tmp_path, rows), tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    command(log, tiny_model, "-o", out)
    code, page, err = run(
        "repair", log, "-o", other, "--with", "rescore", "--provider", f"hf={tiny_model}", "-t", TOY
    )
    assert code in (0, 1), err
    assert "rescore" in page
    assert other.read_text() == out.read_text()


def test_the_repair_needs_a_model(tmp_path, rows):
    code, _, err = run("repair", log_of(tmp_path, rows), "--dry-run", "--with", "rescore")
    assert code == 2
    assert "there is no model to score with" in err


@pytest.mark.parametrize(*table(__file__, "what_cannot_run_is_said_in_one_message"))
def test_what_cannot_run_is_said_in_one_message(tmp_path, tiny_model, rows, flags, words):
    log = log_of(tmp_path, rows)
    options = [flag.replace("{model}", str(tiny_model)).replace("{log}", str(log)) for flag in flags]
    code, out, err = run("rescore", log, "-t", TOY, *options)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_the_html_page_has_no_script_and_shows_hostile_text_as_text(tmp_path, tiny_model, rows, forward):
    log = log_of(tmp_path, rows, "<img src=x onerror=alert(1)>\u202e.jsonl")
    page = tmp_path / "page.html"
    command(log, tiny_model, "-r", f"html={page}", "-q")
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img" not in text
    assert "\u202e" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "default-src 'none'; style-src 'sha256-" in text
    assert text.count('class="shade') > 1
    assert "What drift costs, in nats" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_the_json_object_follows_its_schema(tmp_path, tiny_model, rows):
    jsonschema = pytest.importorskip("jsonschema")
    from importlib.resources import files

    schema = json.loads(files("tito_audit").joinpath("schemas", "rescore.schema.json").read_text())
    report = json.loads(command(log_of(tmp_path, [*rows, "nothing"]), tiny_model, "-r", "json", code=1))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(report)
    assert report["summary"]["rows_unreadable"] == 1


def test_the_guide_shows_what_the_command_prints(tmp_path, tiny_model, monkeypatch):
    """Words and whole numbers as they are; logprobs differ in their last digits from machine to machine."""
    shown = GUIDE.read_text(encoding="utf-8").partition("--worst 2\n```\n\n```text\n")[2].partition("```")[0]
    provider = HuggingFaceProvider(tiny_model)
    log_of(tmp_path, asyncio.run(sampled_rows(provider)), "drifted.jsonl")
    asyncio.run(provider.close())
    (tmp_path / "tiny").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    flags = ["--provider", "hf=tiny", "-t", "tiny", "--worst", "2"]
    code, page, _ = run("rescore", "drifted.jsonl", *flags, env={"COLUMNS": "100"})
    assert code == 0
    decimal = re.compile(r"[+-]?\d+\.\d+(e-\d+)?")
    assert decimal.sub("#", page).strip() == decimal.sub("#", shown).strip()
    numbers = [[abs(float(match.group())) for match in decimal.finditer(text)] for text in (page, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02)


def test_a_run_that_died_goes_on_with_what_it_scored(tmp_path, prompt):
    rows = [{"calls": [call([*prompt, at], token_ids(SAMPLED))]} for at in range(12)]
    log, place = log_of(tmp_path, rows), tmp_path / "scores"
    whole, _ = rescored(log, Formula(), jobs=2)
    requests = len(rescored(log, counted := Formula(), jobs=2)[0]) and len(counted.asked)
    dead = ScoreJournal(place, "formula=1")
    with pytest.raises(ProviderError):
        rescored(log, dying := Formula(dies=5), dead, jobs=2)
    dead.close()
    place.write_bytes(place.read_bytes()[:-20])  # a kill tears the last line
    with pytest.raises(SetupError, match="--resume"):
        ScoreJournal(place, "formula=1")
    with pytest.raises(SetupError, match="do not mix"):
        ScoreJournal(place, "formula=2", resume=True)
    other = Formula()
    other.model = "another"
    mixed = ScoreJournal(place, "formula=1", resume=True)
    with pytest.raises(SetupError, match="'formula', not 'another'"):
        rescored(log, other, mixed, jobs=2)
    mixed.close()
    again = ScoreJournal(place, "formula=1", resume=True)
    resumed, _ = rescored(log, second := Formula(), again, jobs=2)
    again.close()
    assert again.resumed == len(dying.asked) - 1
    assert len(dying.asked) - 1 + len(second.asked) == requests
    assert [result.prices for result in resumed] == [result.prices for result in whole]
    assert [result.agreement for result in resumed] == [result.agreement for result in whole]


@pytest.mark.skipif(not DEEP, reason="a process that loads torch; in the deep tier")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_writes_the_same_in_the_end(tmp_path, tiny_model, rows, prompt, end):
    several = [{"calls": [call([*prompt, at], token_ids(SAMPLED), [None] * len(SAMPLED))]} for at in range(60)]
    log, out, other = log_of(tmp_path, several), tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    words = [sys.executable, "-m", "tito_audit", "rescore", log, "--provider", f"hf={tiny_model}", "-t", TOY]
    killed = subprocess.Popen([*words, "-o", out, "-j", "1", "-q"], stderr=subprocess.PIPE, env=os.environ)
    scores, waited = tmp_path / "out.jsonl.scores", time.monotonic() + 60
    while time.monotonic() < waited and (not scores.exists() or scores.read_bytes().count(b"\n") < 5):
        time.sleep(0.02)
    killed.send_signal(end)
    err = killed.communicate()[1]
    assert killed.returncode in (-signal.SIGKILL, 130), err
    assert b"Traceback" not in err
    assert not out.exists()
    assert scores.exists()
    command(log, tiny_model, "-o", out, "--resume", "-q")
    command(log, tiny_model, "-o", other, "-q")
    assert not scores.exists()
    assert out.read_text() == other.read_text()
