"""An environment in any of the usual shapes, as its first messages and its reply to each text.

`reset` and `step` of Gymnasium (also rLLM, OpenEnv), `init` and `step` of SkyRL (NovaSky-AI/SkyRL
`skyrl_gym/envs/base_text_env.py`: BaseTextEnv), `reset`, tools and `get_reward` of TRL (huggingface/trl
`trl/trainer/grpo_trainer.py`: environment_factory), or a function that scores a text.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tito_audit.errors import SetupError


@dataclass(frozen=True, slots=True)
class _StepResult:
    """What an environment says to an agent's text."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    action: str | None = None
    """The agent's text as the environment wants it in the history; None: as it is."""


def _as_step(value: Any) -> _StepResult:
    """What `step` returned, in any of the usual shapes; ValueError for another.

    A number is the reward of a text that ends the rollout. A text or messages are an observation. A tuple is
    `(observation, reward, done)`, with `info`, or with `terminated, truncated, info` as in Gymnasium. An object or
    mapping has `observation` or `observations`, `reward`, `done` or `terminated`, `truncated`.
    """
    if isinstance(value, bool | int | float) or hasattr(value, "item"):  # also of numpy and torch
        return _StepResult(reward=float(value), done=True)
    if isinstance(value, tuple):
        if len(value) not in (3, 4, 5):
            raise ValueError(f"step returned {len(value)} values, not (observation, reward, done)")
        truncated = bool(value[3]) if len(value) == 5 else False
        return _StepResult(_observed(value[0]), _reward(value[1]), bool(value[2]) or truncated, truncated)
    if isinstance(value, str | list):
        return _StepResult(_observed(value))
    if isinstance(value, Mapping) and "role" in value:
        return _StepResult(_observed(value))
    names = ("observation", "observations", "reward", "done", "terminated", "truncated", "postprocessed_action")
    if isinstance(value, Mapping):
        fields = {name: value.get(name) for name in names}
    else:
        fields = {name: getattr(value, name, None) for name in names}
    if all(fields[name] is None for name in names[:5]):
        raise ValueError(f"step returned {type(value).__name__}, which holds no observation, reward or done")
    observation = fields["observations"] if fields["observation"] is None else fields["observation"]
    truncated = bool(fields["truncated"])
    done = bool(fields["done"]) or bool(fields["terminated"]) or truncated
    return _StepResult(
        _observed(observation), _reward(fields["reward"]), done, truncated, fields["postprocessed_action"]
    )


def _reward(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _observed(value: Any) -> list[dict[str, Any]]:
    """An observation as messages: a text is the user's."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [dict(message) for message in value]
    raise ValueError(f"an observation is a text or messages, not {type(value).__name__}")


class Environment:
    """An environment of any of the shapes, as `begin` and `step`."""

    def __init__(self, environment: Any, call: Callable[..., Any]) -> None:
        if isinstance(environment, type):
            environment = environment()
        self._environment, self._call = environment, call
        self._step = getattr(environment, "step", None)
        self.tools: dict[str, Callable[..., Any]] = {}
        if self._step is None and callable(environment):
            self._step = environment
        elif self._step is None and hasattr(environment, "reset"):
            # Of the class, since looking at an instance runs its properties.
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
                if name[0] != "_" and name not in ("reset", "get_reward", "close"):
                    self.tools[name] = getattr(environment, name)
        if self._step is None and not self.tools:
            raise SetupError(
                f"{type(environment).__name__} has no `step`, is no function, and has no tools.\n"
                "Pass an environment with reset and step, or a function that scores a text. Environments that run "
                "the model themselves (verifiers, Atropos) take the gateway's address or a managed server."
            )

    async def begin(self, prompt: list[dict[str, Any]], task: Mapping[str, Any]) -> list[dict[str, Any]]:
        if hasattr(self._environment, "init"):
            value = await self._call(self._environment.init, prompt)
            return _observed(value[0] if isinstance(value, tuple) else value)
        if not hasattr(self._environment, "reset"):
            return prompt
        value = await self._call(self._environment.reset, **task)
        if isinstance(value, tuple):
            value = value[0]
        elif isinstance(value, Mapping) and "role" not in value:
            value = value.get("observation")
        else:
            value = getattr(value, "observation", value)
        last = prompt[-1] if prompt else {}
        if (
            isinstance(value, str)
            and last.get("role") == "user"
            and self.tools
            and isinstance(last["content"], str)
        ):
            return [*prompt[:-1], {**last, "content": last["content"] + value}]  # as TRL does
        return [*prompt, *_observed(value)]

    async def step(self, message: Mapping[str, Any]) -> _StepResult:
        if not self.tools:
            return _as_step(await self._call(self._step, message.get("content") or ""))
        calls = message.get("tool_calls") or ()
        if calls:
            return _StepResult([await self._tool_message(call) for call in calls])
        scores = getattr(self._environment, "get_reward", None)
        return _StepResult(reward=0.0 if scores is None else _reward(await self._call(scores)), done=True)

    async def _tool_message(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """What a tool returns, or how it failed: models may name tools that do not exist."""
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
            content = await self._call(self.tools[function["name"]], **arguments)
        except Exception as error:  # the user's code, by a model's arguments
            content = {"error": f"{type(error).__name__}: {error}"}
        text = content if isinstance(content, str) else json.dumps(content, default=str)
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": text}

    def schemas(self) -> list[dict[str, Any]]:
        """Its tools for a chat template, from their docstrings as TRL reads them."""
        if not self.tools:
            return []
        try:
            from transformers.utils import get_json_schema
        except ImportError:
            raise SetupError("Tools of an environment need transformers: pip install 'tito-audit[hf]'") from None
        try:
            return [get_json_schema(tool) for tool in self.tools.values()]
        except Exception as error:  # transformers' own have no class in common
            raise SetupError(
                f"{type(self._environment).__name__}: a tool cannot be described ({error}).\n"
                "Give each public method types and a docstring with its arguments, or begin its name with `_`."
            ) from None
