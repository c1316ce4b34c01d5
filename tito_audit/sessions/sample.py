"""A training sample: the ids of a rollout as a trainer reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tito_audit.record.finding import Finding, Severity


class SampleStatus(StrEnum):
    """How a rollout ended, by the names of slime."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """At a limit: of an answer, of turns, of tokens, or of the environment."""
    ABORTED = "aborted"
    """By an error; what was sampled until then stays."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One answer in a sample."""

    turn: int
    """The turn of the rollout, from 0; an agent may call the model several times in it."""
    start: int
    """Its tokens are `tokens[start:end]`."""
    end: int
    reward: float = 0.0
    """What the environment gave for the turn, at its last answer."""
    finish_reason: str | None = None
    weight_version: str | None = None


@dataclass(slots=True)
class Sample:
    """One training row with its reward, by the names of slime and of other token-in, token-out stacks.

    The columns are as long as `tokens`. `to_dict()` is a line of a log that `scan` reads as `tito_sample`.
    """

    prompt: str | list[dict[str, Any]]
    """The messages before the first answer, or the text."""
    response: str = ""
    """The text of the tokens from the first answer on."""
    tokens: list[int] = field(default_factory=list)
    """`[T]` every id as the sampler was given or returned it."""
    loss_mask: list[float] = field(default_factory=list)
    """`[T]` 1.0 where trained, else 0.0."""
    reward: float = 0.0
    """Of the whole rollout."""
    group_index: int | None = None
    index: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    rollout_log_probs: list[float] | None = None
    """`[T]` the sampler's logprob of a trained token, else 0.0."""
    status: SampleStatus = SampleStatus.COMPLETED
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as the chat template was given it; [] where messages alone do not render to the tokens."""
    prompt_length: int = 0
    """How many tokens come before the first answer."""
    turns: list[SampledTurn] = field(default_factory=list)
    """The answers trained here, in order; only of a rollout."""
    others: list[Sample] = field(default_factory=list)
    """More rows of the same rollout, where its calls are not one sequence; each answer is trained in one row."""
    findings: tuple[Finding, ...] = ()
    """What the audit of a rollout's row found."""
    error: Exception | None = None
    """What ended an aborted rollout."""

    @property
    def proven(self) -> bool:
        """Whether the audit found neither an error nor a warning, here and in `others`."""
        judged = all(finding.severity is Severity.NOTE for finding in self.findings)
        return judged and all(other.proven for other in self.others)

    @property
    def rewards(self) -> list[float]:
        """The reward of each answer of `turns`."""
        return [turn.reward for turn in self.turns]

    @property
    def token_rewards(self) -> list[float]:
        """`[T]` each reward at the last token of its answer."""
        values = [0.0] * len(self.tokens)
        for turn in self.turns:
            values[turn.end - 1] += turn.reward
        return values

    def to_dict(self) -> dict[str, Any]:
        """The sample as plain values, for JSON."""
        more: dict[str, Any] = {"messages": self.messages} if self.messages else {}
        turns = [
            {"turn": turn.turn, "start": turn.start, "end": turn.end, "reward": turn.reward} for turn in self.turns
        ]
        metadata = {**self.metadata, **({"turns": turns} if turns else {})}
        if self.error is not None:
            metadata["error"] = f"{type(self.error).__name__}: {self.error}"
        names = ("prompt", "response", "tokens", "loss_mask", "reward", "group_index", "index", "metadata")
        row = {name: getattr(self, name) for name in (*names, "rollout_log_probs")}
        return {**row, "metadata": metadata, "status": str(self.status), **more}
