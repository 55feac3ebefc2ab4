"""Carrying work between threads and loops: nothing is lost, nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from conftest import Run
from scripted_site import eventually

from iaop_core import bridge
from iaop_core.errors import StreamInterruptedError

PATIENCE_S = 10.0


class Ends:
    """Counts how often work has ended."""

    def __init__(self) -> None:
        self.count = 0
        self.happened = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.happened.set()

    def once(self) -> bool:
        if not self.happened.wait(PATIENCE_S):
            return False
        time.sleep(0.02)
        return self.count == 1


def take_all(work: bridge.Work[int]) -> list[int]:
    items = []
    while (item := bridge.drive(bridge.block(work.next(), PATIENCE_S))) is not None:
        items.append(item)
    return items


async def atake_all(work: bridge.Work[int]) -> list[int]:
    items = []
    while (item := await bridge.suspend(work.next(), PATIENCE_S)) is not None:
        items.append(item)
    return items


def numbers(count: int = 3) -> Iterator[int]:
    yield from range(count)


async def anumbers(count: int = 3) -> AsyncIterator[int]:
    for number in range(count):
        yield number


Pump = Callable[..., "bridge.Work[int]"]
BOTH = pytest.mark.parametrize(
    ("pump", "source"), [(bridge.pump, numbers), (bridge.pump_async, anumbers)], ids=["sync", "aio"]
)


# -- the loop -----------------------------------------------------------------------------------


def test_coroutines_of_all_callers_run_on_one_loop() -> None:
    async def where() -> int:
        return id(asyncio.get_running_loop())

    seen = {bridge.run(where(), PATIENCE_S) for _ in range(3)}

    async def from_a_loop() -> int:
        return await asyncio.wrap_future(bridge.submit(where()))

    seen |= {asyncio.run(from_a_loop()) for _ in range(3)}
    threads = [bridge.in_thread(lambda: bridge.run(where(), PATIENCE_S)) for _ in range(3)]
    seen |= {thread.result(PATIENCE_S) for thread in threads}
    assert seen == {id(bridge.core_loop())}


def test_blocking_call_on_cores_loop_is_refused_instead_of_hanging() -> None:
    async def wrong() -> None:
        bridge.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="would wait for itself"):
        bridge.run(wrong(), PATIENCE_S)


def test_run_cancels_the_coroutine_when_its_time_is_up() -> None:
    cancelled = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        bridge.run(slow(), 0.05)
    assert cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_loop_survives_a_coroutine_that_would_end_it(error: BaseException) -> None:
    async def end_it() -> None:
        raise error

    with pytest.raises(type(error)):
        bridge.run(end_it(), PATIENCE_S)
    assert bridge.run(asyncio.sleep(0, "alive"), PATIENCE_S) == "alive"


FORK = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore")
from iaop_core import bridge
async def pid():
    return os.getpid()
assert bridge.run(pid(), 10) == os.getpid()
child = os.fork()
if child == 0:
    ok = bridge.run(pid(), 10) == os.getpid()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert bridge.run(pid(), 10) == os.getpid()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_forked_child_has_a_loop_of_its_own(run_python: Run) -> None:
    done = run_python("-c", FORK)
    assert done.returncode == 0, done.stderr


CONNECTED_FORK = """
import asyncio, os, socket
from iaop_core import bridge
here, there = socket.socketpair()
async def connect():
    return await asyncio.open_connection(sock=here)
async def read():
    return await reader.readexactly(2)
reader, writer = bridge.run(connect(), 10)
child = os.fork()
if child == 0:
    writer.transport.abort()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
there.sendall(b"hi")
assert bridge.run(read(), 10) == b"hi"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_connection_that_a_forked_child_lets_go_of_stays_with_its_parent(run_python: Run) -> None:
    done = run_python("-c", CONNECTED_FORK)
    assert done.returncode == 0, done.stderr


def test_end_of_the_process_leaves_no_warning_and_waits_for_no_hung_engine(
    run_python: Run,
) -> None:
    code = (
        "import asyncio, time\nfrom iaop_core import bridge\n"
        "bridge.submit(asyncio.sleep(60))\nbridge.in_thread(lambda: time.sleep(60))\n"
        "bridge.run(asyncio.sleep(0))\n"
    )
    started = time.monotonic()
    done = run_python("-X", "dev", "-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - started < 30


# -- waiting ------------------------------------------------------------------------------------


def test_drive_refuses_a_coroutine_that_suspends() -> None:
    with pytest.raises(RuntimeError, match="was to block has suspended"):
        bridge.drive(asyncio.sleep(0))


def test_timed_out_wait_cancels_the_future() -> None:
    blocked: Future[int] = Future()
    with pytest.raises(TimeoutError):
        bridge.drive(bridge.block(blocked, 0.01))
    assert blocked.cancelled()

    async def suspended() -> bool:
        future: Future[int] = Future()
        with pytest.raises(TimeoutError):
            await bridge.suspend(future, 0.01)
        await asyncio.sleep(0)
        return future.cancelled()

    assert asyncio.run(suspended())


def test_cancellation_that_comes_with_the_result_is_not_dropped() -> None:
    """A caller who cancels must not be answered as if it had not, in whatever order they come."""

    async def one(first: str) -> bool:
        future: Future[int] = Future()
        task = asyncio.ensure_future(bridge.suspend(future, PATIENCE_S))
        await asyncio.sleep(0)
        if first == "result":
            future.set_result(1)
            await asyncio.sleep(0)  # the copy of the result is under way
            task.cancel()
        else:
            task.cancel()
            future.set_result(1)
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert asyncio.run(one("result"))
    assert asyncio.run(one("cancel"))


def test_thread_work_sees_the_callers_context_variables() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("mine")
    assert bridge.in_thread(variable.get).result(PATIENCE_S) == "mine"

    async def read() -> AsyncIterator[str]:
        yield variable.get()

    work = bridge.pump_async(read)
    assert bridge.drive(bridge.block(work.next(), PATIENCE_S)) == "mine"


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("x"), ValueError),
        (SystemExit(3), SystemExit),
        (StopIteration(), RuntimeError),
        (asyncio.CancelledError(), StreamInterruptedError),
    ],
    ids=repr,
)
def test_whatever_a_thread_raises_reaches_both_kinds_of_callers(
    raised: BaseException, seen: type[BaseException]
) -> None:
    def fail() -> None:
        raise raised

    with pytest.raises(seen):
        bridge.drive(bridge.block(bridge.in_thread(fail), PATIENCE_S))

    async def suspended() -> None:
        with pytest.raises(seen):
            await bridge.suspend(bridge.in_thread(fail), PATIENCE_S)

    asyncio.run(suspended())


# -- streams of work ----------------------------------------------------------------------------


@BOTH
def test_items_come_in_order_and_the_end_once(pump: Pump, source: Any) -> None:
    ends = Ends()
    work = pump(lambda: source(100), ends)
    assert take_all(work) == list(range(100))
    assert bridge.drive(bridge.block(work.next())) is None
    assert ends.once()
    work.cancel()
    assert ends.once()


@BOTH
def test_items_come_to_a_suspending_consumer_too(pump: Pump, source: Any) -> None:
    assert asyncio.run(atake_all(pump(lambda: source(100)))) == list(range(100))


@BOTH
@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("x"), ValueError),
        (SystemExit(3), SystemExit),
        (asyncio.CancelledError(), StreamInterruptedError),
        (TimeoutError("mine"), TimeoutError),
    ],
    ids=repr,
)
def test_error_comes_after_the_items_before_it_and_ends_the_work_once(
    pump: Pump, source: Any, raised: BaseException, seen: type[BaseException]
) -> None:
    ends = Ends()

    def fail() -> Iterator[int]:
        yield 1
        raise raised

    async def afail() -> AsyncIterator[int]:
        yield 1
        raise raised

    work = pump(fail if source is numbers else afail, ends)
    assert bridge.drive(bridge.block(work.next(), PATIENCE_S)) == 1
    with pytest.raises(seen):
        bridge.drive(bridge.block(work.next(), PATIENCE_S))
    assert bridge.drive(bridge.block(work.next(), PATIENCE_S)) is None
    assert ends.once()


@BOTH
@pytest.mark.parametrize("raised", [RuntimeError("x"), StopIteration()], ids=repr)
def test_error_before_the_first_item_ends_the_work_once(
    pump: Pump, source: Any, raised: BaseException
) -> None:
    ends = Ends()

    def start() -> Any:
        raise raised

    for _ in range(2):
        work = pump(start, ends)
        with pytest.raises(RuntimeError):
            asyncio.run(atake_all(work))
    assert eventually(lambda: ends.count == 2)


def test_cancelled_task_ends_at_once_and_its_cleanup_runs() -> None:
    ends, cleaned = Ends(), threading.Event()

    async def endless() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    with bridge.pump_async(endless, ends) as work:
        assert bridge.drive(bridge.block(work.next(), PATIENCE_S)) == 1
    assert cleaned.wait(PATIENCE_S)
    assert ends.once()


def test_work_that_is_cancelled_before_it_begins_ends_once() -> None:
    def ticking() -> Iterator[int]:
        while True:
            yield 1
            time.sleep(0.001)

    async def aticking() -> AsyncIterator[int]:
        while True:
            yield 1
            await asyncio.sleep(0.001)

    for begin in (
        lambda ends: bridge.pump(ticking, ends),
        lambda ends: bridge.pump_async(aticking, ends),
    ):
        ends = Ends()
        begin(ends).cancel()
        assert ends.once()


def test_generator_is_closed_after_its_next_item_in_its_own_thread() -> None:
    ends, go_on = Ends(), threading.Event()
    closed_in: list[str] = []

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
                go_on.wait(PATIENCE_S)
        finally:
            closed_in.append(threading.current_thread().name)

    with bridge.pump(endless, ends) as work:
        assert bridge.drive(bridge.block(work.next(), PATIENCE_S)) == 1
    assert not ends.happened.is_set()
    go_on.set()
    assert ends.once()
    assert closed_in == ["iaop-work"]


class Engine:
    """An iterator whose `close` may be called at any time, as a driver of an engine has it."""

    def __init__(self, *, fails: bool = False, close_s: float = 0.0) -> None:
        self._closed = threading.Event()
        self._fails = fails
        self._close_s = close_s
        self._given = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self._given:
            self._given = True
            return 1
        self._closed.wait(60)
        raise StopIteration

    def close(self) -> None:
        self._closed.set()
        time.sleep(self._close_s)
        if self._fails:
            raise OSError("the engine is gone")


@pytest.mark.parametrize("fails", [False, True])
def test_iterator_with_its_own_close_is_stopped_while_it_waits(fails: bool) -> None:
    ends = Ends()
    with bridge.pump(lambda: Engine(fails=fails), ends) as work:
        assert bridge.drive(bridge.block(work.next(), PATIENCE_S)) == 1
    assert ends.once()


def test_who_cancels_does_not_wait_for_a_slow_close() -> None:
    work = bridge.pump(lambda: Engine(close_s=3))
    bridge.drive(bridge.block(work.next(), PATIENCE_S))
    started = time.monotonic()
    work.cancel()
    assert time.monotonic() - started < 2


def test_consumer_that_gives_up_waiting_harms_no_later_item() -> None:
    gate = threading.Event()

    def late() -> Iterator[int]:
        gate.wait(PATIENCE_S)
        yield from range(3)

    work = bridge.pump(late)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            bridge.drive(bridge.block(work.next(), 0.01))
    gate.set()
    assert take_all(work) == [0, 1, 2]


def test_no_wake_up_is_lost_under_stress() -> None:
    """Many producers and consumers of each kind, with pauses at random: all items arrive."""
    chance = random.Random(4711)

    def make_source(seed: int, count: int) -> Callable[[], Iterator[int]]:
        pauses = random.Random(seed)

        def source() -> Iterator[int]:
            for number in range(count):
                if pauses.random() < 0.05:
                    time.sleep(pauses.random() / 1000)
                yield number

        return source

    def make_asource(seed: int, count: int) -> Callable[[], AsyncIterator[int]]:
        pauses = random.Random(seed)

        async def source() -> AsyncIterator[int]:
            for number in range(count):
                if pauses.random() < 0.3:
                    await asyncio.sleep(pauses.random() / 1000)
                yield number

        return source

    def begin(number: int) -> bridge.Work[int]:
        if number % 2:
            return bridge.pump(make_source(number, 100))
        return bridge.pump_async(make_asource(number, 100))

    async def consume_all() -> list[list[int]]:
        return await asyncio.gather(*(atake_all(begin(number)) for number in range(20)))

    for _ in range(5):
        in_threads = [
            bridge.in_thread(lambda number=number: take_all(begin(number)))
            for number in chance.sample(range(100), 20)
        ]
        assert asyncio.run(consume_all()) == [list(range(100))] * 20
        assert [done.result(60) for done in in_threads] == [list(range(100))] * 20


@pytest.mark.timeout(30)
def test_reading_what_is_always_there_lets_the_loops_other_tasks_run() -> None:
    async def read(work: bridge.Work[int]) -> None:
        while await bridge.suspend(work.next()) is not None:
            pass

    async def read_for_a_while() -> None:
        with bridge.pump(lambda: itertools.repeat(1)) as work:
            reader = asyncio.ensure_future(read(work))
            await asyncio.sleep(0.05)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(read_for_a_while())


def test_no_end_is_lost_when_consumers_leave_at_random() -> None:
    chance = random.Random(7)
    ends = Ends()

    async def endless() -> AsyncIterator[int]:
        while True:
            yield 1
            await asyncio.sleep(0)

    def ticking() -> Iterator[int]:
        while True:
            yield 1
            time.sleep(0.001)

    async def leave(number: int) -> None:
        begin = bridge.pump_async if number % 2 else bridge.pump
        with begin(endless if number % 2 else ticking, ends) as work:  # type: ignore[operator]
            task = asyncio.ensure_future(atake_all(work))
            await asyncio.sleep(chance.random() / 50)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def leave_all() -> None:
        for _ in range(10):
            await asyncio.gather(*(leave(number) for number in range(20)))

    asyncio.run(leave_all())
    assert eventually(lambda: ends.count == 200)
    time.sleep(0.05)
    assert ends.count == 200


async def _twice(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_many_calls_at_once_cross_to_cores_loop_and_back_each_with_its_own_answer() -> None:
    async def ask() -> list[int]:
        return await asyncio.gather(*(bridge.on_core(_twice(i)) for i in range(500)))

    assert asyncio.run(ask()) == [2 * i for i in range(500)]


def test_call_that_was_cancelled_is_cancelled_on_cores_loop() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bridge.on_core(work()), 0.05)

    asyncio.run(leave())
    assert ended.wait(5)


def test_error_of_a_call_on_cores_loop_is_its_callers() -> None:
    async def fail() -> None:
        raise LookupError("there")

    async def ask() -> None:
        await bridge.on_core(fail())

    with pytest.raises(LookupError, match="there"):
        asyncio.run(ask())


def test_loop_that_has_waited_for_core_is_freed() -> None:
    async def ask() -> weakref.ref[asyncio.AbstractEventLoop]:
        await bridge.on_core(_twice(1))
        await bridge.suspend(bridge.submit(_twice(1)))
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(ask())
    gc.collect()
    assert loop() is None
