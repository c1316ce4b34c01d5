"""Whether tokenizer and template are those of a log: said once, first, and of no log that they wrote."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.command import run
from tests.tiers import some
from tito_audit import RepairSettings, Result, Settings, read_rollouts, repair_rollouts, scan_rollouts
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.stated import Stated
from tito_audit.render.renderer import make_renderer
from tito_audit.run.fit import ANOTHER_TEMPLATE, ANOTHER_TOKENIZER, MISFIT_CODE, find_misfit
from tito_audit.tokens.load import load_tokenizer

BPE, METASPACE = "toy_bpe", "toy_metaspace"
SHARED = toy.ROOT.parent / "shared"
TALK = (
    "What is the weather in the city today, and will it rain again tomorrow?",
    "It is cold and it rains; tomorrow the sun will be out in most of the city.",
    "Is the tall man with the skinny cat the one who told you about it?",
    "He is. He said that the cat does not like the rain, and that nobody does.",
)


def path_of(name: str) -> str:
    return str(toy.TOKENIZERS / name)


def talk(number: int) -> list[dict[str, str]]:
    """Messages of one conversation, each conversation in words of its own."""
    roles = ("user", "assistant") * 2
    return [{"role": role, "content": f"{text} ({number})"} for role, text in zip(roles, TALK, strict=True)]


@cache
def ids_of(name: str, number: int) -> tuple[int, ...]:
    messages = as_messages(talk(number), "messages")
    return tuple(
        toy.toy_tokenizer(name).encode(toy.toy_renderer(name).render(messages, add_generation_prompt=False))
    )


def row(name: str, number: int, **more: Any) -> dict[str, Any]:
    ids = [int(token) for token in ids_of(name, number)]
    half = len(ids) // 2
    mask = [0] * half + [1] * (len(ids) - half)
    logprobs = [0.0] * half + [-0.5 - 0.01 * (place % 7) for place in range(len(ids) - half)]
    return {"messages": talk(number), "token_ids": ids, "loss_mask": mask, "logprobs": logprobs, **more}


def written(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def results_of(logs: Any, name: str, chunk: int | None = None, **options: Any) -> list[Result]:
    scan = scan_rollouts(logs, Settings(tokenizer=path_of(name), **options))
    scan.chunk_bytes = chunk
    return list(scan)


def codes_of(results: Sequence[Result]) -> list[str]:
    return [finding.code for result in results for finding in result.findings]


def misfit(name: str, *rollouts: Rollout) -> Finding | None:
    return find_misfit(rollouts, toy.toy_tokenizer(name), toy.toy_renderer(name))


def rollout(ids: Sequence[int], messages: list[dict[str, str]] | None = None, number: int = 0) -> Rollout:
    return Rollout(
        Place("log", number),
        "toy",
        as_messages(messages or [], "messages"),
        training_row=TrainingRow(np.array(ids, np.int32), None, None),
    )


# What is said


@pytest.mark.parametrize(("wrote", "reads"), [(BPE, METASPACE), (METASPACE, BPE)])
def test_a_log_of_another_tokenizer_is_one_error_before_all_others(tmp_path: Path, wrote: str, reads: str) -> None:
    results = results_of(written(tmp_path / "log.jsonl", [row(wrote, number) for number in range(20)]), reads)
    assert codes_of(results)[0] == MISFIT_CODE
    assert len(codes_of(results)) <= 11
    assert results[0].of_log
    (finding,) = results[0].findings
    assert (finding.severity, finding.hit.where, finding.hit.cause) == (
        Severity.ERROR,
        Where.LOG,
        ANOTHER_TOKENIZER,
    )
    assert "0 of 64 logged texts are found in what the ids decode to" in finding.hit.message
    assert "pass the tokenizer of the model that sampled it (-t NAME)" in finding.hit.message


@pytest.mark.parametrize("name", [BPE, METASPACE])
def test_a_log_fits_what_wrote_it(tmp_path: Path, name: str) -> None:
    rows = [row(name, number) for number in range(20)]
    for log in (rows, rows[:1], [{**row, "messages": []} for row in rows]):
        assert MISFIT_CODE not in codes_of(results_of(written(tmp_path / "log.jsonl", log), name))


def test_rules_that_would_repeat_it_are_held_back_and_counted(tmp_path: Path) -> None:
    scan = scan_rollouts(
        written(tmp_path / "log.jsonl", [row(BPE, number) for number in range(20)]),
        Settings(tokenizer=path_of(METASPACE)),
    )
    list(scan)
    because = "the tokenizer does not fit the log (REC007)"
    assert scan.summary.skipped["TOK101"].because == {because: 20}
    assert scan.summary.skipped["TPL203"].because == {because: 20}
    assert because not in scan.summary.skipped["SEQ301"].because


def test_the_finding_names_what_is_on_this_machine_and_what_to_run_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = written(tmp_path / "my log.jsonl", [row(BPE, number, model="Toy/Model-1B") for number in range(4)])
    (finding,) = results_of(log, METASPACE)[0].findings
    assert finding.hit.message.endswith(f"; `tito-audit identify '{log}'` tries those on this machine")
    assert "-t Toy/Model-1B" not in finding.hit.message
    snapshot = tmp_path / "hub" / "models--Toy--Model-1B" / "snapshots" / "1"
    shutil.copytree(path_of(BPE), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (finding,) = results_of(log, METASPACE)[0].findings
    assert "pass -t Toy/Model-1B, which is on this machine, or else pass the tokenizer" in finding.hit.message


def test_the_finding_says_what_the_log_names(tmp_path: Path) -> None:
    rows = [row(BPE, number, model="Toy/Model-1B", tokenizer="toy_bpe") for number in range(4)]
    (finding,) = results_of(written(tmp_path / "log.jsonl", rows), METASPACE)[0].findings
    assert "the log names its tokenizer 'toy_bpe' and its model 'Toy/Model-1B'" in finding.hit.message


def test_who_ignores_it_has_the_log_audited_as_if_it_fitted(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [row(BPE, number) for number in range(20)])
    codes = codes_of(results_of(log, METASPACE, ignore=(MISFIT_CODE,)))
    assert MISFIT_CODE not in codes
    assert len(codes) > len(codes_of(results_of(log, METASPACE)))


def test_a_sample_and_a_limit_do_not_change_what_the_log_fits(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [row(BPE, number) for number in range(40)])
    for options in ({"limit": 1}, {"sample": 0.2}, {"row": 30}):
        assert codes_of(results_of(log, METASPACE, **options))[0] == MISFIT_CODE  # type: ignore[arg-type]


# What is no reason


def test_ids_that_are_placeholders_say_nothing_of_a_tokenizer() -> None:
    for ids in ([0] * 60, list(range(60)), [1, 2, 3]):
        assert misfit(BPE, *[rollout(ids, talk(number), number) for number in range(4)]) is None
    dummy = replace(rollout(ids_of(METASPACE, 0), talk(0)), stated=Stated(dummy_tokens=True))
    assert misfit(BPE, dummy) is None


def test_texts_of_other_conversations_say_nothing_where_the_ids_come_back() -> None:
    assert misfit(BPE, *[rollout(ids_of(BPE, 1), talk(2)[:2], number) for number in range(4)]) is None
    other = [{"role": "user", "content": "nothing of this was ever given to the model"}] * 4
    assert misfit(BPE, *[rollout(ids_of(BPE, number), other, number) for number in range(4)]) is None


def test_few_ids_without_texts_are_not_enough() -> None:
    assert misfit(BPE, rollout(ids_of(METASPACE, 0))) is None
    assert misfit(BPE, Rollout(Place("log", 0), "toy")) is None


def test_many_ids_without_texts_that_do_not_come_back_are() -> None:
    many = [rollout(ids_of(METASPACE, number), None, number) for number in range(8)]
    assert sum(len(rollout.training_row.token_ids) for rollout in many if rollout.training_row is not None) > 512
    finding = misfit(BPE, *many)
    assert finding is not None
    assert "encoding that text again gives" in finding.hit.message
    assert misfit(METASPACE, *many) is None


def test_one_row_with_an_id_outside_the_vocabulary_is_a_fault_of_the_row() -> None:
    rows = [
        rollout([*ids_of(BPE, number), *([70_000, 70_001] if number == 2 else [])], talk(number))
        for number in range(8)
    ]
    assert misfit(BPE, *rows) is None
    finding = misfit(BPE, *[rollout([*ids_of(BPE, n), 70_000 + n], talk(n)) for n in range(8)])
    assert finding is not None
    assert "of the ids lie outside the vocabulary, in 8 of 8 rows" in finding.hit.message
    assert "logged texts" not in finding.hit.message, "texts that are found do not speak against a tokenizer"


def test_a_pipe_is_not_asked(tmp_path: Path) -> None:
    import threading

    pipe = tmp_path / "log.jsonl"
    os.mkfifo(pipe)
    lines = "".join(json.dumps(row(BPE, number)) + "\n" for number in range(3))
    feeder = threading.Thread(target=pipe.write_text, args=(lines,), daemon=True)
    feeder.start()
    assert MISFIT_CODE not in codes_of(results_of(str(pipe), METASPACE))
    feeder.join(10)


# The template

PLAIN = "{% for m in messages %}<<{{ m.role }}>> {{ m.content }}\n{% endfor %}"


def test_a_template_that_writes_other_control_tokens_is_another(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    log = written(tmp_path / "log.jsonl", [row(BPE, number) for number in range(6)])
    results = results_of(log, BPE, chat_template=str(template))
    (finding,) = results[0].findings
    assert (finding.code, finding.hit.cause) == (MISFIT_CODE, ANOTHER_TEMPLATE)
    assert "'<|im_start|>' where the template writes no control tokens" in finding.hit.message
    assert [code for code in codes_of(results) if code.startswith("TPL")] == []
    reasons = {skip.because for result in results for skip in result.skips}
    assert "the chat template does not fit the log (REC007)" in reasons


def test_a_prompt_without_a_template_says_nothing_of_one() -> None:
    texts = [talk(number) for number in range(4)]
    plain = ["\n".join(message["content"] for message in messages) for messages in texts]
    encoded = [toy.toy_tokenizer().encode(text).tolist() for text in plain]
    assert misfit(BPE, *[rollout(*pair) for pair in zip(encoded, texts, strict=True)]) is None


# Calls, and repairs


def test_a_log_of_calls_is_asked_by_its_last_call() -> None:
    ids = np.array(ids_of(METASPACE, 0), np.int32)
    calls = (Turn(ids[:60], ids[60:], completion_text=TALK[-1]),)
    call = Rollout(Place("log", 0), "toy", as_messages(talk(0), "messages"), turns=calls)
    assert misfit(BPE, call) is not None
    assert misfit(METASPACE, call) is None


def test_nothing_is_repaired_with_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    rows = [row(BPE, number) for number in range(6)]
    log, out = written(tmp_path / "log.jsonl", rows), tmp_path / "out.jsonl"
    repair = repair_rollouts(log, out, Settings(tokenizer=path_of(METASPACE)), RepairSettings(unsafe=True))
    list(repair)
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert repair.failing == 1, "the written log is said not to fit, as the log would be"


def test_a_row_of_a_log_that_does_not_fit_is_shown_with_that(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [row(BPE, number) for number in range(6)])
    code, page, _ = run("show", log, "--row", "3", "-t", path_of(METASPACE))
    assert code == 0
    assert "REC007: 0 of 24 logged texts are found" in page


# Real logs, where they are at hand


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
def test_real_logs_fit_the_tokenizer_that_wrote_them_and_no_other(tmp_path: Path) -> None:
    heads: dict[tuple[str, str], list[Rollout]] = {}
    for file in sorted((SHARED / "rollouts").glob("*/*.jsonl.gz")):
        log = tmp_path / "log.jsonl"
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            log.write_text("".join(islice(lines, 16)), encoding="utf-8")
        heads[file.parent.name, file.name] = list(read_rollouts(log))
    assert len(heads) == 6
    for folder in some(sorted((SHARED / "tokenizers").glob("*/")), 2):
        tokenizer = load_tokenizer(str(folder))
        renderer = make_renderer(tokenizer) if tokenizer.chat_templates else None
        for (model, mode), head in heads.items():
            finding = find_misfit(head, tokenizer, renderer)
            assert (finding is None) == (model == folder.name), (model, mode, folder.name)
