"""Long texts that are encoded beside the event loop, and what the gateway says of its own time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving import fetched, gated, logged, make_gateway, served
from tests.tiers import examples
from tests.toy import toy_tokenizer
from tito_audit.provider import count_waits, waiting
from tito_audit.serve import gateway as apart

SAID = "It rains.<|im_end|>"
LONG = "A long text. " * 3000


def ask(address: str, content: str, session: str) -> Any:
    """The headers of the answer to a question."""
    body = {"messages": [{"role": "user", "content": content}]}
    return fetched(address, "/v1/chat/completions", body, **{"X-Session-ID": session})[1]


def test_other_requests_do_not_wait_for_a_long_text_to_be_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [SAID, SAID])
    segments = gateway.tokenizer.segments
    begun, go_on, encode = threading.Event(), threading.Event(), segments.encode_uncached

    def slowly(texts: list[str]) -> Any:
        begun.set()
        assert go_on.wait(60)
        return encode(texts)

    monkeypatch.setattr(segments, "encode_uncached", slowly)
    with served(gateway) as address:
        long = threading.Thread(target=ask, args=(address, LONG, "long"))
        long.start()
        assert begun.wait(60)
        ask(address, "What is the weather?", "short")
        assert [row["session_id"] for row in logged(log)] == ["short"]
        go_on.set()
        long.join(60)
    rows = logged(log)
    assert [row["session_id"] for row in rows] == ["short", "long"]
    whole = gateway.tokenizer.vocabulary.text(np.array(rows[1]["prompt_token_ids"], np.int32))
    assert rows[1]["prompt_token_ids"] == toy_tokenizer().encode(whole).tolist()
    assert LONG.strip() in whole


@settings(max_examples=examples(30, 500))
@given(
    st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "user\n", "你好", " wörter", "\ud83d", "x" * 9]), max_size=9
    )
)
def test_a_text_has_the_same_ids_wherever_it_was_encoded(parts: list[str]) -> None:
    text, tokenizer = "".join(parts), toy_tokenizer()
    segments = tokenizer.segments
    segments.remember(segments.encode_uncached(segments.uncached_segments(text)))
    assert segments.uncached_segments(text) == []
    (reference,) = tokenizer.encode_single_threaded([text])
    assert tokenizer.encode(text).tolist() == reference.tolist()


def test_a_short_text_and_one_that_is_known_start_no_thread() -> None:
    tokenizer = toy_tokenizer()
    beside = apart.BackgroundEncoder(tokenizer)
    tokenizer.encode(LONG)
    asyncio.run(beside.encode_ahead("short"))
    asyncio.run(beside.encode_ahead(LONG))
    assert beside._threads is None
    asyncio.run(beside.encode_ahead(LONG + "and more"))
    assert beside._threads is not None


def test_an_answer_says_what_the_gateway_added_without_the_time_of_the_server(tmp_path: Path) -> None:
    async def main() -> float:
        waits = count_waits()
        await asyncio.sleep(0.01)
        with waiting():
            await asyncio.sleep(0.05)
        return waits.seconds

    assert 0.04 < asyncio.run(main()) < 10
    with gated(tmp_path, [SAID]) as (address, *_):
        headers = ask(address, "What is the weather?", "one")
        metrics = fetched(address, "/metrics")[2].decode()
    assert float(headers["X-Tito-Overhead-Ms"]) > 0
    assert 'tito_audit_overhead_seconds_count{branch="start"} 1.0' in metrics
