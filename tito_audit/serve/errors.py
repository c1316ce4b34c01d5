"""Errors in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any

from tito_audit.errors import ProviderError, TitoAuditError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OPENAI_TYPES = _TYPES | {409: "conflict_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 504: "timeout_error", 529: "overloaded_error"}
_MAX_MESSAGE = 2000
"""The longest error message that a client gets, in characters."""


class Refused(TitoAuditError):
    """A request is answered with an error status."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def openai_error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error as OpenAI writes it."""
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": code}}


def anthropic_error(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error as Anthropic writes it; it has no `param` and `code`."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message[:_MAX_MESSAGE]}}


def refusal_of(error: ProviderError) -> Refused:
    """The error for a client whose call the provider refused or could not answer, with the server's status."""
    if error.status is not None and 400 <= error.status < 600:
        # The wrong key is the gateway's, not the client's.
        status = 502 if error.status in (401, 403) else error.status
        return Refused(str(error), status=status, code="upstream_error")
    timed_out = isinstance(error.__cause__, TimeoutError) or isinstance(error.__context__, TimeoutError)
    return Refused(str(error), status=504 if timed_out else 502, code="upstream_error")
