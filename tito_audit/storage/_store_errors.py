"""The exceptions of store drivers as Refused: what happened and what to do, without secrets.

A driver's own words may hold signed URLs and keys, so only codes and statuses of them are shown.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tito_audit.storage._store import Changed, Missing, Passing, Refused


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a store that refuses."""

    credentials: str
    """How to pass credentials."""
    place: str
    """What may be misspelt."""


_NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("DefaultCredentialsError", "CredentialUnavailableError", "RefreshError", "SSOTokenLoadError"),
    *("UnauthorizedSSOTokenError", "TokenRetrievalError"),
}
_WRONG_CREDENTIALS = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    *("AuthenticationFailed", "ClientAuthenticationError", "InvalidSecurity", "AuthorizationHeaderMalformed"),
    *("RequestTimeTooSkewed", "InvalidAuthenticationInfo", "InvalidClientTokenId"),
}
_MISSING = {
    *("NoSuchKey", "NoSuchBucket", "BlobNotFound", "ContainerNotFound", "ResourceNotFoundError"),
    *("FileNotFoundError", "NoSuchVersion"),
}
_UNREACHABLE = {
    *("EndpointConnectionError", "ClientConnectorError", "ClientConnectorDNSError", "ConnectError", "gaierror"),
    *("ConnectionRefusedError", "ServiceRequestError", "ProxyError", "ProxyConnectionError", "NewConnectionError"),
    *("TransportError", "ClientProxyConnectionError"),
}
_DROPPED = {
    *("ClientPayloadError", "IncompleteRead", "IncompleteReadError", "ServerDisconnectedError", "ReadError"),
    *("ConnectionClosedError", "ConnectionResetError", "BrokenPipeError", "RemoteProtocolError"),
    *("ChunkedEncodingError", "ResponseStreamingError", "HTTPClientError", "ClientOSError", "ConnectionError"),
    *("ServiceResponseError", "RemoteDisconnected", "ProtocolError", "HttpProcessingError", "BadStatusLine"),
}
_SLOW = {
    *("ReadTimeoutError", "ConnectTimeoutError", "TimeoutError", "FSTimeoutError", "ReadTimeout"),
    *("ConnectTimeout", "ServerTimeoutError", "SocketTimeoutError", "ConnectionTimeoutError", "PoolTimeout"),
}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy", "InternalError"}
_CHANGED = {"PreconditionFailed", "ConditionNotMet", "FileExpired"}
_UNTRUSTED = {"SSLCertVerificationError", "ClientConnectorCertificateError"}


def refusal(error: BaseException, advice: Advice) -> Refused:
    """What a driver's exception says of the store, as a Refused of the right kind."""
    found = list(_chain(error))
    names = {name for one in found for name in _names(one)}
    if names & _UNTRUSTED:
        return Refused("the server's certificate cannot be verified. Look at SSL_CERT_FILE and the proxy.")
    if any(isinstance(one, ssl.SSLError) for one in found):
        return Refused("no secure connection can be made. Look at the address, https or http, and the proxy.")
    status = next((code for code in map(_status, found) if code is not None), None)
    for known, kind, words in _words(advice):
        if said := sorted(names & known):
            return kind(words.format(code=said[0])) if kind is not Changed else Changed()
    return of_status(status, advice) if status is not None else Refused(f"{_other(found[0])} {advice.place}")


def of_status(status: int, advice: Advice, after: float = 0.0) -> Refused:
    """What an HTTP status says, as a Refused of the right kind."""
    if status in (412, 416):
        return Changed()
    if status in (404, 410):
        return Missing(f"there is no such file ({status}). {advice.place}")
    if status in (401, 407):
        return Refused(f"the store refuses these credentials, or wants some ({status}). {advice.credentials}")
    if status == 403:
        return Refused(f"these credentials may not read it (403). {advice.credentials}")
    if status in (408, 425, 429) or status >= 500:
        busy = Passing(f"the server is too busy or fails ({status}). Run again later.")
        busy.after = after
        return busy
    return Refused(f"the server answers with status {status}. {advice.place}")


def _words(advice: Advice) -> tuple[tuple[set[str], type[Refused], str], ...]:
    return (
        (_CHANGED, Changed, ""),
        ({"ProfileNotFound"}, Refused, "AWS_PROFILE names a profile that is not in AWS's configuration files."),
        (_NO_CREDENTIALS, Refused, f"no credentials were found. {advice.credentials}"),
        (_WRONG_CREDENTIALS, Refused, f"the store refuses these credentials ({{code}}). {advice.credentials}"),
        (
            {"AccessDenied", "AuthorizationPermissionMismatch", "AllAccessDisabled"},
            Refused,
            f"these credentials may not read it ({{code}}). {advice.credentials}",
        ),
        ({"NoSuchBucket", "ContainerNotFound"}, Missing, f"there is no such bucket. {advice.place}"),
        (_BUSY, Passing, "the server is too busy or fails ({code}). Run again later."),
        (_SLOW, Passing, "the server does not answer in time. Look at the network and run again."),
        (
            _UNREACHABLE,
            Passing,
            "the server cannot be reached. Look at the address, the network and the proxy.",
        ),
        (_DROPPED, Passing, "the connection was dropped again and again. Look at the network and run again."),
        (_MISSING, Missing, f"there is no such file. {advice.place}"),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and what caused it."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _names(error: BaseException) -> Iterator[str]:
    """What an exception is called: its classes, and the code that the service gave."""
    yield from (kind.__name__ for kind in type(error).__mro__[:-3])
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
    code = getattr(error, "error_code", None)
    if code is not None:
        yield str(getattr(code, "value", code))


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception is about."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response if isinstance(response, int) and response >= 400 else None
    for source in (response, error):
        for name in ("status_code", "status", "code"):
            value: Any = getattr(source, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def _other(error: BaseException) -> str:
    said = getattr(error, "strerror", None)
    return f"the store fails ({type(error).__name__}{f': {said}' if isinstance(said, str) else ''})."
