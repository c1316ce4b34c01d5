"""Gates in trainers: what fails leaves the loss, is counted and kept, and too much of it stops training."""

from __future__ import annotations

import asyncio
import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.command import run as command
from tests.frameworks.ask import asked
from tests.tiers import some
from tito_audit import BatchAuditor, Settings, SetupError, scan_rollouts
from tito_audit.integrations import FITS, BatchGate, GateError

if find_spec("torch") is None:
    pytest.skip("the trainers' batches are tensors", allow_module_level=True)


def row(number: int, fault: bool = False) -> dict[str, Any]:
    """A training row of two turns."""
    random = np.random.default_rng(number)
    mask = np.repeat([0, 1, 0, 1], 10)
    logprobs = np.where(mask, -0.1 - random.exponential(1.0, 40), np.nan)
    logprobs[15] = 0.5 if fault else logprobs[15]
    return {"token_ids": random.integers(300, 900, 40), "loss_mask": mask, "logprobs": logprobs}


def rows(faulty: int = 1, size: int = 8) -> list[dict[str, Any]]:
    return [row(number, number < faulty) for number in range(size)]


def shown(log: Path | str) -> str:
    """What `tito-audit show` prints of the first row of a quarantine."""
    code, page, error = command("show", log, "--row", "0")
    assert (code, error) == (0, "")
    return page


def check_kept(log: Path | str, form: str) -> None:
    """The first row of a quarantine is of this format, and has the fault of `row`."""
    result = next(iter(scan_rollouts(log)))
    assert (result.rollout.format, [finding.code for finding in result.findings]) == (form, ["LPR504"])
    assert "error LPR504" in shown(log)


# The gate


def test_failing_rows_are_masked_counted_and_kept_as_a_log_that_a_scan_reads(tmp_path: Path) -> None:
    log = tmp_path / "gate" / "failing.jsonl"
    gate = BatchGate(max_rate=0.5, quarantine=log)
    gated = gate.check(3, rows(2))
    assert gated.masked.tolist() == gated.failing.tolist() == [True, True, *[False] * 6]
    counts = {name: gated.metrics[f"tito/{name}"] for name in ("rows", "failing_rows", "masked_rows", "errors")}
    assert counts == {"rows": 8, "failing_rows": 2, "masked_rows": 2, "errors": 2}
    assert gated.metrics["tito/findings/LPR504"] == 2
    gate.check(4, rows(1))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["tito_gate"]["step"], line["tito_gate"]["row"]) for line in lines] == [(3, 0), (3, 1), (4, 0)]
    codes = [[f.code for f in result.findings] for result in scan_rollouts(log, Settings(ignore=("REC009",)))]
    assert codes == [[finding["code"] for finding in line["tito_gate"]["findings"]] for line in lines]
    assert gate.failed == 3
    assert "error LPR504 row 15:16" in shown(log)


def test_a_gate_that_does_not_mask_still_counts_and_keeps(tmp_path: Path) -> None:
    log = tmp_path / "failing.jsonl"
    gated = BatchGate(mask=False, max_rate=None, quarantine=log).check(0, rows(8))
    assert gated.failing.all()
    assert not gated.masked.any()
    assert gated.metrics["tito/masked_rows"] == 0
    assert len(log.read_text().splitlines()) == 8


def test_too_many_failing_rows_stop_training_after_they_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "failing.jsonl"
    gate = BatchGate(max_rate=0.25, quarantine=log)
    gate.check(0, rows(2))
    says = r"^step 1: 3 of 8 rows fail \(38 %\), more than max_rate=0.25 allows; "
    with pytest.raises(GateError, match=says) as stopped:
        gate.check(1, rows(3))
    assert stopped.value.metrics["tito/failing_rows"] == 3
    assert len(log.read_text().splitlines()) == 5
    again = pickle.loads(pickle.dumps(stopped.value))  # as Ray sends it
    assert (str(again), again.step) == (str(stopped.value), 1)


def test_processes_stop_together_and_write_apart(tmp_path: Path) -> None:
    gate = BatchGate(max_rate=0.0, quarantine=tmp_path / "failing.jsonl")
    with pytest.raises(GateError, match=r"^step 0: 1 of 16 rows"):
        gate.check(0, rows(0), process=1, summed=lambda counts: [counts[0] + 8, counts[1] + 1])
    assert not list(tmp_path.iterdir())
    with pytest.raises(GateError, match="1 of 16"):
        gate.check(0, rows(1), process=0, summed=lambda counts: [counts[0] + 8, counts[1]])
    assert [file.name for file in tmp_path.iterdir()] == ["failing.0.jsonl"]


def test_the_first_steps_are_audited_and_then_every_so_many() -> None:
    gate = BatchGate(first=3, every=5)
    assert [step for step in range(16) if gate.due(step)] == [0, 1, 2, 5, 10, 15]


def test_the_mismatch_of_sampler_and_trainer_is_told_by_its_cause() -> None:
    batch = rows(0)
    for each in batch[:3]:
        each["trainer_logprobs"] = each["logprobs"] - 0.3
    metrics = BatchGate().check(0, batch).metrics
    causes = {name: count for name, count in metrics.items() if name.startswith("tito/mismatch/")}
    assert causes == {"tito/mismatch/rows": 3, "tito/mismatch/truncated_sampling": 3}
    assert metrics["tito/failing_rows"] == 0  # a warning; Settings(fail_on="warning") makes it fail


def test_equal_rows_of_a_group_are_no_fault() -> None:
    assert not BatchGate(Settings(fail_on="note")).check(0, [row(0)] * 4).failing.any()


def test_rows_of_any_format_have_the_findings_of_their_scan() -> None:
    log = Path(__file__).resolve().parents[1] / "fixtures" / "formats" / "generic.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
    codes = [f.code for f in BatchAuditor(Settings()).audit_rows(lines).findings]
    assert codes == [f.code for result in scan_rollouts(log, Settings(join=False)) for f in result.findings]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "`every` is 1 or more"),
        ({"max_rate": 2}, "a share between 0 and 1"),
        ({"quarantine": "failing.parquet"}, "ends in .jsonl"),
        ({"max_rates": 0.1}, "there is no option max_rates"),
    ],
)
def test_a_wrong_option_is_refused_in_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        BatchGate.of(options)


# Trainers that cannot be installed here: their hooks, called with batches in their own types


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, release: str, *modules: str) -> None:
    """A package of this version, with empty modules."""
    facts = folder / f"{package.replace('-', '_')}-{release}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    for name in modules:
        file = folder.joinpath(*name.split("."), "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports an adapter anew, and forgets it."""

    def imported(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, f"tito_audit.integrations.{name}", raising=False)
        return importlib.import_module(f"tito_audit.integrations.{name}")

    yield imported
    trainers = ("slime", "prime_rl", "nemo_rl")
    for name in list(sys.modules):
        if name.removeprefix("tito_audit.integrations.").split(".")[0] in trainers:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "package"), [("slime", "slime"), ("nemo_rl", "nemo-rl"), ("prime_rl", "prime-rl")]
)
def test_a_version_that_an_adapter_does_not_fit_is_refused_at_import(
    name: str, package: str, adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lowest, below = FITS[package]
    with pytest.raises(
        SetupError, match=rf"^The gate for {package} fits .*, which is not installed in this Python"
    ):
        adapter(name)
    installed(monkeypatch, tmp_path, package, "99.1", package.replace("-", "_"))
    with pytest.raises(SetupError) as refused:
        adapter(name)
    fits = f"The gate for {package} fits {package} from {lowest} on, below {below}; 99.1 is installed."
    assert str(refused.value) == fits


@dataclass
class Sample:
    """slime's `slime/utils/types.py`, the fields that training needs."""

    class Status(Enum):
        COMPLETED = "completed"

    tokens: list[int]
    response_length: int
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    index: int = 0
    reward: float = 1.0
    weight_versions: list[str] = field(default_factory=list)
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)


def samples(faulty: int = 1, size: int = 8) -> list[Sample]:
    made = [(each["token_ids"], each["loss_mask"], np.nan_to_num(each["logprobs"])) for each in rows(faulty, size)]
    return [Sample(ids.tolist(), 30, mask[10:].tolist(), values[10:].tolist()) for ids, mask, values in made]


def test_slime_removes_failing_samples_and_logs_the_counts(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, tmp_path, "slime", "0.3.1", "slime")
    log = tmp_path / "failing.jsonl"
    args = SimpleNamespace(tito_audit={"max_rate": 0.2, "quarantine": str(log), "fail_on": "warning", "every": 2})
    hook, batch, logged = adapter("slime").log_rollout_data, samples(), {"rollout/x": 1.0}
    assert hook(2, args, [batch[:4], batch[4:]], logged, 1.0) is False
    assert [sample.remove_sample for sample in batch] == [True, *[False] * 7]
    assert (logged["rollout/x"], logged["tito/failing_rows"]) == (1.0, 1.0)
    assert hook(3, args, samples(8), None, 1.0) is False  # not on the schedule
    with pytest.raises(GateError, match=r"^step 4: 8 of 8"):
        hook(4, args, samples(8), None, 1.0)
    results = list(scan_rollouts(log))
    assert {result.rollout.format for result in results if result.rollout} == {"slime"}
    assert "error LPR504" in shown(log)
    assert hook(6, args, samples(), None, 1.0) is False  # no tracker at hand: not silently
    assert [record.levelname for record in caplog.records if record.name.endswith(".slime")] == ["WARNING"]
    assert [{f.code for f in result.findings if f.code != "REC009"} for result in results][:2] == [{"LPR504"}] * 2


def test_slime_compares_with_the_trainers_logprobs_where_they_are_known(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    installed(monkeypatch, tmp_path, "slime", "0.3.1", "slime")
    batch = samples(0)
    data = {
        "tokens": [torch.tensor(sample.tokens) for sample in batch],
        "response_lengths": [30] * 8,
        "loss_masks": [torch.tensor(sample.loss_mask) for sample in batch],
        "rollout_log_probs": [torch.tensor(sample.rollout_log_probs) for sample in batch],
        "log_probs": [torch.tensor(sample.rollout_log_probs) for sample in batch],
    }
    data["log_probs"][5] = data["log_probs"][5] - 1.0
    args = SimpleNamespace(tito_audit={"fail_on": "warning", "max_rate": None})
    adapter("slime").rollout_data(args, 0, data)
    assert [bool(mask.any()) for mask in data["loss_masks"]] == [number != 5 for number in range(8)]


class Policy:
    """What NeMo-RL's loops call of a policy."""

    def __init__(self) -> None:
        self.trained: list[Any] = []

    def train(self, data: Any, loss_fn: Any, timer: Any = None) -> dict[str, Any]:
        self.trained.append(data["sample_mask"].tolist())
        return {"all_mb_metrics": {"loss": [0.5]}}


def test_nemo_rl_masks_failing_samples_before_the_policy_is_trained(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    installed(monkeypatch, tmp_path, "nemo-rl", "0.7.0", "nemo_rl")
    log = tmp_path / "failing.jsonl"
    gate = BatchGate(max_rate=0.2, quarantine=log)
    policy = adapter("nemo_rl").gated(Policy(), gate)

    def padded(name: str) -> torch.Tensor:
        columns = torch.tensor(np.nan_to_num(np.stack([each[name] for each in rows()])))
        return torch.nn.functional.pad(columns, (0, 8))

    data = {
        "input_ids": padded("token_ids"),
        "input_lengths": torch.full((8,), 40),
        "token_mask": padded("loss_mask"),
        "generation_logprobs": padded("logprobs").float(),
        "prev_logprobs": torch.zeros(8, 48),  # not computed
        "sample_mask": torch.ones(8),
        "advantages": torch.ones(8, 48),
    }
    results = policy.train(data, None, timer=None)
    assert policy.trained == [[0.0, *[1.0] * 7]]
    assert results["all_mb_metrics"]["loss"] == [0.5]
    assert results["all_mb_metrics"]["tito/failing_rows"] == [1.0]
    assert results["all_mb_metrics"]["tito/mismatch/rows"] == [0.0]
    check_kept(log, "nemo_rl")


class TrainingSample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """prime-rl's `src/prime_rl/transports/rollouts/types.py`, the fields of text."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[float] | None = None


@pytest.mark.parametrize("release", ["0.8.0", "0.8.1.dev67"])
def test_prime_rl_does_not_send_failing_samples(
    release: str, adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent, logged = list[int](), list[tuple[float, int]]()
    installed(
        monkeypatch, tmp_path, "prime-rl", release, "prime_rl.orchestrator.orchestrator", "prime_rl.monitors"
    )

    class Orchestrator:
        """What the gate needs of it."""

        def __init__(self) -> None:
            self.progress = SimpleNamespace(step=7)
            if release == "0.8.0":
                self.monitor = SimpleNamespace(log=note)

        async def finalize_train_batch(self, batch: Any) -> None:
            sent.append(len(batch.samples))

    def note(metrics: dict[str, float], step: int) -> None:
        logged.append((metrics["tito/failing_rows"], step))

    async def note_later(metrics: dict[str, float], step: int) -> None:
        note(metrics, step)

    importlib.import_module("prime_rl.orchestrator.orchestrator").Orchestrator = Orchestrator  # type: ignore[attr-defined]
    importlib.import_module("prime_rl.monitors").log = note_later  # type: ignore[attr-defined]
    log = tmp_path / "failing.jsonl"
    adapter("prime_rl").install(BatchGate(max_rate=0.2, quarantine=log))
    columns = [(each["token_ids"], each["loss_mask"] == 1, np.nan_to_num(each["logprobs"])) for each in rows()]
    texts = [TrainingSample(*(column.tolist() for column in row), [1.0] * 40, "env") for row in columns]
    batch = SimpleNamespace(samples=texts)
    asyncio.run(Orchestrator().finalize_train_batch(batch))
    assert (sent, logged) == ([7], [(1.0, 7)])
    check_kept(log, "prime_rl_sample")
    for sample in batch.samples[:2]:
        sample.logprobs[15] = 0.5
    with pytest.raises(GateError, match=r"^step 7: 2 of 7"):
        asyncio.run(Orchestrator().finalize_train_batch(batch))
    assert (sent, logged[1:]) == ([7], [(2.0, 7)])  # counted although it stopped


# Trainers that run here


FAULTS = {"mask off by one": "MSK401", "logprobs rolled": "LPR502", "re-tokenized": "SEQ301"}
FAULTS["old weights"] = "LPR509"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


def grpo(folder: Path, fault: str, how: str) -> Any:
    return json.loads(asked("trl", folder, fault, how).splitlines()[-1])


def test_a_clean_run_of_trl_has_the_losses_that_it_has_without_a_gate(model: Path) -> None:
    alone, gated = grpo(model, "none", "off"), grpo(model, "none", "callback")
    assert len(alone["losses"]) == 8
    assert gated["losses"] == alone["losses"]
    assert gated["stopped"] is None
    assert [entry["tito/failing_rows"] for entry in gated["gate"] if "tito/rows" in entry] == [0.0] * 4


@pytest.mark.parametrize("fault", some(list(FAULTS), 2))
def test_a_fault_stops_a_run_of_trl_at_its_step(fault: str, model: Path) -> None:
    run = grpo(model, fault, "callback")
    assert run["stopped"]["step"] == 2
    assert len(run["losses"]) == 2  # nothing was trained on it
    assert run["gate"][-1]["tito/failing_rows"] > 0
    assert FAULTS[fault] in {finding["code"] for line in run["quarantined"] for finding in line["findings"]}
    settings = Settings(fail_on="warning", tokenizer=str(model / "model"), ignore=("REC009",))
    codes = [{finding.code for finding in result.findings} for result in scan_rollouts(run["log"], settings)]
    assert codes == [{finding["code"] for finding in line["findings"]} for line in run["quarantined"]]
    assert FAULTS[fault] in command("show", run["log"], "--row", "0", "-t", model / "model")[1]


def test_failing_rows_leave_the_loss_of_trl_and_the_run_goes_on(model: Path) -> None:
    run = grpo(model, "old weights", "masks")
    assert run["stopped"] is None
    assert run["losses"][2:] == [0.0] * 6
    counts = [entry["tito/masked_rows"] for entry in run["gate"] if "tito/rows" in entry]
    assert counts == [0.0, 8.0, 8.0, 8.0]
    assert {line["step"] for line in run["quarantined"]} == {2, 4, 6}


def test_a_rollout_function_of_trl_is_audited_before_its_batch_is_made(model: Path) -> None:
    run = grpo(model, "mask off by one", "rollouts")
    assert (run["stopped"]["step"], len(run["losses"])) == (2, 2)


def test_verl_masks_failing_rows_of_a_batch_before_the_actor_is_updated(tmp_path: Path) -> None:
    for trainer in ("v0", "v1"):
        run = json.loads(asked("verl", tmp_path, trainer).splitlines()[-1])
        assert run["trained"] == [False, *[True] * 7]
        assert run["metrics"]["tito/failing_rows"] == 1.0
        assert run["stopped"] == "step 2: 8 of 8 rows fail (100 %), more than max_rate=0.2 allows"
        check_kept(run["log"], "verl_batch")


def test_importing_the_package_imports_no_trainer_and_no_torch() -> None:
    code = "import sys, tito_audit.integrations; print({'torch', 'trl', 'verl'} & sys.modules.keys())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
