"""``tq-fs bench proxy``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

_PROXY = """\
Measures the Proxy before an engine that answers at once, and says which targets are met: the time
of a Step with a store in a local folder against the same Proxy without one, eight sessions at once;
how late its event loop wakes, with ordinary and with long replies; and the memory of sessions that
stay open. Each Proxy, and the engine, is a process of its own; the two are measured in turn, and
told are medians of paired ratios. Needs the extra proxy.

example:
  tq-fs bench proxy --json figures.json
  tq-fs bench proxy --repeats 3 --turns 4 --root /nvme/bench
"""


def add_bench_proxy(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = benches.add_parser(
        "proxy",
        help="the Proxy, with a store and without",
        description=_PROXY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    numbers = {
        "repeats": (10, "counted rounds of each measurement"),
        "sessions": (8, "sessions at once"),
        "turns": (8, "turns of a session in a round"),
        "tokens": (2048, "tokens of a reply"),
        "long-tokens": (65536, "tokens of a long reply"),
        "layers": (40, "layers of the model"),
        "held-sessions": (8, "sessions whose memory is measured, after as many others"),
        "held-turns": (100, "their turns, of 2,000 tokens"),
    }
    for name, (default, text) in numbers.items():
        add(f"--{name}", type=_positive, default=default, help=f"{text} (default: {default})")
    add("--root", type=Path, help="measure in this folder instead of on a loop mount")
    add("--json", metavar="FILE", help="write the figures as one JSON object; - is standard output")
    parser.set_defaults(run=_bench_proxy)


def _bench_proxy(arguments: argparse.Namespace) -> int:
    from tq_fs.bench import proxy  # noqa: PLC0415  # only this command needs it

    console = Console(stderr=arguments.json == "-")
    bench = proxy.ProxyBench(
        repeats=arguments.repeats,
        sessions=arguments.sessions,
        turns=arguments.turns,
        tokens=arguments.tokens,
        long_tokens=arguments.long_tokens,
        layers=arguments.layers,
        held_sessions=arguments.held_sessions,
        held_turns=arguments.held_turns,
        root=arguments.root,
    )
    measured = proxy.measure(bench, console)
    proxy.show(bench, measured, console)
    if arguments.json:
        text = json.dumps(proxy.document(bench, measured), indent=2)
        if arguments.json == "-":
            print(text)
        else:
            Path(arguments.json).write_text(text + "\n")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
