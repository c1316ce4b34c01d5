"""`convert` of rows that are single calls: joined, each sampled token is trained once in the context that it saw.

What has to come out is worked out from the plain JSON of the calls, token after token.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import written
from tests.forms import LOGS
from tests.tiers import examples, some
from tests.world import ROOT, lines_of
from tito_audit import RecordError, Settings, StorageError, convert_rollouts
from tito_audit.convert.run import Conversion
from tito_audit.settings.model import Override

SHARED = ROOT.parent / "shared"
JOINED = [log for log in LOGS if log.stem != "tinker_tokendb"]
"""Logs whose prompts need no join."""
few = settings(max_examples=examples(12, 200), deadline=None)
BY_SESSION = Settings(session="session_id")
Json = dict[str, Any]
Trained = Counter[tuple[tuple[int, ...], int, float | None]]
"""Sampled tokens: what came before, the token, its logprob."""


def call(session: object, prompt: Sequence[int], completion: Sequence[int], **more: Any) -> Json:
    tokens = {"prompt_ids": [*prompt], "completion_ids": [*completion], "logprobs": [-0.5 * t for t in completion]}
    return {"session_id": session, **tokens, **more}


def sampled(calls: Iterable[Json]) -> Trained:
    counts: Trained = Counter()
    for row in calls:
        seen = tuple(row["prompt_ids"])
        for token, logprob in zip(row["completion_ids"], row["logprobs"], strict=True):
            counts[seen, token, logprob] += 1
            seen += (token,)
    return counts


def trained(rows: Iterable[Json]) -> Trained:
    counts: Trained = Counter()
    for row in rows:
        ids = tuple(row["token_ids"])
        for at, (token, mask) in enumerate(zip(ids, row["loss_mask"], strict=True)):
            if mask:
                counts[ids[:at], token, row["logprobs"][at] if "logprobs" in row else None] += 1
    return counts


def converted(
    log: Path | list[Path], to: str = "rows", chosen: Settings = BY_SESSION
) -> tuple[Conversion, list[Json]]:
    first = log if isinstance(log, Path) else log[0]
    out = first.with_name(f"{first.stem}.{to}.jsonl")
    conversion = convert_rollouts(log, to, out, chosen, lossy=True, overwrite=True)
    return conversion, lines_of(out)


ids = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[Json]]:
    """Calls of some conversations, over some files: continued, retried, drifted, of sub-agents, in any order."""
    calls: list[Json] = []
    for session in range(draw(st.integers(1, 3))):
        earlier: list[Json] = []
        for _ in range(draw(st.integers(1, 6))):
            how = (
                draw(st.sampled_from(["continued", "continued", "retried", "drifted", "agent"]))
                if earlier
                else "agent"
            )
            base = draw(st.sampled_from(earlier)) if earlier else {}
            if how == "agent":
                prompt = [*draw(ids)]
            elif how == "retried":
                prompt = base["prompt_ids"]
            elif how == "continued":
                prompt = [*base["prompt_ids"], *base["completion_ids"], *draw(ids)]
            else:
                prompt = [*base["prompt_ids"], *(9 for _ in base["completion_ids"]), *draw(ids)]
            completion = draw(st.lists(st.integers(1, 4), max_size=3))
            earlier.append(call(f"s{session}", prompt, completion, number=len(calls)))
            calls.append(earlier[-1])
    calls += [call(None, draw(ids), draw(ids), number=-1) for _ in range(draw(st.integers(0, 2)))]
    calls = draw(st.permutations(calls))
    cut = draw(st.integers(0, len(calls)))
    return [part for part in (calls[:cut], calls[cut:]) if part]


@few
@given(conversations(), st.sampled_from(["rows", "slime", "tito_sample"]))
def test_every_sampled_token_is_trained_once_in_the_context_that_it_saw(
    parts: list[list[Json]], form: str
) -> None:
    calls = [row for part in parts for row in part]
    with TemporaryDirectory() as folder:
        logs = [written(Path(folder) / f"{at}.jsonl", part) for at, part in enumerate(parts)]
        if not any(row["completion_ids"] for row in calls):
            with pytest.raises(RecordError, match="none of"):
                converted(logs, form)
            return
        conversion, rows = converted(logs, form)
        assert conversion.carried.rows_read == len(calls)
        if form != "rows":
            assert conversion.written is not None
            _, rows = converted(conversion.written, chosen=Settings(join=False))
        assert trained(rows) == sampled(calls)


@few
@given(conversations())
def test_the_calls_of_a_conversation_are_listed_and_become_the_same_rows(parts: list[list[Json]]) -> None:
    calls = [row for part in parts for row in part]
    with TemporaryDirectory() as folder:
        logs = [written(Path(folder) / f"{at}.jsonl", part) for at, part in enumerate(parts)]
        conversion, rows = converted(logs, "calls")
        assert conversion.carried.not_converted == 0
        assert sampled(turn for row in rows for turn in row["calls"]) == sampled(calls)
        named = [row["session_id"] for row in rows if row.get("session_id") is not None]
        assert sorted(named) == sorted({row["session_id"] for row in calls} - {None})
        if any(row["completion_ids"] for row in calls):
            listed = written(Path(folder) / "listed.jsonl", rows)
            again = converted(listed, chosen=Settings(join=False))[1]
            assert Counter(map(row_key, again)) == Counter(map(row_key, converted(logs)[1]))


def row_key(row: Json) -> str:
    return json.dumps([row["token_ids"], row["loss_mask"], row["logprobs"], row.get("session_id")])


@pytest.mark.parametrize("how", ["gz", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(how: str, tmp_path: Path) -> None:
    calls = [call(f"s{at % 3}", range(1, 2 + at), [9 + at], number=at) for at in range(9)]
    _, expected = converted(written(tmp_path / "plain.jsonl", calls))
    log = tmp_path / f"log.jsonl.{how}" if how == "gz" else tmp_path / "log.parquet"
    if how == "gz":
        log.write_bytes(gzip.compress((tmp_path / "plain.jsonl").read_bytes()))
    else:
        pq.write_table(pa.Table.from_pylist(calls), log, row_group_size=4)  # type: ignore[no-untyped-call]
    assert converted(log)[1] == expected


def test_a_log_of_calls_that_grows_while_it_is_converted_gives_no_file(tmp_path: Path) -> None:
    calls = [call("a", [1], [2]), call("a", [1, 2, 3], [4])]
    log, out = written(tmp_path / "log.jsonl", calls), tmp_path / "out.jsonl"
    conversion = Conversion(log, "rows", out, BY_SESSION)
    list(conversion.survey())
    written(log, [*calls, call("a", [1, 2, 3, 4, 5], [6])])
    with pytest.raises(StorageError, match="changed while it was converted"):
        list(conversion.write())
    assert not out.exists()


@pytest.mark.parametrize("log", JOINED, ids=lambda log: log.name)
def test_joined_or_not_the_same_tokens_of_every_example_log_are_trained(log: Path, tmp_path: Path) -> None:
    def rows(settings: Settings) -> list[Json]:
        out = tmp_path / "out.jsonl"
        convert_rollouts(log, "rows", out, settings, lossy=True, overwrite=True)
        return [row for row in lines_of(out) if "loss_mask" in row]

    try:
        alone = rows(Settings(join=False))
    except RecordError:
        pytest.skip("none of its rows can be converted")
    assert trained(rows(Settings())) == trained(alone)


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("model", some(["smollm2", "gemma-3", "qwen2.5-coder"], 1))
def test_calls_of_real_models_become_the_rows_of_their_rollouts(model: str, mode: str, tmp_path: Path) -> None:
    with gzip.open(SHARED / "rollouts" / model / f"{mode}.jsonl.gz", "rt", encoding="utf-8") as lines:
        whole = some([json.loads(line) for line in lines][:60], 12)
    calls = []
    for row in whole:
        answers = [k for k, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for at, turn in zip(answers, row["calls"], strict=True):
            sent, answer = row["messages"][:at], row["messages"][at]
            calls.append({"session_id": row["id"], "messages": [*sent, answer], "tools": row["tools"], **turn})
    random.Random(0).shuffle(calls)
    conversion, rows = converted(written(tmp_path / "calls.jsonl", calls))
    assert conversion.carried.not_converted == 0
    joined = {
        (row["session_id"], tuple(row["token_ids"]), tuple(row["loss_mask"]), str(row["logprobs"])) for row in rows
    }
    _, whole_rows = converted(written(tmp_path / "whole.jsonl", whole), chosen=Settings())
    assert joined == {
        (row["id"], tuple(row["token_ids"]), tuple(row["loss_mask"]), str(row["logprobs"])) for row in whole_rows
    }
    assert len(joined) == len(rows) == len(whole_rows)
    assert (mode == "retok") == (conversion.carried.forked > 0)
    ends = {row["id"]: row["messages"] for row in whole}
    last = {
        row["session_id"]: row["messages"] for row in rows if len(row["messages"]) == len(ends[row["session_id"]])
    }
    assert last == ends
    # Without a key they are joined by what they saw and said, and the same tokens are trained.
    nameless = [{key: value for key, value in row.items() if key != "session_id"} for row in calls]
    by_history, rows = converted(written(tmp_path / "nameless.jsonl", nameless), chosen=Settings())
    assert by_history.carried.joined > 0
    names = {
        "prompt_ids": "prompt_token_ids",
        "completion_ids": "generation_token_ids",
        "logprobs": "generation_log_probs",
    }
    assert trained(rows) == sampled({ours: row[theirs] for ours, theirs in names.items()} for row in calls)


def test_each_log_is_read_with_its_own_settings(tmp_path: Path) -> None:
    plain = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [None, -0.5]}
    other = {"ids": [3, 4], "lm": [0, 1], "lp": [None, -0.5]}
    logs = [written(tmp_path / "a.jsonl", [plain]), written(tmp_path / "b.jsonl", [other])]
    columns = {"token_ids": "ids", "loss_mask": "lm", "logprobs": "lp"}
    chosen = Settings(overrides=(Override((str(logs[1]),), {"columns": columns}),))
    _, rows = converted(logs, chosen=chosen)
    assert [row["token_ids"] for row in rows] == [[1, 2], [3, 4]]
