"""Weight versions of tokens, run-length encoded, and how many of them a trajectory may hold.

A *run* is ``(version, tokens)``: so many tokens in a row that one version of the weights generated.
Prompt tokens count to the first run of their Step, whose weights gave their routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tq_fs.errors import InvalidConfig, InvalidField, VersionSpan

Run = tuple[str, int]
Runs = tuple[Run, ...]
_MOST_DIGITS = 100  # of a whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """Which weight versions the Steps of one session may hold together.

    Attributes
    ----------
    partial_rollout
        Whether a trajectory may go on under other weights than it began with. False: all Steps of
        a session are of one version.
    max_span
        How far apart its versions may be; None for any. Where all are whole numbers, the newest
        minus the oldest; else how many there are beside the first.
    """

    partial_rollout: bool = True
    max_span: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if not isinstance(self.partial_rollout, bool):
            raise InvalidConfig(f"{self.partial_rollout!r}", subject="partial_rollout")
        span = self.max_span
        if span is not None and (type(span) is not int or span < 0):
            raise InvalidConfig(f"{span!r} where an integer >= 0 belongs", subject="max_span")

    def check(self, versions: Iterable[str], subject: str) -> None:
        """Refuse versions that may not stand in one trajectory.

        Parameters
        ----------
        versions
            Of all its tokens; any order, also more than once.

        Raises
        ------
        VersionSpan
        """
        known = set(versions)
        if not self.partial_rollout and len(known) > 1:
            raise VersionSpan(
                f"tokens of the weight versions {_listed(known)}",
                subject=subject,
                remedy="generate it anew with one version, or allow partial_rollout",
            )
        if self.max_span is not None and span_of(known) > self.max_span:
            raise VersionSpan(
                f"the weight versions {_listed(known)} are {span_of(known)} apart",
                subject=subject,
                remedy=f"drop the session, or raise max_span above {self.max_span}",
            )


ANY_VERSIONS = VersionRule()


def span_of(versions: Iterable[str]) -> int:
    """Return how far versions are apart: by their numbers, or by their count where not all are."""
    known = set(versions)
    if known and all(v.isascii() and v.isdigit() and len(v) <= _MOST_DIGITS for v in known):
        numbers = [int(v) for v in known]
        return max(numbers) - min(numbers)
    return max(0, len(known) - 1)


def joined(runs: Iterable[Run]) -> Runs:
    """Return runs with equal neighbours put together, and without those that are empty."""
    out: list[Run] = []
    for version, tokens in runs:
        if out and out[-1][0] == version:
            out[-1] = (version, out[-1][1] + tokens)
        elif tokens:
            out.append((version, tokens))
    return tuple(out)


def from_token(runs: Sequence[Run], start: int) -> Runs:
    """Return what is left of runs after their first `start` tokens."""
    out: list[Run] = []
    for version, tokens in runs:
        out.append((version, max(0, tokens - start)))
        start = max(0, start - tokens)
    return joined(out)


def step_runs(version: str, given: Sequence[Run], held: int, response: int, subject: str) -> Runs:
    """Return the runs over all tokens that a Step holds.

    Parameters
    ----------
    version
        The short form: of all tokens.
    given
        Runs over the response; empty for the short form.
    held, response
        Tokens that the Step holds, and how many of the last were generated.

    Raises
    ------
    InvalidField
        Both forms, no runs of text and number, or other than `response` tokens in them.
    """
    if not given:
        return ((_text(version, subject), held),)
    runs = [_run(run, subject) for run in given]
    total = sum(n for _, n in runs)
    if version:
        raise InvalidField("version and versions", subject=subject, remedy="give one of them")
    if total != response:
        raise InvalidField(
            f"weight versions of {total} tokens where {response} were generated", subject=subject
        )
    first, tokens = runs[0]
    return joined([(first, tokens + held - response), *runs[1:]]) or ((first, 0),)


def _run(run: object, subject: str) -> Run:
    pair = tuple(run) if isinstance(run, tuple | list) else ()
    if len(pair) != 2:
        raise InvalidField(f"{run!r} is no pair of version and tokens", subject=subject)
    version, tokens = pair
    if type(tokens) is not int or tokens < 0:
        raise InvalidField(f"a weight version of {tokens!r} tokens", subject=subject)
    return _text(version, subject), tokens


def _text(version: object, subject: str) -> str:
    if not isinstance(version, str):
        raise InvalidField(f"weight version {version!r} is no text", subject=subject)
    return version


def _listed(versions: set[str]) -> str:
    shown = sorted(versions, key=lambda v: (len(v), v))
    return ", ".join(map(repr, shown[:8])) + (" …" if len(shown) > 8 else "")
