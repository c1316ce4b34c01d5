"""Sets for SFT: told apart, judged in their own words, planned before they are tokenized, and written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import world
from tests.command import run, written
from tests.format_cases import fixture_of
from tests.frameworks.ask import asked
from tests.sft.conversations import conversations
from tests.sft.faults import FAULTS, Family, Rows, planted, runs
from tests.tables import stored, table
from tests.tiers import DEEP, crossed
from tito_audit import Settings, convert_rollouts, scan_rollouts
from tito_audit.record.finding import Result
from tito_audit.tokens.load import load_tokenizer
from tito_audit.ways.recorded_values import turn_end_ids

TOY = str(world.TOY)
REAL = world.ROOT.parent / "shared" / "tokenizers"
ASK, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The cat said hello."}
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + END }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained_rows(folder: Path, texts: Rows, form: str = "sft", tokenizer: str = TOY, **settings: Any) -> Rows:
    """These rows of text as a set for SFT."""
    log, out = written(folder / "text.jsonl", texts), folder / "set.jsonl"
    convert_rollouts(log, form, out, Settings(tokenizer=tokenizer, **settings), overwrite=True)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def scanned(folder: Path, rows: Rows, **settings: Any) -> list[Result]:
    return list(scan_rollouts(written(folder / "scanned.jsonl", rows), Settings(**{"tokenizer": TOY, **settings})))


def findings(results: list[Result]) -> set[tuple[str, str, int | None]]:
    """The code, severity and row of each finding; no row for one of the log."""
    return {
        (finding.code, finding.severity.word, None if result.of_log else result.place.row)
        for result in results
        for finding in result.findings
    }


def texts(count: int = 16, seed: int = 3) -> Rows:
    return [{"messages": messages} for messages in conversations(count, seed)]


# Written


def test_messages_become_ids_with_labels_on_what_the_assistant_wrote(tmp_path: Path) -> None:
    (row,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER]}])
    vocabulary = load_tokenizer(TOY).vocabulary
    ids, labels = row["input_ids"], row["labels"]
    assert list(row) == ["input_ids", "attention_mask", "labels"]
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    spans = [vocabulary.text(np.array(ids[start:end])) for start, end in runs(labels)]
    assert spans == ["The cat said hello.<|im_end|>"] * 2
    for form, mask in (("sft_assistant_masks", "assistant_masks"), ("sft_completion_mask", "completion_mask")):
        (other,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER]}], form)
        assert list(other) == ["input_ids", "attention_mask", mask]
        assert other[mask] == [int(label != -100) for label in labels]


def test_what_the_data_leaves_out_is_left_out(tmp_path: Path) -> None:
    quiet = {**ANSWER, "weight": 0}
    whole = trained_rows(tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER]}])[0]
    weighted = trained_rows(tmp_path, [{"messages": [ASK, quiet, ASK, ANSWER]}])[0]
    apart = trained_rows(tmp_path, [{"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}])[0]
    assert weighted["input_ids"] == apart["input_ids"] == whole["input_ids"]
    assert runs(weighted["labels"]) == runs(apart["labels"]) == runs(whole["labels"])[1:]


def test_sharegpt_rows_are_the_same_conversation(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "The cat said hello."}]
    (shared,) = trained_rows(tmp_path, [{"conversations": turns, "system": "Be brief."}])
    (plain,) = trained_rows(tmp_path, [{"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER]}])
    assert shared == plain


def test_rows_of_alpaca_are_the_same_conversation(tmp_path: Path) -> None:
    row = {"instruction": "Hello", "input": "Oslo?", "output": "It is a cat.", "system": "Be brief."}
    history = [["Hello", "The cat said hello."]]
    last = [{"role": "user", "content": "Hello\nOslo?"}, {"role": "assistant", "content": "It is a cat."}]
    first = {"role": "system", "content": "Be brief."}
    (plain,) = trained_rows(tmp_path, [{"messages": [first, ASK, ANSWER, *last]}])
    assert trained_rows(tmp_path, [{**row, "history": history}]) == [plain]
    assert plan(tmp_path / "text.jsonl", "-t", TOY)["trained"] == sum(t != -100 for t in plain["labels"])
    # A history that is something else leaves a row of text.
    assert not scanned(tmp_path, [{**row, "history": ["Hello"]}])[0].findings


def test_a_prompt_and_a_completion_are_joined_as_they_are(tmp_path: Path) -> None:
    texts = {"prompt": "Hello\n", "completion": "The cat said hello."}
    (row,) = trained_rows(tmp_path, [texts])
    text = load_tokenizer(TOY).vocabulary.text
    assert text(np.array(row["input_ids"])) == "Hello\nThe cat said hello.<|im_end|>"
    ((start, end),) = runs(row["labels"])
    assert text(np.array(row["input_ids"][start:end])) == "The cat said hello.<|im_end|>"
    shown = plan(written(tmp_path / "a.jsonl", [texts]), "-t", TOY, "--row", "0")["row"]
    assert (shown["ids"], shown["trained"]) == (row["input_ids"], [label != -100 for label in row["labels"]])


def test_markers_of_the_template_decide_where_it_has_them(tmp_path: Path) -> None:
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED.replace("END", "'<|im_end|>\n'"), encoding="utf-8")
    (marked,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER]}], chat_template=str(template))
    (proven,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER]}])
    ((start, end),) = runs(proven["labels"])
    assert marked["input_ids"][: len(proven["input_ids"])] == proven["input_ids"]
    assert runs(marked["labels"]) == [(start, end + 1)]


# Told apart


@pytest.mark.parametrize(*table(__file__, "rows_are_judged_by_what_they_are_for"))
def test_rows_are_judged_by_what_they_are_for(column: str, kind: Any, said: str, tmp_path: Path) -> None:
    (row,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER]}], "sft_assistant_masks")
    mask = row.pop("assistant_masks")
    mask[1:3] = [1, 1]
    row[column] = (
        [t if on else -100 for t, on in zip(row["input_ids"], mask, strict=True)] if column == "labels" else mask
    )
    results = scanned(tmp_path, [row], kind=kind)
    messages = [finding.hit.message for result in results for finding in result.findings]
    assert [said in message for message in messages] == [True]


def test_logprobs_make_a_rollout_of_it(tmp_path: Path) -> None:
    (row,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER]}])
    row["logprobs"] = [0.0 if label == -100 else -0.5 for label in row["labels"]]
    scan = scan_rollouts(written(tmp_path / "a.jsonl", [row]), Settings(tokenizer=TOY))
    assert list(scan)
    assert not scan.summary.sft


def test_a_scan_counts_what_a_set_trains(tmp_path: Path) -> None:
    rows = trained_rows(tmp_path, texts())
    scan = scan_rollouts(written(tmp_path / "a.jsonl", rows), Settings(tokenizer=TOY))
    list(scan)
    trained = sum(label != -100 for row in rows for label in row["labels"])
    turns = sum(len(runs(row["labels"])) for row in rows)
    counted = {"rows": 16, "trained": trained, "ends": turns, "ends_trained": turns}
    assert {name: scan.summary.sft[name] for name in counted} == counted
    page = run("scan", str(tmp_path / "a.jsonl"), "-t", TOY)[1]
    assert f"SFT: {trained:,} of " in page
    assert f"ends in {turns} of {turns} turns" in page


# Judged


@cache
def family(tokenizer: str) -> Family:
    loaded = load_tokenizer(tokenizer)
    ends = turn_end_ids(loaded.vocabulary) | set(loaded.eos_ids)
    return Family(loaded.bos_id, frozenset(ends), loaded.backend.get_vocab_size())


def tokenizers_and_columns() -> Iterator[Any]:
    """Tokenizers, each with messages beside the ids and without; one of them each but in `make deep`."""
    names = (
        ("qwen3", "qwen2.5-coder", "llama-3.1", "gemma-3", "smollm2", "deepseek-v3") if DEEP else ("llama-3.1",)
    )
    for name, messages in crossed(("toy_bpe", *names), (True, False)):
        is_there = name == "toy_bpe" or (REAL / name).is_dir()
        skip = pytest.mark.skipif(not is_there, reason=f"there is no {name} in {REAL}")
        yield pytest.param(name, messages, marks=skip, id=f"{name}-{'with messages' if messages else 'ids alone'}")


@pytest.mark.parametrize(("name", "messages"), [*tokenizers_and_columns()])
def test_every_planted_fault_is_found_and_a_clean_set_is_clean(name: str, messages: bool, tmp_path: Path) -> None:
    tokenizer = TOY if name == "toy_bpe" else str(REAL / name)
    chats = texts()
    rows = trained_rows(tmp_path, chats, tokenizer=tokenizer)
    base = [{**(text if messages else {}), **row} for text, row in zip(chats, rows, strict=True)]
    # That a template rewrites history is no fault of the set.
    clean = findings(scanned(tmp_path, base, tokenizer=tokenizer)) - {("TPL213", "note", None)}
    assert clean == set()
    missed = []
    for fault, copy, at in planted(base, family(tokenizer), messages=messages):
        results = findings(scanned(tmp_path, copy, tokenizer=tokenizer))
        wanted = {
            code
            for code, severity, row in results
            if (severity, row) == (fault.severity, None if fault.of_log else at)
        }
        if not any(code.startswith(fault.code) for code in wanted):
            missed.append((fault.name, results))
        # Nothing is said of the other rows.
        others = {row for _, severity, row in results if severity != "note" and row not in (None, at)}
        if not fault.of_log and others:
            missed.append((f"{fault.name}: {others} too", results))
    assert missed == []


def test_there_are_twenty_faults() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_white_space_and_headers_that_trainers_train_are_no_fault(tmp_path: Path) -> None:
    rows = trained_rows(tmp_path, texts())
    for row in rows:
        for start, end in runs(row["labels"]):
            for at in (start - 1, end):
                if at < len(row["input_ids"]):
                    row["labels"][at] = row["input_ids"][at]
    assert findings(scanned(tmp_path, rows)) == set()


def test_an_end_left_out_is_found_where_line_feeds_behind_ends_are_trained(tmp_path: Path) -> None:
    (row,) = trained_rows(tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER]}])
    (first, last), labels = runs(row["labels"]), row["labels"]
    for _, end in (first, last):
        labels[end] = row["input_ids"][end]
    assert findings(scanned(tmp_path, [row])) == set()
    labels[first[1] - 1] = labels[first[1]] = -100
    assert findings(scanned(tmp_path, [row])) == {("MSK404", "warning", 0)}


@pytest.mark.parametrize("case", ["lost", "none in the data", "one row has some"])
def test_spaces_that_a_trainer_dropped_are_one_warning_of_the_log(case: str, tmp_path: Path) -> None:
    dense = "".join(f"Thecatsaidhello{number}andwentaway" for number in range(9))
    rows = trained_rows(tmp_path, [{"messages": [ASK, {"role": "assistant", "content": dense}]}] * 8)
    tokenizer = load_tokenizer(TOY)
    if case != "none in the data":
        for row in rows:
            at = next(i for i, label in enumerate(row["labels"]) if label >= 0)
            apart = [int(token) for letter in "Thecat" for token in tokenizer.encode(letter)]
            for name in ("input_ids", "labels"):
                row[name][at:at] = apart
            row["attention_mask"] = [1] * len(row["input_ids"])
    if case == "one row has some":
        rows += trained_rows(tmp_path, [{"messages": [ASK, ANSWER]}])
    seen = {finding for finding in findings(scanned(tmp_path, rows)) if finding[0] == "TOK107"}
    assert seen == ({("TOK107", "warning", None)} if case == "lost" else set())


@pytest.mark.parametrize(
    ("name", "label"), [("fireworks", "trained-one-token-early"), ("llamafactory", "a-question-trained")]
)
def test_sets_of_these_formats_are_judged_in_the_words_of_sft(name: str, label: str, tmp_path: Path) -> None:
    results = scanned(tmp_path, [dict(fixture_of(name, label))])
    messages = [finding.hit.message for result in results for finding in result.findings]
    assert any("not written by the assistant" in message for message in messages)
    assert not any("sampled" in message for message in messages)


# Before it is tokenized


def plan(*arguments: object) -> dict[str, Any]:
    ran = run("sft", *arguments, "-f", "json")
    page: dict[str, Any] = json.loads(ran[1])
    return {**page, "rc": ran[0], "problems": {each["problem"]: each for each in page["problems"]}}


def test_a_plan_is_what_convert_writes(tmp_path: Path) -> None:
    chats = texts()
    rows = trained_rows(tmp_path, chats)
    page = plan(tmp_path / "text.jsonl", "-t", TOY, "--row", "2")
    assert (page["rc"], page["problems"], page["rows"]) == (0, {}, 16)
    assert page["trained"] == sum(label != -100 for row in rows for label in row["labels"])
    assert (page["row"]["ids"], page["row"]["trained"]) == (
        rows[2]["input_ids"],
        [label != -100 for label in rows[2]["labels"]],
    )


# As TRL tokenizes

OF_TRL = stored(__file__, "OF_TRL")


def by_trl(folder: Path, **job: Any) -> Rows:
    path, out = folder / "job.json", folder / "trl.jsonl"
    path.write_text(json.dumps(job))
    asked("trl_sft", path, out)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("name", [*OF_TRL] if DEEP else ["llama-3.1"])
def test_a_set_is_what_trl_trains_with_its_training_template(name: str, tmp_path: Path) -> None:
    if not (REAL / name).is_dir():
        pytest.skip(f"there is no {name} in {REAL}")
    chats = texts(1000 if DEEP else 50, 7)
    tokenizer, (template, beside) = str(REAL / name), OF_TRL[name]
    source = asked("trl_sft", "--template", template)
    (tmp_path / "template.jinja").write_text(source)
    trl = by_trl(tmp_path, tokenizer=tokenizer, template=template, kind="assistant", rows=chats)
    own = trained_rows(tmp_path, chats, tokenizer=tokenizer, chat_template=str(tmp_path / "template.jinja"))
    assert [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in trl] == own
    # The rendering alone shows the same, but for what TRL's markers hold beside each answer.
    bare = re.sub(r"(\{%-? )endgeneration( -?%\})", r"\1endif\2", source)
    (tmp_path / "template.jinja").write_text(re.sub(r"(\{%-? )generation( -?%\})", r"\1if true\2", bare))
    proven = trained_rows(tmp_path, chats, tokenizer=tokenizer, chat_template=str(tmp_path / "template.jinja"))
    vocabulary = load_tokenizer(tokenizer).vocabulary
    for row, marked in zip(proven, own, strict=True):
        assert row["input_ids"] == marked["input_ids"]
        more = [t for t, a, b in zip(row["input_ids"], row["labels"], marked["labels"], strict=True) if a != b]
        assert {vocabulary.piece(token) for token in more} <= {beside}
        assert all(a in (-100, b) for a, b in zip(row["labels"], marked["labels"], strict=True))
    # A scan has nothing to say of TRL's set.
    scan = findings(scanned(tmp_path, [dict(row) for row in trl[:50]], tokenizer=tokenizer))
    assert scan - {("TPL213", "note", None)} == set()


def test_a_set_loads_in_trl_as_it_is(tmp_path: Path) -> None:
    rows = trained_rows(tmp_path, texts())
    (batch,) = by_trl(tmp_path, tokenizer=TOY, template=None, kind="messages", rows=rows, load=True)
    longest = max(len(row["input_ids"]) for row in rows)
    assert batch["labels"] == [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    masks = trained_rows(tmp_path, texts(), "sft_assistant_masks")
    assert by_trl(tmp_path, tokenizer=TOY, template=None, kind="assistant", rows=masks) == [
        {name: row[name] for name in ("input_ids", "labels")} for row in rows
    ]
