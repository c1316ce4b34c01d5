"""Store: where remote files are, in four operations; and the ways in which one can fail, in words for people."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

TRIES = 5
"""How often a request that failed in passing is made, in all."""
PAUSE = 0.25
"""Seconds before the second try; twice as long before each further one."""
CONNECT_SECONDS = 10
READ_SECONDS = 30
"""How long a server may take to accept a connection, and to send the next bytes."""


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """What the store says of a file, under the names of `os.stat_result`."""

    st_size: int
    """Bytes."""
    st_mtime_ns: int = 0
    """When it was last written, in nanoseconds since 1970; 0 if the store does not say."""
    etag: str | None = None
    """Changes whenever the content does; None if the store does not say."""
    key: str = ""
    """How the store names exactly this version of the file."""
    ranges: bool = True
    """Whether the store sends parts of the file."""


class Refused(Exception):
    """The store refuses, in words for people: what it says and what to do. Caught within this room."""


class Missing(Refused):
    """There is no such file, folder, bucket or repository."""


class Changed(Refused):
    """The file is no longer what it was when the run began."""

    def __init__(self) -> None:
        super().__init__("the file was changed while it was read. Run again once nobody writes it.")


class Passing(Refused):
    """A failure that may be over when the request is made again."""

    after: float = 0.0
    """Seconds that the server asks to wait."""


def dropped() -> Passing:
    """The failure of a connection that was closed in the middle of an answer."""
    return Passing("the connection was dropped again and again. Look at the network and run again.")


class Store:
    """The files of one service. `url` is exactly what was asked for, a folder without a slash at its end.

    Every operation raises Refused with a reason free of secrets; Passing where another try may help.
    """

    def status(self, url: str) -> RemoteStatus:
        """What the store says of a file; Missing if there is none."""
        raise NotImplementedError

    def is_folder(self, url: str) -> bool:
        """Whether files are below this URL."""
        raise NotImplementedError

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """The URL and status of each file below a folder, at any depth."""
        raise NotImplementedError

    def entries(self, url: str) -> list[str]:
        """URLs of what is directly in a folder, the first thousand or so; for suggestions."""
        raise NotImplementedError

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes from `start` on, at most up to `stop`; fewer if the connection was dropped after some of them.

        Changed if the file is not the one that `status` describes.
        """
        raise NotImplementedError


def retried(operation: Callable[[], T]) -> T:
    """What the operation returns, tried again while it fails in passing; the last Passing after `TRIES` tries."""
    for tried in range(1, TRIES + 1):
        try:
            return operation()
        except Passing as failure:
            if tried == TRIES:
                raise
            wait(tried, failure)
    raise AssertionError


def wait(tried: int, failure: Passing) -> None:
    """Wait before the next try."""
    time.sleep(max(PAUSE * 2 ** (tried - 1), min(failure.after, READ_SECONDS)))


# The exceptions of drivers. Their own words may hold signed URLs and keys, so only codes and statuses are shown.


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a store that refuses."""

    credentials: str
    """How to pass credentials."""
    place: str
    """What may be misspelt."""


_UNTRUSTED = {"SSLCertVerificationError", "ClientConnectorCertificateError"}
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
_FORBIDDEN = {"AccessDenied", "AuthorizationPermissionMismatch", "AllAccessDisabled"}
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


def refusal(error: BaseException, advice: Advice) -> Refused:
    """What a driver's exception says of the store, as a Refused of the right kind."""
    errors = [error]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None and cause not in errors:
        errors.append(cause)
    codes = {code for error in errors for code in _codes(error)}
    if codes & _UNTRUSTED:
        return Refused("the server's certificate cannot be verified. Look at SSL_CERT_FILE and the proxy.")
    if any(isinstance(error, ssl.SSLError) for error in errors):
        return Refused("no secure connection can be made. Look at the address, https or http, and the proxy.")
    if codes & _CHANGED:
        return Changed()
    profile = "AWS_PROFILE names a profile that is not in AWS's configuration files."
    kinds: tuple[tuple[set[str], type[Refused], str], ...] = (
        ({"ProfileNotFound"}, Refused, profile),
        (_NO_CREDENTIALS, Refused, f"no credentials were found. {advice.credentials}"),
        (_WRONG_CREDENTIALS, Refused, f"the store refuses these credentials ({{code}}). {advice.credentials}"),
        (_FORBIDDEN, Refused, f"these credentials may not read it ({{code}}). {advice.credentials}"),
        ({"NoSuchBucket", "ContainerNotFound"}, Missing, f"there is no such bucket. {advice.place}"),
        (_BUSY, Passing, "the server is too busy or fails ({code}). Run again later."),
        (_SLOW, Passing, "the server does not answer in time. Look at the network and run again."),
        (_UNREACHABLE, Passing, "the server cannot be reached. Look at the address, the network and the proxy."),
        (_DROPPED, Passing, str(dropped())),
        (_MISSING, Missing, f"there is no such file. {advice.place}"),
    )
    for names, kind, words in kinds:
        if named := sorted(codes & names):
            return kind(words.format(code=named[0]))
    status = next((status for status in map(_status, errors) if status is not None), None)
    if status is not None:
        return of_status(status, advice)
    reason = getattr(error, "strerror", None)
    why = f": {reason}" if isinstance(reason, str) else ""
    return Refused(f"the store fails ({type(error).__name__}{why}). {advice.place}")


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


def _codes(error: BaseException) -> Iterator[str]:
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
            status: Any = getattr(source, name, None)
            if isinstance(status, int) and 400 <= status < 600:
                return status
    return None
