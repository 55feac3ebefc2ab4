"""The ways to read an answer: in chunks or whole, by a thread or an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from attrs import field, frozen

from iaop_core import GenerationParams, InferChunk, InferResult, Message
from iaop_core.errors import BackendUnavailableError
from iaop_onnx_local.answer import Answer, Deliver
from iaop_onnx_local.engine import EngineClosedError, EngineFullError
from iaop_onnx_local.model import LocalModel

__all__ = ["AnswerStream", "Call", "await_answer", "stream_answer", "whole_answer"]


@frozen(slots=True)
class Call:
    """A call that has been checked and not begun."""

    get_model: Callable[[], LocalModel]
    """The model that is loaded when it is asked."""
    messages: Sequence[Message]
    params: GenerationParams
    backend_name: str = field(kw_only=True)
    started: float = field(factory=time.perf_counter, init=False)

    def begin(self, deliver: Deliver) -> Callable[[], None]:
        """Hands the call to the engine; returns what cancels it. Renders and encodes the prompt."""
        while True:
            model = self.get_model()
            answer = Answer(
                model,
                model.prepare(self.messages, self.params),
                started=self.started,
                backend_name=self.backend_name,
                deliver=deliver,
            )
            try:
                return model.submit(answer)
            except EngineFullError:
                raise BackendUnavailableError(
                    f"backend {self.backend_name!r}: all rows are taken and no more may wait; try "
                    "again, or raise max_concurrency or max_waiting",
                    backend=self.backend_name,
                    busy=True,
                ) from None
            except EngineClosedError:
                if self.get_model() is model:
                    raise BackendUnavailableError(
                        f"backend {self.backend_name!r}: the engine has ended; load the model anew",
                        backend=self.backend_name,
                    ) from None


class _Way:
    """The way of a call through the engine, from before its beginning on."""

    def __init__(self, call: Call, deliver: Deliver) -> None:
        self._call, self._deliver = call, deliver
        self._stop: Callable[[], None] | None = None
        self._cancelled = False

    def begin(self) -> None:
        try:
            self._stop = self._call.begin(self._deliver)
        except StopIteration as error:  # would be taken for the answer's end
            raise RuntimeError("preparing the prompt failed") from error
        if self._cancelled:  # while the prompt was encoded
            self._stop()

    def cancel(self) -> None:
        """From any thread; does nothing once the answer has ended."""
        self._cancelled = True
        stop = self._stop
        if stop is not None:
            stop()

    def end(self) -> None:
        """Lets go of the model: there is nothing left to cancel."""
        self._stop = None


class AnswerStream(Iterator[InferChunk]):
    """The chunks of one answer, which begins with the first `next`.

    Iterate it in one thread; `close` from any thread stops the engine's work within a step, and the
    iteration ends there.
    """

    def __init__(self, call: Call) -> None:
        self._items: SimpleQueue[InferChunk | Exception | None] = SimpleQueue()
        self._way = _Way(call, self._items.put)
        self._begun = self._ended = False

    def __next__(self) -> InferChunk:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._begin()
        item = self._items.get()
        if isinstance(item, InferChunk) and not self._ended:
            if item.result is not None:
                self._ended = True
                self._way.end()
            return item
        self._ended = True
        self._way.end()
        if isinstance(item, Exception):
            raise item
        raise StopIteration

    def close(self) -> None:
        """Stops the engine's work on this answer. Does nothing when it has ended."""
        if not self._ended:
            self._ended = True
            self._way.cancel()
            self._items.put(None)

    def __del__(self) -> None:
        self.close()

    def _begin(self) -> None:
        self._begun = True
        try:
            self._way.begin()
        except BaseException:
            self._ended = True
            raise


async def stream_answer(call: Call) -> AsyncGenerator[InferChunk, None]:
    """The chunks of one answer; closing the generator stops the engine's work within a step."""
    loop, items = asyncio.get_running_loop(), asyncio.Queue[InferChunk | Exception]()

    def deliver(item: InferChunk | Exception) -> None:
        try:
            loop.call_soon_threadsafe(items.put_nowait, item)
        except RuntimeError:  # the loop has been closed, and the reader with it
            way.cancel()

    way = _Way(call, deliver)
    try:
        await asyncio.to_thread(way.begin)  # a template may take its time
        while True:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.result is not None:
                return
    finally:
        way.cancel()


def whole_answer(call: Call) -> InferResult:
    """One answer, with no thread woken for its parts."""
    end: Future[InferResult] = Future()
    way = _Way(call, partial(_settle, end))
    try:
        way.begin()
        return end.result()
    finally:
        way.cancel()


async def await_answer(call: Call) -> InferResult:
    """As `whole_answer`; cancelling the task stops the engine's work within a step."""
    end: Future[InferResult] = Future()
    way = _Way(call, partial(_settle, end))
    try:
        await asyncio.to_thread(way.begin)
        return await asyncio.wrap_future(end)
    finally:
        way.cancel()


def _settle(end: Future[InferResult], item: InferChunk | Exception) -> None:
    with suppress(InvalidStateError):  # who waited has gone
        if isinstance(item, Exception):
            end.set_exception(item)
        elif item.result is not None:
            end.set_result(item.result)
