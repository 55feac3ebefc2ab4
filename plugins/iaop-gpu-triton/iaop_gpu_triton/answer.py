"""Puts an answer together from the responses of a model."""

from __future__ import annotations

import codecs
import time
from typing import cast, get_args

from iaop_core import InferResult
from iaop_core.errors import BackendProtocolError, StreamInterruptedError
from iaop_core.messages import FinishReason, estimate_tokens
from iaop_gpu_triton.contract import Piece
from iaop_gpu_triton.settings import NAME


class Answer:
    """One answer under way; the clock starts with it."""

    def __init__(self, *, model: str, prompt: str, max_tokens: int, needs_reason: bool) -> None:
        self._started = time.perf_counter()
        self._model = model
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._needs_reason = needs_reason
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._texts: list[str] = []
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._responses_with_text = 0
        self._finish_reason: str | None = None
        self._first_token_ms: float | None = None

    def add(self, piece: Piece) -> str:
        """Take a piece; returns the whole characters that it completes."""
        try:
            delta = self._decoder.decode(piece.text)
        except UnicodeDecodeError as error:
            raise BackendProtocolError(
                f"the answer of model {self._model!r} is not UTF-8", backend=NAME
            ) from error
        if piece.text:
            self._responses_with_text += 1
            if self._first_token_ms is None:
                self._first_token_ms = self._elapsed_ms()
        if delta:
            self._texts.append(delta)
        if piece.prompt_tokens is not None:
            self._prompt_tokens = piece.prompt_tokens  # repeated in every response
        if piece.new_tokens is not None:
            self._completion_tokens = (self._completion_tokens or 0) + piece.new_tokens
        self._finish_reason = piece.finish_reason or self._finish_reason
        return delta

    def result(self, *, streamed: bool) -> InferResult:
        """The whole answer, after its end. Half a character that a limit cut off is left out.

        Raises `StreamInterruptedError` when the model owes a finish reason and gave none, or one
        that is no regular end.
        """
        text = "".join(self._texts)
        completion_tokens, prompt_tokens = self._completion_tokens, self._prompt_tokens
        estimated = completion_tokens is None or prompt_tokens is None
        return InferResult(
            text=text,
            backend_name=NAME,
            model_id=self._model,
            prompt_tokens=_or_estimate(prompt_tokens, self._prompt),
            completion_tokens=_or_estimate(completion_tokens, text),
            latency_ms=self._elapsed_ms(),
            finish_reason=self._stated_reason() or self._derived_reason(),
            usage_estimated=estimated,
            time_to_first_token_ms=self._first_token_ms if streamed else None,
        )

    def _stated_reason(self) -> FinishReason | None:
        if self._finish_reason in get_args(FinishReason):
            return cast(FinishReason, self._finish_reason)
        if self._finish_reason is not None or self._needs_reason:
            raise StreamInterruptedError(
                f"model {self._model!r} ended its answer with the finish reason "
                f"{str(self._finish_reason)[:40]!r}: the answer is not complete",
                backend=NAME,
            )
        return None

    def _derived_reason(self) -> FinishReason:
        """Of a model that gives no reason: `length` when it made as many tokens as it might.

        Where the server doesn't count either, each response with text has at least one token.
        """
        counted = self._completion_tokens
        tokens = self._responses_with_text if counted is None else counted
        return "length" if tokens >= self._max_tokens else "stop"

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000


def _or_estimate(counted: int | None, text: str) -> int:
    return estimate_tokens(text) if counted is None else counted
