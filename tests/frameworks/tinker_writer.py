"""Datums made by tinker-cookbook: `python tinker_writer.py FOLDER`, by a Python with it.

Written for tinker-cookbook 0.6.1 and tinker 0.38.0. Not a test: tests run it with another Python and read what
it wrote. Into FOLDER it puts

    datums.jsonl   what `trajectory_to_data` makes of a clean and of a broken conversation, as the SDK sends it
    expected.json  for each datum all its tokens, and its logprobs, advantages and mask after the first

`python tinker_writer.py --read FILE` prints the same of a JSONL file as the SDK reads it; it fails when that
refuses a datum. The conversations are those of `fixtures/formats/make_nemo.py`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))

import tinker
from make_nemo import CONVERSATION, WEATHER, Call, Toy, calls_of, chat_tools
from tinker.types._pydantic_types.datum import Datum as WireDatum
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition


def trajectory(calls: list[Call]) -> Trajectory:
    """The calls as transitions of an environment."""
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(call.prompt),
            ac=TokensWithLogprobs(tokens=call.completion, maybe_logprobs=call.logprobs, sequence_id=f"q{number}"),
            reward=1.0,
            episode_done=number == len(calls) - 1,
        )
        for number, call in enumerate(calls)
    ]
    return Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())


def wire(datum: tinker.Datum) -> dict[str, Any]:
    """A datum as JSON: its models' own form, and its provenance as plain objects."""
    fields: dict[str, Any] = {
        "model_input": datum.model_input.model_dump(mode="json"),
        "loss_fn_inputs": {
            name: {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
            for name, tensor in datum.loss_fn_inputs.items()
        },
    }
    for name in ("model_input_spans", "loss_fn_input_spans"):
        spans = getattr(datum, name)
        fields[name] = None if spans is None else [dataclasses.asdict(span) for span in spans]
    return fields


def facts(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a datum in JSON, after the SDK has read it."""
    read = WireDatum.model_validate({name: row[name] for name in ("model_input", "loss_fn_inputs")})
    inputs = [token for chunk in read.model_input.chunks for token in chunk.tokens]
    columns = {name: list(tensor.data) for name, tensor in read.loss_fn_inputs.items()}
    assert all(tensor.shape == [len(tensor.data)] for tensor in read.loss_fn_inputs.values())
    targets = columns.pop("target_tokens")
    assert inputs[1:] == targets[:-1]
    return {"ids": [inputs[0], *targets], **columns}


def write(folder: Path) -> None:
    """Every datum, and what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    toy, tools = Toy(), chat_tools([WEATHER])
    clean = calls_of(toy, CONVERSATION, tools)
    broken = calls_of(toy, CONVERSATION, tools, resplit=1, reencode=True)
    rows = [wire(datum) for calls in (clean, broken) for datum in trajectory_to_data(trajectory(calls), 0.5)]
    (folder / "datums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "expected.json").write_text(json.dumps([facts(row) for row in rows]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
        print(json.dumps([facts(json.loads(line)) for line in lines]))
    else:
        write(Path(sys.argv[1]))
