"""Classification of the object-store library's errors: whether a retry can help, and which details may appear
in a log.

The library's messages contain addresses with signatures, and the server's text, which may repeat an access
key. Only the status, the server's error code and the kind of broken connection are ever shown.
"""

import dataclasses
import re
from typing import Literal

from obstore import exceptions


class TruncatedReadError(Exception):
    """Error for a body that differs from the stored object: it ended early, or a bit flipped."""


class WriteMismatchError(Exception):
    """Error for an object in the store that differs from the bytes that were written."""


class ReadPastEndError(Exception):
    """Error for an object that ends before the requested bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreFailure:
    """A classified error.

    Attributes:
        kind: "again" if another try may succeed, "unsure" if two more tries soon after will decide, "final" if
            no try can succeed.
        reason: The cause, without secrets.
        advice: What to do if the error persists.
        missing: True if the object was not found.
    """

    kind: Literal["again", "unsure", "final"]
    reason: str
    advice: str
    missing: bool = False


RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
_AGAIN_CODES = ("RequestTimeout", "SlowDown", "ServerBusy", "InternalError", "OperationAborted")
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted")
_CREDENTIAL_CODES = (
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthFailure",
    "AuthenticationFailed", "InvalidSecurity", "RequestTimeTooSkewed",
)  # fmt: skip
_PERMISSION_CODES = ("AccessDenied", "AllAccessDisabled", "AuthorizationFailure", "AuthorizationPermissionMismatch")

_SERVER = "check that the endpoint is up and not overloaded, then run the same again"
_NETWORK = "check that the endpoint can be reached and is the right one, then run the same again"
CREDENTIALS = "check the credentials in the environment (docs/runs/stores.md lists the variables)"
_PERMISSION = "give these credentials the right to list, read, write and delete objects there"

# Patterns in the library's text about a broken connection, the most specific first.
_CONNECTIONS = (
    (r"TimedOut|kind: Timeout|timed out", "the request took too long", _NETWORK),
    (r"dns error|failed to lookup", "the endpoint's name can't be resolved", _NETWORK),
    (r"kind: ConnectionRefused|Connection refused", "the connection was refused", _NETWORK),
    (r"kind: ConnectionReset|Connection reset|BrokenPipe|Broken pipe", "the connection was reset", _NETWORK),
    (r"IncompleteMessage|IncompleteBody|UnexpectedEof|end of file before", "the answer was cut short", _NETWORK),
    (r"kind: Connect\b", "no connection could be made", _NETWORK),
    (r"kind: (Request|Decode|Interrupted|Body)\b|reqwest|hyper", "the connection broke", _NETWORK),
)
_METADATA = re.compile("performing token request|/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity/")


def classify_failure(error: Exception) -> StoreFailure | None:
    """Classify an error; None if it is not a store's."""
    text = str(error)
    if isinstance(error, ReadPastEndError):
        return StoreFailure(
            kind="final", reason=text, advice="it was cut short, or is not the object that was expected"
        )
    if isinstance(error, TruncatedReadError | WriteMismatchError):
        return StoreFailure(kind="again", reason=text, advice=_NETWORK)
    if not isinstance(error, exceptions.BaseError | FileNotFoundError):
        return None
    if isinstance(error, exceptions.InvalidPathError):
        advice = "remove or rename that object, or use another folder"
        return StoreFailure(kind="final", reason="an object's name there has an empty part, '.' or '..'", advice=advice)
    status, code = _status(text), _code(text)
    details = " ".join(filter(None, ["status" if status else "", str(status or ""), code]))
    if code in _NO_BUCKET_CODES:
        return StoreFailure(
            kind="final", reason=f"there is no such bucket ({details})", advice="create it, or correct the address"
        )
    if _METADATA.search(text.split("\n", 1)[0]):
        advice = f"{CREDENTIALS}; without them the machine's own role is asked for, which did not answer"
        return StoreFailure(kind="unsure", reason="no credentials were found", advice=advice)
    if code in _CREDENTIAL_CODES or isinstance(error, exceptions.UnauthenticatedError) or status == 401:
        return StoreFailure(
            kind="final", reason=f"the credentials are refused ({details or 'status 401'})", advice=CREDENTIALS
        )
    if isinstance(error, exceptions.PermissionDeniedError) or status == 403 or code in _PERMISSION_CODES:
        return StoreFailure(kind="final", reason=f"permission denied ({details or 'status 403'})", advice=_PERMISSION)
    if isinstance(error, FileNotFoundError) or status == 404:
        reason = f"not found ({details})" if details else "not found"
        return StoreFailure(kind="unsure", reason=reason, advice="check the address", missing=True)
    if status in RETRYABLE_STATUSES or code in _AGAIN_CODES:
        return StoreFailure(kind="again", reason=f"the server answers {details}", advice=_SERVER)
    if status is not None:
        advice = "set the bucket's region and endpoint in the environment" if status < 400 else _NETWORK
        return StoreFailure(kind="final", reason=f"the server answers {details}", advice=advice)
    return _without_status(text)


def is_past_end(error: Exception) -> bool:
    """Return True if the error means that an object has no such bytes."""
    return _status(str(error)) == 416 or "Wanted range starting at" in str(error)


def _without_status(text: str) -> StoreFailure:
    if "BadScheme" in text:
        advice = "use an https:// endpoint, or set AWS_ALLOW_HTTP=true where the network is to be trusted"
        return StoreFailure(kind="final", reason="the endpoint is http://, which is not allowed", advice=advice)
    if "InvalidCertificate" in text or "invalid peer certificate" in text:
        return StoreFailure(kind="final", reason="the endpoint's certificate is not trusted", advice=_NETWORK)
    for pattern, reason, advice in _CONNECTIONS:
        if re.search(pattern, text):
            return StoreFailure(kind="again", reason=reason, advice=advice)
    return StoreFailure(kind="again", reason="the answer could not be understood", advice=_NETWORK)


def _status(text: str) -> int | None:
    found = re.search(r"status(?: code)?: ([345]\d\d)\b", text)
    return int(found.group(1)) if found else None


def _code(text: str) -> str | None:
    found = re.search(r"<Code>([A-Za-z]{1,60})</Code>|\(code: ([A-Za-z]{1,60})\)", text)
    return found.group(1) or found.group(2) if found else None
