"""One answer in the making: from the engine's logits to chunks of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from iaop_core import InferChunk, InferResult, TokenLogprob
from iaop_core.errors import BackendProtocolError, BackendUnavailableError, IaopError
from iaop_core.messages import FinishReason
from iaop_onnx_local._errors import step_error
from iaop_onnx_local.engine import EngineClosedError
from iaop_onnx_local.model import LocalModel, Request
from iaop_onnx_local.sampling import Chosen, Sampler
from iaop_onnx_local.text_stream import StopMatcher

__all__ = ["Answer", "Deliver"]

Deliver: TypeAlias = Callable[[InferChunk | Exception], None]
"""Takes a chunk, the last of which has the result, or the error that is the end."""


class Answer:
    """A job of the engine that delivers chunks.

    Args:
        model: the loaded model.
        request: what to do.
        started: when the call was taken, by `time.perf_counter`.
        backend_name: for results and errors.
        deliver: called in the engine's thread, so it may not wait.
    """

    def __init__(
        self,
        model: LocalModel,
        request: Request,
        *,
        started: float,
        backend_name: str,
        deliver: Deliver,
    ) -> None:
        self.prompt_ids = request.prompt_ids
        self._model = model
        self._request = request
        self._started = started
        self._backend_name = backend_name
        self._deliver = deliver
        self._sampler = Sampler(request.sampling, request.prompt_ids, request.constraint)
        self._characters = model.tokenizer.open_text()
        self._stops = StopMatcher(request.stops)
        self._pieces: list[str] = []
        self._count = 0
        self._first_ms: float | None = None
        self._logprobs: list[TokenLogprob] = []
        self._told = 0
        """How many of `_logprobs` the chunks have had."""

    def take(self, logits: NDArray[np.floating]) -> int | None:
        """Chooses the next token; see `Job.take`."""
        try:
            chosen = self._sampler.choose(logits)
        except FloatingPointError as error:
            raise BackendProtocolError(
                f"model {self._model.model_id!r}: {error}; the model file, or its number type, "
                "does not suit the device",
                backend=self._backend_name,
            ) from error
        token = chosen.token_id
        self._count += 1
        if self._first_ms is None:
            self._first_ms = self._elapsed_ms()
        if chosen.logprob is not None:
            self._logprobs.append(self._logprob_of(chosen))
        piece, reason = self._read(token)
        if piece:
            self._pieces.append(piece)
            self._deliver(InferChunk(piece, logprobs=self._untold()))
        if reason is None:
            return token
        self._deliver(InferChunk("", self._result(reason), logprobs=self._untold()))
        return None

    def fail(self, error: Exception) -> None:
        """Delivers the error; see `Job.fail`."""
        if isinstance(error, EngineClosedError):
            error = BackendUnavailableError(
                f"model {self._model.model_id!r} was unloaded before the answer's end",
                backend=self._backend_name,
                may_have_run=True,
            )
        elif not isinstance(error, IaopError):
            cause, error = error, step_error(error, self._backend_name)
            error.__cause__ = cause
        self._deliver(error)

    def _read(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that can be shown now, and why the answer ends here if it does."""
        stops, model = self._stops, self._model
        if token in model.end_token_ids:
            return stops.flush(), "stop"
        piece = stops.feed(self._characters.feed(model.tokenizer.token_bytes(token)))
        if stops.matched:
            return piece, "stop"
        if self._count == self._request.max_tokens:
            return piece + stops.flush(), "length"
        return piece, None

    def _untold(self) -> tuple[TokenLogprob, ...]:
        if self._told == len(self._logprobs):
            return ()
        told, self._told = self._told, len(self._logprobs)
        return tuple(self._logprobs[told:])

    def _logprob_of(self, chosen: Chosen) -> TokenLogprob:
        tokenizer = self._model.tokenizer

        def entry(token: int, logprob: float, top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
            text, data = tokenizer.token_text(token), tokenizer.token_bytes(token)
            return TokenLogprob(text, data, token, logprob, tuple(top))

        assert chosen.logprob is not None
        top = [entry(token, logprob) for token, logprob in chosen.top]
        return entry(chosen.token_id, chosen.logprob, top)

    def _result(self, reason: FinishReason) -> InferResult:
        return InferResult(
            text="".join(self._pieces),
            backend_name=self._backend_name,
            model_id=self._model.model_id,
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=self._count,
            latency_ms=self._elapsed_ms(),
            finish_reason=reason,
            device=self._model.decoder.device,
            time_to_first_token_ms=self._first_ms,
            logprobs=None if self._request.sampling.top_logprobs is None else tuple(self._logprobs),
        )

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000
