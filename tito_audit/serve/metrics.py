"""The gateway's metrics for Prometheus. No label holds anything of a session or a prompt."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OVERHEAD = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The numbers of one gateway."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self.requests = Counter("tito_audit_requests", "Answered requests", ("endpoint", "status"), registry=own)
        self.in_flight = Gauge("tito_audit_in_flight", "Requests in progress", registry=own)
        self.seconds = Histogram(
            "tito_audit_request_seconds", "Time to answer a request", ("endpoint",), registry=own, buckets=_SECONDS
        )
        self.prompt_seconds = Histogram(
            "tito_audit_prompt_seconds", "Time to make a prompt", registry=own, buckets=_OVERHEAD
        )
        self.overhead = Histogram(
            "tito_audit_overhead_seconds",
            "Time that the gateway itself takes for a request that does not stream",
            ("branch",),
            registry=own,
            buckets=_OVERHEAD,
        )
        self.prompt_tokens = Counter("tito_audit_prompt_tokens", "Prompt tokens", registry=own)
        self.kept_tokens = Counter(
            "tito_audit_kept_tokens", "Prompt tokens that came from stored answers", registry=own
        )
        self.sampled_tokens = Counter("tito_audit_sampled_tokens", "Sampled tokens", registry=own)
        self.branches = Counter(
            "tito_audit_prompts", "Prompts by branch: start, continues or fork", ("branch",), registry=own
        )
        self.forks = Counter("tito_audit_forks", "Forks by reason", ("reason",), registry=own)
        self.unfinished = Counter("tito_audit_unfinished", "Answers that were cut off", ("status",), registry=own)
        self.sessions = Gauge("tito_audit_sessions", "Sessions in memory", registry=own)
        self.log_errors = Counter("tito_audit_log_errors", "Calls that could not be logged", registry=own)

    def text(self) -> bytes:
        """All numbers in the text format of Prometheus."""
        return generate_latest(self._registry)
