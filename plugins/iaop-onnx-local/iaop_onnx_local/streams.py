"""The two ways to read an answer: by an iterator, and by an asynchronous one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue

from attrs import field, frozen

from iaop_core import GenerationParams, InferChunk, Message
from iaop_core.errors import BackendUnavailableError
from iaop_onnx_local.answer import Answer, Deliver
from iaop_onnx_local.engine import EngineClosedError, EngineFullError
from iaop_onnx_local.model import LocalModel

__all__ = ["AnswerStream", "Call", "stream_answer"]


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
                ) from None
            except EngineClosedError:
                if self.get_model() is model:
                    raise BackendUnavailableError(
                        f"backend {self.backend_name!r}: the engine has ended; load the model anew",
                        backend=self.backend_name,
                    ) from None


class AnswerStream(Iterator[InferChunk]):
    """The chunks of one answer, which begins with the first `next`.

    Iterate it in one thread; `close` from any thread stops the engine's work within a step, and the
    iteration ends there.
    """

    def __init__(self, call: Call) -> None:
        self._call: Call | None = call
        self._items: SimpleQueue[InferChunk | Exception | None] = SimpleQueue()
        self._cancel: Callable[[], None] = lambda: None
        self._ended = False

    def __next__(self) -> InferChunk:
        if self._ended:
            raise StopIteration
        if self._call is not None:
            call, self._call = self._call, None
            self._begin(call)
        item = self._items.get()
        if isinstance(item, InferChunk) and not self._ended:
            self._ended = item.result is not None
            return item
        self._ended = True
        if isinstance(item, Exception):
            raise item
        raise StopIteration

    def close(self) -> None:
        """Stops the engine's work on this answer. Does nothing when it has ended."""
        if not self._ended:
            self._ended = True
            self._cancel()
            self._items.put(None)

    def __del__(self) -> None:
        self.close()

    def _begin(self, call: Call) -> None:
        try:
            self._cancel = call.begin(self._items.put)
        except BaseException:
            self._ended = True
            raise
        if self._ended:  # closed while the prompt was encoded
            self._cancel()


async def stream_answer(call: Call) -> AsyncGenerator[InferChunk, None]:
    """The chunks of one answer; closing the generator stops the engine's work within a step."""
    loop, items = asyncio.get_running_loop(), asyncio.Queue[InferChunk | Exception]()
    gone = False
    cancel: Callable[[], None] = lambda: None  # noqa: E731

    def deliver(item: InferChunk | Exception) -> None:
        with suppress(RuntimeError):  # the loop has been closed, and the reader with it
            loop.call_soon_threadsafe(items.put_nowait, item)

    def begin() -> None:
        nonlocal cancel
        cancel = call.begin(deliver)
        if gone:
            cancel()

    try:
        await asyncio.to_thread(begin)  # a template may take its time
        while True:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.result is not None:
                return
    finally:
        gone = True
        cancel()
