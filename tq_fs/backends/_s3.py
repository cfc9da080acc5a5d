"""What both S3 drivers share: settings by the ecosystem's usual ways, and one mapper of errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from tq_fs.errors import (
    BucketMissing,
    ClockSkewed,
    CredentialsExpired,
    CredentialsMissing,
    DependencyMissing,
    InvalidConfig,
    ObjectMissing,
    StorageDenied,
    StorageFailed,
    StorageRefused,
    StorageThrottled,
    StorageUnreachable,
    TqFsError,
    WrongRegion,
)
from tq_fs.storage_options import StorageOptions, without_secrets

OPTIONS = (
    *("endpoint_url", "region", "addressing_style", "unsigned_payload"),
    *("profile", "key", "secret", "token", "anon"),
)
_DEFAULT_REGION = "us-east-1"  # what servers other than Amazon's expect
_SLOWEST = 1024 * 1024  # bytes of one upload a second; slower ones count as stuck
_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """Where a bucket is and how it is spoken to; no credentials.

    Attributes
    ----------
    bucket
        Its name.
    endpoint_url
        Of the server, without a ``/`` at its end; None for Amazon's.
    region
        Of the bucket.
    path_style
        Whether the bucket stands in the path instead of the host name.
    unsigned_payload
        Whether signatures leave out the SHA-256 of what is sent, which only obstore can over plain
        HTTP. By default over TLS, which detects damage itself; without it the server must.
    profile
        Of the AWS configuration files; None for the default one.
    timeout_s
        Seconds a request may take to connect, and to bring further bytes.
    """

    bucket: str
    endpoint_url: str | None
    region: str
    path_style: bool
    unsigned_payload: bool
    profile: str | None
    timeout_s: float

    def upload_s(self, nbytes: int) -> float:
        """Return the seconds that an upload may take until it is answered."""
        return max(self.timeout_s, nbytes / _SLOWEST)


def settings_of(bucket: str, options: StorageOptions, timeout_s: float) -> S3Settings:
    """Bring options, environment and AWS configuration files together, in this order.

    Raises
    ------
    InvalidConfig
        An unknown option, or one that makes no sense.
    """
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise InvalidConfig(
            f"unknown options {sorted(unknown)}",
            subject="storage_options of an s3:// store",
            remedy=f"known are {list(OPTIONS)}",
        )
    _check_credentials(options)
    profile = options.text("profile")
    configured = _profile(profile)
    endpoint = options.text("endpoint_url") or _environment(_ENDPOINT) or configured["endpoint_url"]
    region = options.text("region") or _environment(_REGION) or configured["region"]
    style = options.text("addressing_style") or "auto"
    if style not in ("auto", "path", "virtual"):
        raise InvalidConfig(
            f"{style!r}", subject="addressing_style", remedy="auto, path or virtual"
        )
    unsigned = options.resolved("unsigned_payload")
    if unsigned not in (None, False, True):
        raise InvalidConfig(f"{unsigned!r}", subject="unsigned_payload", remedy="true or false")
    if endpoint:
        _check_endpoint(endpoint)
    plain = (endpoint or "").startswith("http://")
    return S3Settings(
        bucket=bucket,
        endpoint_url=endpoint.rstrip("/") if endpoint else None,
        region=region or _DEFAULT_REGION,
        path_style=style != "virtual",
        unsigned_payload=not plain if unsigned is None else unsigned,
        profile=profile,
        timeout_s=timeout_s,
    )


def _check_credentials(options: StorageOptions) -> None:
    """Refuse half a pair, for which one driver or another would take the environment's."""
    if ("key" in options) != ("secret" in options) or ("token" in options and "key" not in options):
        raise InvalidConfig(
            f"only {[n for n in ('key', 'secret', 'token') if n in options]} given",
            subject="storage_options of an s3:// store",
            remedy="give key and secret (and token), or none of them and the environment's",
        )


def _check_endpoint(endpoint: str) -> None:
    found = urlsplit(endpoint)
    if "@" in endpoint or found.query or found.fragment:
        raise InvalidConfig(
            f"{without_secrets(endpoint)!r} was given with more than an address",
            subject="endpoint_url",
            remedy="credentials belong into key and secret",
        )
    if not re.match(r"https?://[^/]", endpoint):
        raise InvalidConfig(f"{endpoint!r} is no http:// or https:// URL", subject="endpoint_url")


def _environment(names: tuple[str, ...]) -> str | None:
    return next((os.environ[n] for n in names if os.environ.get(n)), None)


def _profile(name: str | None) -> dict[str, str | None]:
    """Return what the AWS configuration files say of a profile."""
    try:
        import botocore.exceptions  # noqa: PLC0415  # optional, and slow to import
        import botocore.session  # noqa: PLC0415
    except ImportError as error:
        raise missing("botocore", "s3") from error
    try:
        found = botocore.session.Session(profile=name).get_scoped_config()
    except botocore.exceptions.ProfileNotFound as error:
        raise InvalidConfig(f"{error}", subject="profile") from error
    return {key: found.get(key) for key in ("endpoint_url", "region")}


# ---------------------------------------------------------------- errors


class _Kind(NamedTuple):
    """What an answer means, by its code or its HTTP status, and what to do about it."""

    error: type[TqFsError]
    codes: frozenset[str]
    statuses: frozenset[int]
    remedy: str


def _kind(error: type[TqFsError], codes: str, statuses: Iterable[int], remedy: str) -> _Kind:
    return _Kind(error, frozenset(codes.split()), frozenset(statuses), remedy)


# The first that fits. Source: Amazon S3 API Reference, "List of error codes".
_KINDS = (
    _kind(
        ClockSkewed,
        "RequestTimeTooSkewed AccessDeniedRequestTimeTooSkewed",
        (),
        "set this machine's clock (NTP)",
    ),
    _kind(
        CredentialsExpired,
        "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
        (),
        "renew the token, or use a role that renews itself",
    ),
    _kind(
        StorageThrottled,
        "SlowDown SlowDownRead SlowDownWrite Throttling ThrottlingException RequestLimitExceeded "
        "TooManyRequests",
        (429, 503),
        "use fewer writer_threads, or spread over prefixes",
    ),
    _kind(
        WrongRegion,
        "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed "
        "IllegalLocationConstraintException",
        (301, 307),
        "set region in storage_options to the bucket's",
    ),
    _kind(BucketMissing, "NoSuchBucket", (), "create the bucket, or correct the store's URL"),
    _kind(
        StorageRefused,
        "NotImplemented",
        (501,),
        "this server cannot do that: use another one",
    ),
    _kind(
        StorageFailed,
        "RequestTimeout InternalError XAmzContentSHA256Mismatch BadDigest IncompleteBody "
        "OperationAborted",
        (408, *range(500, 600)),
        "",
    ),
    _kind(
        StorageDenied,
        "InvalidToken",  # with status 400
        (401, 403),
        "check the credentials, and that their policy allows s3:GetObject, PutObject, DeleteObject "
        "and ListBucket here",
    ),
)


def s3_error(code: str, status: int, text: str, subject: str) -> TqFsError:
    """Return our error for a server's answer.

    Parameters
    ----------
    code, status, text
        Code and message of its body, as far as it has one, and the HTTP status.
    """
    problem = f"{text or 'refused'} ({code or 'HTTP'} {status})"
    for kind in _KINDS:
        if code in kind.codes or status in kind.statuses:
            return kind.error(problem, subject=subject, remedy=kind.remedy)
    if status == 404:
        return ObjectMissing("no such object", subject=subject)
    return StorageRefused(
        problem, subject=subject, remedy="check endpoint_url and addressing_style"
    )


def unreachable(text: str, subject: str) -> StorageUnreachable:
    """Return the error of a request that got no whole answer."""
    return StorageUnreachable(text, subject=subject, remedy="check endpoint_url and the network")


def no_credentials(text: str, subject: str) -> CredentialsMissing:
    """Return the error of a request that could not be signed."""
    return CredentialsMissing(
        text,
        subject=subject,
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or key and secret in "
        "storage_options",
    )


def missing(library: str, extra: str) -> DependencyMissing:
    """Return the error of an optional library that is not there."""
    return DependencyMissing(
        f"{library} is not installed",
        subject="an object store",
        remedy=f"pip install 'tq-fs[{extra}]'",
    )
