"""A managed server over real vLLM: its nodes hold what was sampled, and a trainer's row of them scans clean."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.command import written
from tests.recording_proxy import recording
from tests.vllm.claims import scanned
from tests.vllm.server import VllmServer
from tito_audit import as_group, managed_server
from tito_audit.providers.vllm import VLLMProvider


async def _talked(url: str, server: VllmServer) -> Sequence[Any]:
    """The nodes of a conversation of four turns that goes on with the first of two answers."""
    provider = VLLMProvider(url)
    try:
        async with managed_server(provider, tokenizer=str(server.model)) as managed:
            messages: list[dict[str, Any]] = []
            for turn in range(4):
                messages = [*messages, {"role": "user", "content": f"Question {turn}?"}]
                answer = await managed.chat_completion(messages=messages, n=2, max_tokens=24, seed=turn)
                messages = [*messages, answer.choices[0].message.model_dump(exclude_none=True)]
            return list(managed.get_state()["nodes"])
    finally:
        await provider.close()


def test_nodes_hold_what_was_sampled_and_their_group_scans_clean(vllm_server: VllmServer, tmp_path: Path) -> None:
    with recording(vllm_server.url) as proxy:
        nodes = asyncio.run(_talked(proxy.url, vllm_server))
    sampled = [choice for exchange in proxy.sampled for choice in exchange.choices]
    assert len(sampled) == 8
    spans = [_spans(node.masked_tokens) for node in nodes]
    assert all(spans)
    answers_of_nodes = Counter()
    for node, runs in zip(nodes, spans, strict=True):
        for start, end in runs:
            answers_of_nodes[
                tuple(node.tokens[:start]), tuple(node.tokens[start:end]), tuple(node.logprobs[start:end])
            ] += 1
    wanted = {
        (tuple(answer["prompt_token_ids"]), tuple(answer["token_ids"]), tuple(answer["logprobs"]))
        for answer in sampled
    }
    assert set(answers_of_nodes) == wanted
    log = written(tmp_path / "groups.jsonl", [as_group(nodes, scores=[1.0] * len(nodes))])
    assert scanned(log, vllm_server) == (0, Counter())


def _spans(masked: Sequence[int]) -> list[tuple[int, int]]:
    """Where the trained stretches are."""
    edges = [at for at in range(1, len(masked)) if (masked[at] == -100) != (masked[at - 1] == -100)]
    ends = [*edges, len(masked)] if len(edges) % 2 else edges
    return list(zip(ends[::2], ends[1::2], strict=True))
