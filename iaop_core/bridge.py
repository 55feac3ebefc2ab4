"""Carries work between threads and event loops, so that a backend's author writes one face only.

Whatever takes time is a `concurrent.futures.Future`. A synchronous caller blocks on it, an
asynchronous one awaits it, and that is the only difference between the two: code that waits is
written once, as a coroutine that is given `block` or `suspend` (`drive` runs it with `block`).

Coroutines of backends all run on one event loop in a daemon thread of core's own. So a backend has
one client session, and never meets a second loop, whoever calls it from wherever.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import selectors
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import GeneratorType
from typing import Any, Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary, ref

from iaop_core.errors import StreamInterruptedError

__all__ = [
    "Wait",
    "Work",
    "block",
    "close_at_exit",
    "core_loop",
    "drive",
    "in_thread",
    "on_core",
    "on_core_loop",
    "pump",
    "pump_async",
    "run",
    "submit",
    "suspend",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)


# -- the loop ---------------------------------------------------------------------------------

_start_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None
_selector: selectors.BaseSelector | None = None


def core_loop() -> asyncio.AbstractEventLoop:
    """Core's event loop; its thread starts with the first call."""
    global _loop, _loop_thread
    with _start_lock:
        if _loop is None:
            _loop = _new_loop()
            _loop_thread = threading.Thread(
                target=_run_loop, args=(_loop,), name="iaop-core-loop", daemon=True
            )
            _loop_thread.start()
        return _loop


def _new_loop() -> asyncio.AbstractEventLoop:
    global _selector
    if not hasattr(os, "fork"):
        return asyncio.new_event_loop()
    _selector = selectors.DefaultSelector()
    return asyncio.SelectorEventLoop(_selector)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # A coroutine raised it. Its own caller gets it; the others still need the loop.
            continue
        return


def on_core_loop() -> bool:
    """Whether the caller runs on core's event loop."""
    return threading.current_thread() is _loop_thread


def _forget_loop() -> None:
    # Threads do not survive a fork: the child gets a loop of its own when it needs one.
    global _loop, _loop_thread, _selector, _start_lock, _closer, _exiting, _to_close
    if _selector is not None:
        # The kernel keeps one list of what the parent's loop waits for, and the child has it too: a
        # connection that is let go of here must not vanish from it.
        _selector.__dict__.update(type(_selector)().__dict__)
        _selector = None
    _start_lock = threading.Lock()
    _loop = _loop_thread = _closer = None
    _exiting, _to_close = threading.Event(), weakref.WeakSet()  # the parent closes its own


class _Closable(Protocol):
    def close(self) -> None: ...


_EXIT_S = 5.0
_to_close: weakref.WeakSet[_Closable] = weakref.WeakSet()
_exiting = threading.Event()
_closer: threading.Thread | None = None


def close_at_exit(resource: _Closable) -> None:
    """Close it when the process ends, before core's loop stops, unless it has gone by then.

    The process waits for that 5 s at most: an engine that hangs must not keep it from ending.
    """
    global _closer
    core_loop()  # closing may need it; when the process ends no thread can be started any more
    with _start_lock:
        _to_close.add(resource)
        if _closer is None:
            _closer = threading.Thread(
                target=_close_rest, args=(_exiting,), name="iaop-closer", daemon=True
            )
            _closer.start()


def _close_rest(exiting: threading.Event) -> None:
    exiting.wait()
    for resource in list(_to_close):
        try:
            resource.close()
        except Exception as error:  # the others are closed all the same
            _log.error("closing %r at the end failed: %s", resource, type(error).__name__)


@atexit.register
def _stop_loop() -> None:
    if _closer is not None:
        _exiting.set()
        _closer.join(_EXIT_S)
    loop, thread = _loop, _loop_thread
    if loop is None or thread is None or not thread.is_alive():
        return

    async def cancel_rest() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=1)
        loop.stop()

    asyncio.run_coroutine_threadsafe(cancel_rest(), loop)
    thread.join(2)
    if not thread.is_alive():
        loop.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run the coroutine on core's loop. Cancelling the future cancels its task."""
    return asyncio.run_coroutine_threadsafe(coroutine, core_loop())


async def on_core(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine on core's loop, from a task of another loop.

    Cancelling the task cancels the coroutine. It does what awaiting `submit` does, at less cost.
    """
    here, there = asyncio.get_running_loop(), core_loop()
    answer: asyncio.Future[T] = here.create_future()
    context = contextvars.copy_context()
    task: asyncio.Task[T] | None = None

    def begin() -> None:
        nonlocal task
        if answer.cancelled():
            coroutine.close()
        else:
            task = context.run(there.create_task, coroutine)
            task.add_done_callback(ended)

    def ended(task: asyncio.Task[T]) -> None:
        with suppress(RuntimeError):  # the caller's loop has been closed meanwhile
            _post(here, lambda: deliver(task))

    def deliver(task: asyncio.Task[T]) -> None:
        if answer.done():
            return
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    _post(there, begin)
    try:
        return await answer
    except asyncio.CancelledError:
        _post(there, lambda: task.cancel() if task else None)
        raise


class _Letterbox:
    """Calls for a loop from other threads. Those that come together wake the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # the box is kept as long as the loop, and no longer
        self._calls: deque[Callable[[], object]] = deque()
        self._is_waking = False

    def put(self, call: Callable[[], object]) -> None:
        self._calls.append(call)  # before the question: a loop that empties the box takes it along
        if not self._is_waking:
            self._is_waking = True
            if (loop := self._loop()) is not None:
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._is_waking = False  # before the box is empty: what comes from now on wakes again
        while self._calls:
            self._calls.popleft()()


_letterboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Letterbox] = WeakKeyDictionary()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have the loop make the call, which raises nothing. `RuntimeError` when it is closed."""
    letterbox = _letterboxes.get(loop)
    if letterbox is None:
        letterbox = _letterboxes.setdefault(loop, _Letterbox(loop))
    letterbox.put(call)


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run the coroutine on core's loop and wait for its result.

    Raises `TimeoutError`, having cancelled it, after `timeout_s`, and `RuntimeError` on core's loop
    itself, which would wait for ever.
    """
    return drive(block(submit(coroutine), timeout_s))


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run the function in a daemon thread, with the caller's context variables.

    A daemon, because an engine that hangs must not keep the process from ending. The future can't
    be cancelled: several callers may wait for it, and one that gives up leaves it to the others.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function)
        except BaseException as error:  # a SystemExit, too, belongs to the caller
            future.set_exception(_as_failure(error))
        else:
            future.set_result(result)

    threading.Thread(target=work, name="iaop-work", daemon=True).start()
    return future


def _as_failure(error: BaseException) -> BaseException:
    """The error, unless it would steer the caller's coroutine instead of telling of a failure."""
    if isinstance(error, asyncio.CancelledError):
        return StreamInterruptedError("the work was cancelled from within, before its end")
    if isinstance(error, StopIteration | StopAsyncIteration):
        return RuntimeError(f"the work raised {type(error).__name__}")
    return error


# -- waiting ----------------------------------------------------------------------------------


class Wait(Protocol):
    """Waits for a future, `timeout_s` at most; after a `TimeoutError` the future is cancelled.

    A future that was resolved in the very moment of a time-out or a cancellation is not: who can't
    afford to lose its result asks `future.cancel()`, which then is False.
    """

    async def __call__(self, future: Future[T], timeout_s: float | None = None) -> T: ...


async def block(future: Future[T], timeout_s: float | None = None) -> T:
    """Wait by blocking the thread; a coroutine that only waits so never suspends."""
    try:
        if on_core_loop() and not future.done():
            raise RuntimeError(
                "a blocking call on iaop-core's event loop would wait for itself; "
                "await the asynchronous method instead"
            )
        return future.result(timeout_s)
    except BaseException:
        future.cancel()
        raise


async def suspend(future: Future[T], timeout_s: float | None = None) -> T:
    """Wait by suspending the running task; also for what is there, so that others get to run."""
    if future.done():
        await asyncio.sleep(0)
    else:
        await _settled(future, timeout_s)
    if future.cancelled():
        raise asyncio.CancelledError
    return future.result()


async def _settled(future: Future[T], timeout_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def resolved(_future: Future[T]) -> None:
        with suppress(RuntimeError):  # the waiting loop has been closed meanwhile
            _post(loop, resolve)

    future.add_done_callback(resolved)
    try:
        # Not wait_for, which until Python 3.12 drops a cancellation that comes with the result.
        async with asyncio.timeout(timeout_s):
            await waiter
    except BaseException:
        future.cancel()
        raise


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose waits all block."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a coroutine that was to block has suspended")


# -- streams of work --------------------------------------------------------------------------


class Work(Generic[T]):
    """Something under way elsewhere that yields items: `next()` waits for one, `cancel()` ends it.

    One consumer at a time. As a context manager it cancels at the end. `on_end` is called once,
    when the work has really ended, which may be after the consumer has gone.
    """

    def __init__(self, on_end: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._ready: deque[Future[T | None]] = deque()
        self._waiting: Future[T | None] | None = None
        self._ended = False
        self._on_end = on_end
        self._stop: Callable[[], None] = lambda: None

    def next(self) -> Future[T | None]:
        """The next item; None when the work has ended; or the error that ended it, once."""
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            future: Future[T | None] = Future()
            if self._ended:
                future.set_result(None)
            else:
                self._waiting = future
            return future

    def cancel(self) -> None:
        """End the work, soon; does nothing when it has ended."""
        if not self._ended:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.cancel()

    def _resolve(self, settle: Callable[[Future[T | None]], None], *, last: bool) -> None:
        with self._lock:
            self._ended = self._ended or last
            future, self._waiting = self._waiting, None
            if future is None or not future.set_running_or_notify_cancel():
                future = Future()
                future.set_running_or_notify_cancel()  # who takes it can't cancel it
                self._ready.append(future)
        settle(future)

    def _put(self, item: T) -> None:
        self._resolve(lambda future: future.set_result(item), last=False)

    def _end(self, error: BaseException | None = None) -> None:
        try:
            if error is None:
                self._resolve(lambda future: future.set_result(None), last=True)
            else:
                failure = _as_failure(error)
                self._resolve(lambda future: future.set_exception(failure), last=True)
        finally:
            if self._on_end is not None:
                self._on_end()


def pump(start: Callable[[], Iterable[T]], on_end: Callable[[], None] | None = None) -> Work[T]:
    """Consume `start()` in a thread. A cancelled generator is closed after its next item.

    An iterator that is no generator and has a `close` is closed at once, from another thread: so an
    author makes a slow engine stop promptly.
    """
    work: Work[T] = Work(on_end)
    cancelled = threading.Event()
    iterator: Iterator[T] | None = None

    def close() -> None:
        close_iterator = getattr(iterator, "close", None)
        if close_iterator is not None:
            close_iterator()

    def stop() -> None:
        cancelled.set()
        if iterator is not None and not isinstance(iterator, GeneratorType):
            in_thread(close)  # who cancels waits for nothing, and may be an event loop

    def consume() -> None:
        nonlocal iterator
        try:
            iterator = iter(start())
            try:
                while not cancelled.is_set():
                    try:
                        item = next(iterator)
                    except StopIteration:
                        break
                    work._put(item)
            finally:
                close()
        except BaseException as error:
            work._end(error)
        else:
            work._end()

    work._stop = stop
    in_thread(consume)
    return work


def pump_async(
    start: Callable[[], AsyncIterable[T]], on_end: Callable[[], None] | None = None
) -> Work[T]:
    """Consume `start()` on core's loop. Cancelling the work cancels its task."""
    work: Work[T] = Work(on_end)
    loop = core_loop()
    task: asyncio.Task[None] | None = None

    async def consume() -> None:
        items = start()
        try:
            async for item in items:
                work._put(item)
        finally:
            if hasattr(items, "aclose"):
                await items.aclose()

    def ended(task: asyncio.Task[None]) -> None:
        # Who cancelled the work has gone; for anyone else a cancelled task is a failure.
        work._end(asyncio.CancelledError() if task.cancelled() else task.exception())

    def begin() -> None:
        nonlocal task
        task = loop.create_task(consume())
        task.add_done_callback(ended)  # unlike a finally, runs for a task that never began

    def stop() -> None:
        loop.call_soon_threadsafe(lambda: task.cancel() if task else None)

    work._stop = stop
    loop.call_soon_threadsafe(begin, context=contextvars.copy_context())
    return work
