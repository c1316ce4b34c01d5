"""Starts `trl vllm-serve` with a scripted engine in the place of vLLM: `python serve.py PORT WORKERS`.

The engine has the shapes of vLLM's (`vllm/outputs.py`, `vllm/logprobs.py`, `vllm/sampling_params.py`). The n-th
token that follows a prompt is its last id plus n; the logprob of id i is -i / 100, and the likeliest others are
the ids after it. Each call is a line of the file that TRL_ENGINE_LOG names.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

END, CONTEXT = 99, 40


@dataclass
class StructuredOutputsParams:
    regex: str | None = None
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    structured_outputs: StructuredOutputsParams | None = None


@dataclass
class Logprob:
    logprob: float
    rank: int


@dataclass
class CompletionOutput:
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None


def candidates(token: int, count: int, top_k: int = -1) -> dict[int, Logprob]:
    """The sampled token and the likeliest others; NaN for those that top_k excludes."""
    values = [
        -other / 100 if top_k < 1 or other < token + top_k else float("nan")
        for other in range(token, token + max(1, count))
    ]
    return {token + place: Logprob(value, place + 1) for place, value in enumerate(values)}


class LLM:
    def __init__(self, **settings: Any) -> None:
        assert settings["logprobs_mode"] == "processed_logprobs"

    def generate(self, prompts: list[Any], sampling_params: SamplingParams) -> list[RequestOutput]:
        with Path(os.environ["TRL_ENGINE_LOG"]).open("a", encoding="utf-8") as log:
            log.write(json.dumps([prompts, vars(sampling_params)], default=vars) + "\n")
        return [engine_answer(prompt, sampling_params) for prompt in prompts]

    def collective_rpc(self, method: str, *args: Any) -> None:
        raise AssertionError(f"{method}: weights are left alone")


def engine_answer(prompt: Any, how: SamplingParams) -> RequestOutput:
    ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else [1]
    if len(ids) >= CONTEXT:
        raise ValueError(f"the prompt is longer than {CONTEXT}")
    longest = min(how.max_tokens or CONTEXT, CONTEXT - len(ids))
    outputs = []
    for choice in range(how.n):
        sampled: list[int] = []
        while len(sampled) < longest and (not sampled or sampled[-1] not in (END, *how.stop_token_ids)):
            sampled.append(ids[-1] + len(sampled) + 1 + choice)
        tops = None
        if how.logprobs is not None:
            tops = [candidates(token, how.logprobs + 1, how.top_k) for token in sampled]
        outputs.append(CompletionOutput(tuple(sampled), tops))
    scores = None
    if how.prompt_logprobs is not None:
        scores = [None, *(candidates(token, how.prompt_logprobs + 1) for token in ids[1:])]
    return RequestOutput(list(ids), outputs, scores)


def install() -> None:
    """This file as all the modules of vLLM that TRL imports."""
    own = sys.modules[__name__]
    names = ("", ".sampling_params", ".utils", ".utils.network_utils", ".distributed", ".distributed.utils")
    pynccl = ".distributed.device_communicators"
    for name in (*names, pynccl, f"{pynccl}.pynccl"):
        module = ModuleType(f"vllm{name}")
        vars(module).update(
            {key: value for key, value in vars(own).items() if key[0] != "_" or key == "__version__"}
        )
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module


__version__ = "0.20.0"
GuidedDecodingParams = StructuredOutputsParams
PyNcclCommunicator = StatelessProcessGroup = None


def get_open_port() -> int:
    """The port of data-parallel workers, which the scripted engine does not use."""
    return 29500


if __name__ != "tests.trl_server.serve":
    install()

if __name__ == "__main__":
    from trl.scripts.vllm_serve import ScriptArguments, main

    main(
        ScriptArguments(model="toy", host="127.0.0.1", port=int(sys.argv[1]), data_parallel_size=int(sys.argv[2]))
    )
