"""A managed server over a real model: what it samples is what it scores, and its log passes a scan."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.tiers import examples
from tests.toy import toy_tokenizer
from tito_audit import as_group, managed_server
from tito_audit.providers import open_provider

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("openai", "torch"))), reason="openai or torch is not installed"
)

THANKS = {"role": "user", "content": "Go on."}


async def conversations(folder: Path, seeds: range, track_tree: bool) -> list[dict[str, Any]]:
    """For each seed the nodes of three turns, the second with two choices, and what the model scores for each."""
    provider = open_provider(f"hf={folder}")
    played = []
    try:
        for seed in seeds:
            async with managed_server(provider, tokenizer=folder, track_tree=track_tree) as managed:
                history: list[Any] = [{"role": "user", "content": f"Say something about {seed}."}]
                for turn in range(3):
                    answer = await managed.chat_completion(
                        messages=history, n=1 + turn % 2, max_tokens=12, temperature=1.0, seed=100 * seed + turn
                    )
                    message = answer.choices[-1].message.model_dump(exclude_none=True)
                    history = [*history, message, THANKS]
                nodes = managed.get_state()["nodes"]
            scores = [await provider.score(node.tokens) for node in nodes]
            played.append({"nodes": nodes, "scores": scores})
    finally:
        await provider.close()
    return played


@pytest.mark.parametrize("track_tree", [False, True])
def test_what_a_model_sampled_is_what_it_scores_and_the_log_is_clean(
    tiny_model: Path, tmp_path: Path, track_tree: bool
) -> None:
    played = asyncio.run(conversations(tiny_model, range(examples(2, 20)), track_tree))
    assert len({len(conversation["nodes"]) for conversation in played} - {0}) >= 1
    recoded = 0
    for conversation in played:
        trained = 0
        for node, scored in zip(conversation["nodes"], conversation["scores"], strict=True):
            assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
            pairs = list(zip(node.masked_tokens[1:], node.logprobs[1:], scored.logprobs, strict=True))
            assert all(abs(logprob - model_says) < 1e-3 for label, logprob, model_says in pairs if label != -100)
            trained += sum(label != -100 for label in node.masked_tokens)
            recoded += toy_tokenizer().encode(node.full_text).tolist() != node.tokens
        assert trained <= 4 * 12, "each of the four answers is trained once"
    assert recoded, "a random model samples ids that no tokenizer writes"
    log = tmp_path / "groups.jsonl"
    rows = [as_group(conversation["nodes"], [0.0] * len(conversation["nodes"])) for conversation in played]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--select", "REC,TOK,SEQ,MSK,LPR", "--output-format", "json")
    code, out = run("scan", log, "-t", tiny_model, *flags)[:2]
    errors = {rule: counts for rule, counts in json.loads(out)["summary"]["findings"].items() if counts["error"]}
    assert (code, errors) == (0, {})
