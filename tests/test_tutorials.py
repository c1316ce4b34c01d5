"""The tutorials: their logs are what their script writes, and what their code saves is a log that is read."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import runpy
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.command import run
from tests.tables import stored
from tests.tiers import DEEP
from tests.toy import TOKENIZERS
from tests.world import ROOT
from tito_audit import read_rollouts
from tito_audit.provider import GenerationResult

LOGS = ROOT / "fixtures" / "tutorials"
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)\n```$", re.M | re.S)


def code_of(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python of a page defines."""
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": "example"}
    for block in PYTHON.findall((ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")):
        exec(compile(block, page, "exec"), names)
    return names


def rows_of(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def test_the_logs_are_what_the_script_writes() -> None:
    script = runpy.run_path(str(LOGS / "make.py"))
    logs, tables = script["lines"](), script["tables"]()
    assert {path.stem for path in LOGS.glob("*.parquet")} == set(tables)
    assert all(pq.read_table(LOGS / f"{name}.parquet").equals(table) for name, table in tables.items())
    assert {path.stem for path in LOGS.glob("*.jsonl")} == set(logs)
    for name, text in logs.items():
        assert (LOGS / f"{name}.jsonl").read_text(encoding="utf-8") == text, (
            f"{name}: run fixtures/tutorials/make.py"
        )


def test_every_log_is_in_a_tutorial() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(
        f"fixtures/tutorials/{path.name}" in text for path in (*LOGS.glob("*.jsonl"), *LOGS.glob("*.parquet"))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_goes_from_a_fault_to_a_pass_and_a_gate(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    verdicts = re.findall(r"^(?:tito-audit: )?(passed|failed|nothing audited): ", text, re.M)
    assert "failed" in verdicts
    assert verdicts[-1] == "passed"
    assert re.findall("^## (Gate .*)", text, re.M)
    assert f"](tutorials/{page.name})" in (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")


# What they say of frameworks

SAID = stored(__file__, "SAID")


@pytest.mark.skipif(not DEEP, reason="`make deep` asks the frameworks")
@pytest.mark.parametrize("framework", SAID)
def test_options_of_a_framework_are_those_that_it_has(framework: str) -> None:
    folder = Path(os.environ.get("TITO_AUDIT_FRAMEWORKS", ROOT / ".cache" / "frameworks"))
    python = folder / framework / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no Python with the framework {framework}: run tests/frameworks/install.sh")
    done = subprocess.run([python, "-I", "-c", SAID[framework]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# What their code saves


def test_batches_of_a_rollout_function_are_kept_as_they_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = code_of("trl", monkeypatch)
    batches = rows_of(LOGS / "trl_masked.jsonl")
    left = iter(batches)
    wrapped = names["kept"](lambda prompts, trainer: next(left), tmp_path / "log")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(process_index=3))
    assert [wrapped([], trainer) for _ in batches] == batches
    assert rows_of(tmp_path / "log-3.jsonl") == batches


def test_sampled_and_given_tokens_keep_three_columns_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sample: dict[str, list[Any]] = {"completion_ids": [], "logprobs": [], "env_mask": []}
    extend = code_of("trl", monkeypatch)["extend"]
    extend(sample, [5, 6], [-0.5, -0.25])
    extend(sample, [7])
    assert sample == {"completion_ids": [5, 6, 7], "logprobs": [-0.5, -0.25, 0.0], "env_mask": [1, 1, 0]}


def test_an_agent_loop_that_is_kept_leaves_the_rows_that_are_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = rows_of(LOGS / "verl_tokens.jsonl")
    names = code_of("verl", monkeypatch)

    class Loop:
        async def run(self, sampling_params: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(**wanted[kwargs["number"]], metrics={})

    class Kept(names["Kept"], Loop):  # type: ignore[misc, name-defined]
        pass

    monkeypatch.chdir(tmp_path)
    for number, row in enumerate(wanted):
        assert asyncio.run(Kept().run({}, number=number)).prompt_ids == row["prompt_ids"]
    (log,) = tmp_path.glob("rollouts-*.jsonl")
    assert rows_of(log) == wanted


def test_responses_of_an_executor_are_kept_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = code_of("openrlhf", monkeypatch)
    response = {"prompt": "a", "observation_tokens": [1, 2], "action_ranges": [(1, 2)], "truncated": False}
    response |= {"rollout_log_probs": [0.0, -0.5], "mm_train_inputs": object()}

    class Executor:
        async def execute(self, prompt: str, **kwargs: Any) -> Any:
            return response

    class Kept(names["KeptResponses"], Executor):  # type: ignore[misc, name-defined]
        pass

    monkeypatch.chdir(tmp_path)
    assert asyncio.run(Kept().execute("a", label="b")) is response
    (log,) = tmp_path.glob("rollouts-*.jsonl")
    (rollout,) = read_rollouts(log)
    assert rollout.format == "openrlhf"
    assert rollout.training_row is not None
    assert rollout.training_row.loss_mask is not None
    assert rollout.training_row.loss_mask.tolist() == [False, True]


def test_a_range_begins_where_an_answer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, ranges = [5], list[tuple[int, int]]()
    code_of("openrlhf", monkeypatch)["append"](tokens, ranges, [6, 7], [8])
    assert (tokens, ranges) == ([5, 6, 7, 8], [(3, 4)])


def test_what_a_template_adds_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: tuple[list[Any], ...] = ([5], [1], [-0.5])
    code_of("verl", monkeypatch)["after_tool"](*columns, [6, 7])
    assert columns == ([5, 6, 7], [1, 0, 0], [-0.5, 0.0, 0.0])


def test_ids_and_logprobs_of_sglang_go_into_a_sample_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = SimpleNamespace(tokens=[1], rollout_log_probs=[], loss_mask=[], response_length=0)
    triples = [[-0.5, 5, None], [-0.25, 6, None]]
    code_of("slime", monkeypatch)["append"](sample, {"output_token_logprobs": triples})
    assert vars(sample) == {
        "tokens": [1, 5, 6],
        "rollout_log_probs": [-0.5, -0.25],
        "loss_mask": [1, 1],
        "response_length": 2,
    }


def test_batches_of_a_generator_are_kept_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class TrajectoryID:
        instance_id: str
        repetition_id: int

    rows = rows_of(LOGS / "skyrl_steps.jsonl")
    batches = [
        {**row, "trajectory_ids": [TrajectoryID(**values) for values in row["trajectory_ids"]]} for row in rows
    ]

    class Generator:
        async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
            return batches[input_batch]

    generator = code_of("skyrl", monkeypatch)["kept"](Generator(), tmp_path / "log")
    assert [asyncio.run(generator.generate(number, disable_tqdm=True)) for number in range(2)] == batches
    assert rows_of(tmp_path / "log") == rows


def test_a_group_of_a_managed_server_is_a_row_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Canned:
        name = model = "canned"

        async def generate_n(self, input_ids: Sequence[int], sampling: Any) -> Any:
            answer = GenerationResult(tuple(input_ids), (42, 7, 2002), (-0.5, -0.25, -0.125), finish_reason="stop")
            return (answer,) * sampling.n

    collect = code_of("atropos", monkeypatch)["collect"]
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    tokenizer = str(TOKENIZERS / "toy_bpe")
    group = asyncio.run(collect(Canned(), tokenizer, messages, lambda node: float(node.tokens[-1] == 2002)))
    log = tmp_path / "groups.jsonl"
    log.write_text(json.dumps(group) + "\n")
    assert group["scores"] == [1.0] * 8
    code, page, _ = run("scan", log, "-t", tokenizer, "-f", "concise", "--select", "MSK,LPR,TPL")
    assert (code, "8 rollouts" in page) == (0, True), page


@pytest.mark.parametrize(("page", "name"), [("vllm", "vllm_ids"), ("dynamo", "dynamo")])
def test_a_logged_call_of_a_server_is_read_with_its_ids(
    page: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = code_of(page, monkeypatch)
    calls = rows_of(LOGS / f"{name}.jsonl")
    requests: list[Any] = []

    def create(**request: Any) -> Any:
        requests.append(request)
        return SimpleNamespace(model_dump=lambda: calls[len(requests) - 1]["response"])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    log = tmp_path / "calls.jsonl"
    for call in calls:
        arguments = {name: call["request"][name] for name in ("model", "messages", "tools")}
        names["logged"](client, call["session_id"], path=log, **arguments)
    wanted = {key: calls[0]["request"][key] for key in ("return_token_ids", "nvext") if key in calls[0]["request"]}
    assert all(request["logprobs"] and request["extra_body"] == wanted for request in requests)
    flags = ("-t", str(TOKENIZERS / "toy_bpe"), "-f", "concise")
    pages = [run("scan", path, *flags)[1].replace(str(path), "LOG") for path in (log, LOGS / f"{name}.jsonl")]
    assert pages[0] == pages[1]
