"""Makes one answer, token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from iaop_core import GenerationParams, InferChunk, InferResult, Message
from iaop_core.errors import BackendProtocolError, BackendUnavailableError
from iaop_core.messages import FinishReason
from iaop_onnx_local._errors import step_error
from iaop_onnx_local.decoder import DecoderText
from iaop_onnx_local.model import LocalModel, Request
from iaop_onnx_local.sampling import Sampler
from iaop_onnx_local.text_stream import StopMatcher

__all__ = ["Generation"]


class Generation(Iterator[InferChunk]):
    """The stream of one answer: deltas, then the end with the whole result.

    Iterate it in one thread; `close` from any thread stops the engine within the step that is
    running, and the iteration ends there.

    Args:
        model: the loaded model.
        messages: the chat.
        params: how to generate.
        backend_name: for results and errors.
        take_slot: called before the work, returns what gives the slot back.
    """

    def __init__(
        self,
        model: LocalModel,
        messages: Sequence[Message],
        params: GenerationParams,
        *,
        backend_name: str,
        take_slot: Callable[[], Callable[[], None]],
    ) -> None:
        self._model = model
        self._backend_name = backend_name
        self._started = time.perf_counter()
        self._text: DecoderText | None = None
        self._cancelled = False
        self._running = threading.Lock()
        self._chunks = self._generate(messages, params, take_slot)

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> InferChunk:
        with self._running:
            if self._cancelled:
                self._chunks.close()
                raise StopIteration
            chunk = next(self._chunks)
        if self._cancelled:
            self.close()
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Stops the engine's work on this answer. Does nothing when it has ended."""
        self._cancelled = True
        if self._text is not None:
            self._text.stop()
        # While another thread iterates, that thread closes the generator: it looks at the flag
        # after it has let the lock go.
        if self._running.acquire(blocking=False):
            try:
                self._chunks.close()
            finally:
                self._running.release()

    def _generate(
        self,
        messages: Sequence[Message],
        params: GenerationParams,
        take_slot: Callable[[], Callable[[], None]],
    ) -> Generator[InferChunk, None, None]:
        give_back = take_slot()
        try:
            request = self._model.prepare(messages, params)
            self._text = self._model.open_text(len(request.prompt_ids) + request.max_tokens)
            yield from self._answer(request, self._text)
        finally:
            self._text = None
            give_back()

    def _answer(self, request: Request, text: DecoderText) -> Iterator[InferChunk]:
        model = self._model
        sampler = Sampler(request.sampling, request.prompt_ids)
        characters, stops = model.tokenizer.open_text(), StopMatcher(request.stops)
        pieces: list[str] = []
        count, first_ms = 0, None
        reason: FinishReason | None = None
        pending = request.prompt_ids
        while reason is None:
            token = self._next_token(sampler, text, pending)
            if token is None:
                return
            count += 1
            first_ms = first_ms or self._elapsed_ms()
            pending = [token]
            if token in model.end_token_ids:
                reason = "stop"
                piece = stops.flush()
            else:
                piece = stops.feed(characters.feed(model.tokenizer.token_bytes(token)))
                if stops.matched:
                    reason = "stop"
                elif count == request.max_tokens:
                    reason = "length"
                    piece += stops.flush()
            if piece:
                pieces.append(piece)
                yield InferChunk(piece)
        yield InferChunk(
            "",
            InferResult(
                text="".join(pieces),
                backend_name=self._backend_name,
                model_id=model.model_id,
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=count,
                latency_ms=self._elapsed_ms(),
                finish_reason=reason,
                device=model.decoder.device,
                time_to_first_token_ms=first_ms,
            ),
        )

    def _next_token(self, sampler: Sampler, text: DecoderText, pending: list[int]) -> int | None:
        """The next token; None when the answer was cancelled."""
        try:
            return sampler.choose(text.extend(pending))
        except FloatingPointError as error:
            raise BackendProtocolError(
                f"model {self._model.model_id!r}: {error}; the model file, or its number type, "
                "does not suit the device",
                backend=self._backend_name,
            ) from error
        except Exception as error:
            if self._cancelled:
                return None
            if self._model.closed:
                raise BackendUnavailableError(
                    f"model {self._model.model_id!r} was unloaded while it answered",
                    backend=self._backend_name,
                    may_have_run=True,
                ) from error
            raise step_error(error, self._backend_name) from error

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000
