"""``tq-fs proxy``: the Proxy, in front of rollout engines."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tq_fs import flags
from tq_fs.errors import DependencyMissing, InvalidConfig
from tq_fs.logs import configure_logs
from tq_fs.metrics import Metrics, MetricsServer
from tq_fs.model_config import dense_layers_of_model

if TYPE_CHECKING:
    from tq_fs.proxy import ProxySettings

TOKEN_VARIABLE = "TQ_FS_PROXY_TOKEN"  # its name, not a token

_PROXY = """\
Stands between agents and rollout engines (SGLang). Agents speak OpenAI's chat completions to it,
with a session id in a header. It records every model invocation token by token, with logprobs and,
for models with experts, the experts chosen, and hands out finished trajectories as references.
Large fields go to a store as they come, where the flags say so; otherwise they stay in memory.

Prints its URL, and nothing else, on standard output once it takes requests; log lines go to
standard error. SIGTERM or Ctrl-C end it: it takes no more requests, finishes Steps that are being
recorded, and leaves open sessions to the sweep of the next start.

example:
  tq-fs proxy --model /models/qwen3 --upstream http://127.0.0.1:30000

then an agent's base_url is http://127.0.0.1:8800/v1, and X-Session-Id a header of its requests.
With several engines and a store:

  tq-fs proxy --model /models/qwen3 --upstream http://gpu-0:30000 --upstream http://gpu-1:30000 \\
      --use-rollout-routing-replay --enable-transfer-queue --transfer-queue-config store.yaml \\
      --routed-experts-dtype auto --host 0.0.0.0 --token-file token
"""


def add_proxy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "proxy",
        help="record what agents ask of rollout engines",
        description=_PROXY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_ends(parser)
    _add_recording(parser)
    flags.add_arguments(parser)
    _add_watching(parser)
    parser.set_defaults(run=_proxy)


def _add_ends(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("its two ends").add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="of the model that the engines serve: its tokenizer, chat template and config.json",
    )
    add("--served-model-name", metavar="NAME", help="in answers (default: the folder's name)")
    add(
        "--upstream",
        action="append",
        required=True,
        metavar="URL",
        help="base URL of an engine, http://host:30000 say; may be repeated: a session stays with "
        "one of them, for its prefix cache",
    )
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    add(
        "--port",
        type=int,
        default=8800,
        help="port to listen at; 0 takes a free one (default: %(default)s)",
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that requests carry, as Authorization: Bearer TOKEN (default: "
        f"the environment variable {TOKEN_VARIABLE}, or none)",
    )
    add(
        "--no-token",
        action="store_true",
        help="let whoever reaches the port in, also from other hosts: for private networks",
    )


def _add_recording(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it records").add_argument
    add(
        "--mode",
        choices=("tito", "snapshot"),
        default="tito",
        help="tito: a turn that continues a conversation adds its new tokens to those that were "
        "generated, which are never tokenized again; snapshot: every turn is tokenized whole, and "
        "kept whole (default: %(default)s)",
    )
    add(
        "--views",
        nargs="+",
        choices=("lineage", "timeline"),
        default=["lineage"],
        help="Segments that a finalize makes where it does not say: lineage, one for each chain of "
        "turns, or timeline, in the order of the turns (default: lineage)",
    )
    add(
        "--consumers",
        nargs="+",
        default=["train"],
        metavar="NAME",
        help="who has to release Segments before they are deleted (default: train)",
    )
    add(
        "--routing-check",
        choices=("warn", "reject", "off"),
        default="warn",
        help="what becomes of routing that no router gives, such as rows that are all one id "
        "(default: %(default)s)",
    )
    add(
        "--partial-rollout",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on, after a pause for new weights, with what was generated before it; without: "
        "generate it anew, and refuse sessions that span several weight versions (default: on)",
    )
    add(
        "--max-version-span",
        type=int,
        metavar="N",
        help="most weight versions between a session's oldest and newest token (default: any)",
    )
    add(
        "--context-length",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together (default: max_position_embeddings of the model)",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="tokens of an answer where the request does not say (default: what the context has "
        "left)",
    )
    add(
        "--timeout-s",
        type=float,
        metavar="S",
        default=3600.0,
        help="seconds that an engine may take for one generation (default: %(default)g)",
    )


def _add_watching(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it is watched").add_argument
    add(
        "--metrics",
        metavar="HOST:PORT",
        help="serve Prometheus there too, without the token; /metrics of the Proxy itself is "
        "always there",
    )
    add(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="of log lines, on standard error (default: %(default)s)",
    )
    add(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        default="INFO",
        help="least level of log lines (default: %(default)s)",
    )


# ---------------------------------------------------------------- what it does


def _proxy(arguments: argparse.Namespace) -> int:
    configure_logs(arguments.log_format, level=arguments.log_level)
    chosen = flags.from_arguments(arguments)
    config = _model_config(arguments.model)
    chosen.fields(config)  # before anything slow, whether they fit the model
    with _until_signalled():
        try:
            _serve(arguments, chosen, config)
        except ModuleNotFoundError as error:
            raise DependencyMissing(
                f"{error.name} is not installed",
                subject="tq-fs proxy",
                remedy="pip install 'tq-fs[proxy]'",
            ) from error
    return 0


def _serve(
    arguments: argparse.Namespace, chosen: flags.TransferFlags, config: Mapping[str, Any]
) -> None:
    from tq_fs.proxy import ChatTemplate, serve  # noqa: PLC0415  # optional

    dense = dense_layers_of_model(config) if chosen.replay else ()
    settings = _settings(arguments, config, dense)
    template = ChatTemplate.from_model(arguments.model)
    metrics = Metrics(chosen.store_config().store_id, role="proxy")
    with _metrics_at(arguments.metrics, metrics), chosen.open(config, metrics=metrics) as store:
        serve(
            settings,
            store,
            template,
            host=arguments.host,
            port=arguments.port,
            metrics=metrics,
            ready=lambda url: print(url, flush=True),
        )


class _Ended(BaseException):
    """SIGTERM or SIGINT came; the server, if it runs, has ended by itself before."""


@contextmanager
def _until_signalled() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Ended

    before = {name: signal.signal(name, end) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except _Ended:
        pass
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _settings(
    arguments: argparse.Namespace, config: Mapping[str, Any], dense_layers: tuple[int, ...]
) -> ProxySettings:
    from tq_fs.proxy import ProxySettings  # noqa: PLC0415  # optional

    length = arguments.context_length or _context_length(config)
    return ProxySettings(
        model=arguments.served_model_name or arguments.model.resolve().name,
        upstreams=tuple(arguments.upstream),
        token=_token(arguments),
        mode=arguments.mode,
        views=tuple(dict.fromkeys(arguments.views)),
        consumers=tuple(dict.fromkeys(arguments.consumers)),
        context_length=length,
        max_new_tokens=arguments.max_new_tokens,
        partial_rollout=arguments.partial_rollout,
        max_version_span=arguments.max_version_span,
        routing_check=arguments.routing_check,
        dense_layers=dense_layers,
        timeout_s=arguments.timeout_s,
    )


def _token(arguments: argparse.Namespace) -> str | None:
    token = os.environ.get(TOKEN_VARIABLE)
    if arguments.token_file is not None:
        try:
            token = arguments.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"cannot be read: {error}", subject="--token-file") from error
        if not token:
            raise InvalidConfig("holds nothing", subject=f"--token-file {arguments.token_file}")
    if not token and not arguments.no_token and not _is_own(arguments.host):
        raise InvalidConfig(
            "would let everybody in",
            subject=f"--host {arguments.host}",
            remedy=f"give --token-file or {TOKEN_VARIABLE}, or --no-token in a private network",
        )
    return token or None


def _is_own(host: str) -> bool:
    """Tell whether only this host reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _model_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot be read: {error}", subject=f"--model, {path}") from error
    if not isinstance(values, dict):
        raise InvalidConfig("holds no JSON object", subject=f"--model, {path}")
    return values


def _context_length(config: Mapping[str, Any]) -> int | None:
    inner = config.get("text_config") or config
    found = inner.get("max_position_embeddings")
    return found if isinstance(found, int) else None


@contextmanager
def _metrics_at(where: str | None, metrics: Metrics) -> Iterator[None]:
    if where is None:
        yield
        return
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidConfig(f"{where!r} is no HOST:PORT", subject="--metrics")
    server = MetricsServer(metrics, host.strip("[]"), int(port))
    try:
        yield
    finally:
        server.close()
