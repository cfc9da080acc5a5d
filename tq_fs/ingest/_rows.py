"""Routing rows from base64, piece by piece, to where they stay."""

from __future__ import annotations

import msgspec
import numpy as np

from tq_fs.errors import ReplyInvalid
from tq_fs.fields import ROUTED_EXPERTS, UNKNOWN
from tq_fs.ingest._reply import Array, Asked, Tokens

_decoder = msgspec.json.Decoder(bytes)  # four times as fast as binascii


class RowBuffer:
    """Takes the base64 text of ``routed_experts``, and keeps the rows that were asked for.

    Engines that do not know ``routed_experts_start_len`` send the rows from 0 on. Which rows come
    is seen from their number only: at the end, or as soon as there are more than were asked for.
    Memory is bounded by the rows asked for, in both cases.

    Parameters
    ----------
    asked
        With the declaration of the routing.
    generated
        Tokens that were generated; None where the reply has not said so yet.

    Raises
    ------
    ReplyInvalid
        The model's layers and top-k are not declared.
    """

    def __init__(self, asked: Asked, generated: int | None) -> None:
        assert asked.routing is not None
        if asked.routing.inner is None:
            raise asked.invalid(
                "layers and top-k of the rows are not known, and a reply does not tell them",
                at=ROUTED_EXPERTS,
                remedy="give the model's config.json, or layers, topk and experts",
            )
        self._asked = asked
        self._inner = asked.routing.inner
        self._row_bytes = 4 * int(np.prod(self._inner))
        tokens = asked.prompt_tokens + (asked.most_tokens if generated is None else generated)
        self._skip = asked.start_row * self._row_bytes
        self._limit = (tokens - 1) * self._row_bytes
        self._kept = np.empty(max(self._limit - self._skip, 0), np.uint8)
        self._from_zero = False
        self._taken = 0
        self._rest = b""
        self._padded = False

    def write(self, text: bytes) -> None:
        """Take a piece of the base64 text.

        Raises
        ------
        ReplyInvalid
            It is no base64, or the rows are more than prompt and new tokens allow.
        """
        over = (len(self._rest) + len(text)) & 3
        if over > len(text):  # fewer than make a quantum
            self._rest += text
            return
        whole = b"".join((b'"', self._rest, memoryview(text)[: len(text) - over], b'"'))
        self._rest = text[len(text) - over :] if over else b""
        if len(whole) > 2:
            if self._padded:
                raise self._no_base64("goes on after its padding")
            self._padded = whole.endswith(b'="')
            self._put(self._decoded(whole))

    def _decoded(self, quoted: bytes) -> bytes:
        try:
            return _decoder.decode(quoted)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._no_base64("has characters that are none") from error

    def _put(self, part: bytes) -> None:
        start, end = self._taken, self._taken + len(part)
        if end > self._limit:
            raise self._too_many()
        if not self._from_zero and end > len(self._kept):
            self._shift()
        self._taken = end
        source = np.frombuffer(part, np.uint8)
        if self._from_zero:
            source = source[max(self._skip - start, 0) :]
            end -= self._skip
        if len(source):
            self._kept[end - len(source) : end] = source

    def _shift(self) -> None:
        """Drop the rows before the first wanted: there are so many that they start at row 0."""
        if self._taken > self._skip:
            self._kept[: self._taken - self._skip] = self._kept[self._skip : self._taken]
        self._from_zero = True

    # ------------------------------------------------------------ the end

    def rows(self, generated: int, *, partly: bool) -> Tokens | None:
        """Return the rows ``[start_row, prompt + generated - 1)``, int32 ``[rows, layers, topk]``.

        Where no token was asked for, engines leave the last row out; it is -1 then, not known.

        Parameters
        ----------
        partly
            Whether there may be any fewer rows; None is returned then.

        Raises
        ------
        ReplyInvalid
            The text is cut, or its length fits neither these rows nor all from 0 on.
        """
        if self._rest:
            raise self._no_base64(f"has {len(self._rest)} characters over a multiple of 4")
        start, total = self._asked.start_row, self._asked.prompt_tokens + generated - 1
        wanted = max(total - start, 0)
        short = 1 if self._asked.max_new_tokens == 0 else 0
        for missing in range(min(short, wanted) + 1):
            for first in dict.fromkeys((start, 0)):
                if self._taken == max(total - missing - first, 0) * self._row_bytes:
                    return self._slice(start - first, wanted, missing)
        if partly and self._taken < max(total, 0) * self._row_bytes:
            return None
        raise self._mismatch(wanted, total)

    def _slice(self, before: int, wanted: int, missing: int) -> Tokens:
        at = 0 if self._from_zero else before * self._row_bytes
        flat = self._kept[at : at + wanted * self._row_bytes]
        rows: Array = flat.view("<i4").reshape(wanted, *self._inner)
        if missing:
            rows[-1] = UNKNOWN
        return rows.astype(np.int32, copy=False)

    def _mismatch(self, wanted: int, total: int) -> ReplyInvalid:
        layers = " x ".join(map(str, self._inner))
        rows, over = divmod(self._taken, self._row_bytes)
        have = f"{self._taken} bytes are {rows} rows of {layers} ids"
        have += f" and {over} bytes" if over else ""
        calls = f"{wanted}" if wanted == total else f"{wanted} (or {total} from row 0 on)"
        widths = [n for n in {wanted, total} if n and self._taken and self._taken % (4 * n) == 0]
        hint = " or ".join(str(self._taken // (4 * n)) for n in widths)
        return self._asked.invalid(
            f"{have}, where the tokens call for {calls}"
            + (f"; rows of {hint} ids would fit" if hint else ""),
            at=ROUTED_EXPERTS,
            remedy="check layers and top-k against the model that generated",
        )

    def _too_many(self) -> ReplyInvalid:
        layers = " x ".join(map(str, self._inner))
        return self._asked.invalid(
            f"more than the {self._limit // self._row_bytes} rows of {layers} ids that prompt and "
            "new tokens allow",
            at=ROUTED_EXPERTS,
            remedy="check layers and top-k against the model that generated",
        )

    def _no_base64(self, problem: str) -> ReplyInvalid:
        return self._asked.invalid(
            f"base64 {problem}, after {self._taken} bytes",
            at=ROUTED_EXPERTS,
            remedy="generate again; if it happens often, look at what is between here and the "
            "engine",
        )
