"""Puts an answer together from the responses of a model."""

from __future__ import annotations

import time
from typing import cast, get_args

from iaop_core import InferResult
from iaop_core.errors import StreamInterruptedError
from iaop_core.messages import FinishReason, estimate_tokens
from iaop_gpu_triton.answer_text import AnswerText
from iaop_gpu_triton.contract import Piece
from iaop_gpu_triton.settings import NAME

_FINISH_REASONS = frozenset(get_args(FinishReason))


class Answer:
    """One answer under way.

    `started` is the time of `time.perf_counter()` at which the call began. `max_tokens` is None
    where the model could not be told a limit.
    """

    def __init__(
        self,
        text: AnswerText,
        *,
        model: str,
        prompt: str,
        max_tokens: int | None,
        needs_reason: bool,
        started: float,
    ) -> None:
        self._text = text
        self._started = started
        self._model = model
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._needs_reason = needs_reason
        self._deltas: list[str] = []
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._responses_with_text = 0
        self._finish_reason: str | None = None
        self._first_token_ms: float | None = None

    def add(self, piece: Piece) -> str:
        """Take a piece; returns the text that it completes."""
        delta = ""
        if piece.text:
            self._responses_with_text += 1
            delta = self._text.add(piece.text)
            if delta:
                self._deltas.append(delta)
            if self._first_token_ms is None:
                self._first_token_ms = self._elapsed_ms()
        if piece.prompt_tokens is not None:
            self._prompt_tokens = piece.prompt_tokens  # repeated in every response
        if piece.new_tokens is not None:
            self._completion_tokens = (self._completion_tokens or 0) + piece.new_tokens
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
        return delta

    def end(self) -> str:
        """The rest of the text, after the last piece."""
        delta = self._text.end()
        if delta:
            self._deltas.append(delta)
        return delta

    def result(self, *, streamed: bool) -> InferResult:
        """The whole answer, after its end.

        Raises `StreamInterruptedError` when the model owes a finish reason and gave none, or one
        that is no regular end.
        """
        text = "".join(self._deltas)
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
        if self._finish_reason in _FINISH_REASONS:
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
        if self._max_tokens is None or self._text.stopped:
            return "stop"
        counted = self._completion_tokens
        tokens = self._responses_with_text if counted is None else counted
        return "length" if tokens >= self._max_tokens else "stop"

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000


def _or_estimate(counted: int | None, text: str) -> int:
    return estimate_tokens(text) if counted is None else counted
