"""Prometheus' text format, without prometheus-client: for servers that have a page of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tq_fs.metrics._values import Distribution, Family

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Family]) -> str:
    """Return metrics as text (exposition format 0.0.4)."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    spec = family.spec
    yield f"# HELP {spec.name} {_escaped(spec.help)}"
    yield f"# TYPE {spec.name} {spec.kind}"
    for values, value in family.series.items():
        labels = dict(zip(family.labels, values, strict=True))
        if isinstance(value, Distribution):
            for bound, count in value.buckets():
                yield f"{spec.name}_bucket{_braces({**labels, 'le': bound})} {count}"
            yield f"{spec.name}_count{_braces(labels)} {value.observations}"
            yield f"{spec.name}_sum{_braces(labels)} {value.total!r}"
        else:
            yield f"{spec.name}{_braces(labels)} {value!r}"


def _braces(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped
