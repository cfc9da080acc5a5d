"""Bodies of requests and answers, as they are on the wire.

Requests are decoded into these from the raw body, so that what an endpoint takes is said in one
place; the OpenAPI description is made from the same structs. Keys that are not named here are
passed over, as OpenAI's servers do.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

Message = dict[str, Any]
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


# ---------------------------------------------------------------- chat


class StreamOptions(Struct, kw_only=True, frozen=True):
    """How to stream."""

    include_usage: bool | None = None


class ResponseFormat(Struct, kw_only=True, frozen=True):
    """What the answer has to look like; only ``text`` is taken."""

    type: str = "text"


class ChatRequest(Struct, kw_only=True, frozen=True):
    """``POST /v1/chat/completions``: OpenAI's body, as far as training can take it.

    Attributes
    ----------
    messages
        The conversation so far; at least one.
    model
        Not looked at: there is one.
    tools, tool_choice
        Passed to the chat template. With ``none`` they stay in the prompt, and the answer is not
        searched for calls.
    max_tokens, max_completion_tokens
        Bound of the answer; the second counts where both are given.
    seed
        Of the engine's draws (``sampling_seed``).
    stream, stream_options
        Send the one computed answer as events.
    chat_template_kwargs
        For the chat template, such as ``enable_thinking``.
    n
        1.
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Bound of the answer in tokens; None where the request has none."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(text for text in given if text)


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    "repetition_penalty",
)


def sampling_of(request: ChatRequest) -> dict[str, Any]:
    """Return what the request says of sampling, in the engine's words."""
    given = {name: getattr(request, name) for name in _SAMPLING}
    given |= {"stop": list(request.stops) or None, "sampling_seed": request.seed}
    return {name: value for name, value in given.items() if value is not None}


class Usage(Struct, kw_only=True, frozen=True):
    """Tokens of prompt and answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Recorded(Struct, kw_only=True, frozen=True):
    """What the answer was recorded as."""

    session_id: str
    incarnation_id: str
    step: int
    kind: str
    reason: str
    versions: list[tuple[str, int]]


class Choice(Struct, kw_only=True, frozen=True):
    """The one choice."""

    message: Message
    finish_reason: str
    index: int = 0


class ChatAnswer(Struct, kw_only=True, frozen=True):
    """OpenAI's ``chat.completion``, and what it was recorded as."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    tq_fs: Recorded
    object: str = "chat.completion"


# ---------------------------------------------------------------- sessions


class FinalizeRequest(Struct, kw_only=True, frozen=True):
    """``POST /session/finalize``.

    Attributes
    ----------
    consumers, views
        As for :meth:`tq_fs.Session.finalize`; the Proxy's own where left out.
    extra
        What every Segment is to carry along, beside ``instance_id`` and ``conversation``.
    abort
        Break off requests that still run, instead of refusing.
    """

    session_id: Text
    consumers: list[str] | UnsetType = UNSET
    views: list[str] | UnsetType = UNSET
    extra: dict[str, Any] | None = None
    abort: bool = False


class SegmentAnswer(Struct, kw_only=True, frozen=True):
    """A Segment without its tokens; `ref` is None where nothing is stored."""

    ref: str | None
    view: str
    index: int
    steps: list[int]
    tokens: int
    response_length: int


class FinalizeAnswer(Struct, kw_only=True, frozen=True):
    """What a session has become; `steps` is their number."""

    session_id: str
    incarnation_id: str
    steps: int
    segments: list[SegmentAnswer]


class DiscardRequest(Struct, kw_only=True, frozen=True):
    """``POST /session/discard``."""

    session_id: Text


class DiscardAnswer(Struct, kw_only=True, frozen=True):
    """Whether there was something to discard."""

    session_id: str
    discarded: bool


# ---------------------------------------------------------------- trajectories


class ReadRequest(Struct, kw_only=True, frozen=True):
    """``POST /trajectory/read``.

    Attributes
    ----------
    session_ids
        Sessions to read, every kept incarnation of each; or
    instance_id
        all of an instance; or neither, for all that are kept, in the order they were finalized.
    forget
        Forget them once the answer is sent. A caller that must not lose an answer on its way reads
        first, and then calls ``/trajectory/forget``.
    limit
        Whole sessions at most.
    """

    session_ids: list[Text] | None = None
    instance_id: str | None = None
    forget: bool = False
    limit: Count | None = None


class ForgetRequest(Struct, kw_only=True, frozen=True):
    """``POST /trajectory/forget``; references stay good until they are released."""

    session_ids: list[Text]


class ForgetAnswer(Struct, kw_only=True, frozen=True):
    """How many incarnations were forgotten."""

    forgotten: int


class ReleaseRequest(Struct, kw_only=True, frozen=True):
    """``POST /trajectory/release``; see :meth:`tq_fs.Store.release`."""

    refs: list[str]
    consumer: Text = "train"
    rollout_id: int | None = None


class CheckpointRequest(Struct, kw_only=True, frozen=True):
    """``POST /trajectory/checkpoint_saved``; see :meth:`tq_fs.Store.checkpoint_saved`."""

    rollout_id: int


class ReleaseAnswer(Struct, kw_only=True, frozen=True):
    """How many Steps went."""

    deleted_steps: int


# ---------------------------------------------------------------- rollout


class PauseRequest(Struct, kw_only=True, frozen=True):
    """``POST /v1/rollout/pause``: wait at most so long for generations to stop."""

    deadline_s: Seconds | None = None


class PauseAnswer(Struct, kw_only=True, frozen=True):
    """Whether generation is paused, and how many requests were cut."""

    paused: bool
    aborted: int = 0


class Health(Struct, kw_only=True, frozen=True):
    """``GET /health``."""

    status: str
    paused: bool
