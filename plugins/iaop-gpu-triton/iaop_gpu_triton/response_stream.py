"""The responses of one call, on their way from the connection's reader to the caller."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from attrs import frozen

from iaop_core.errors import IaopError
from iaop_gpu_triton.tensors import Response

Waited: TypeAlias = Literal["first response", "further response", "whole answer"]


@frozen
class TimeLimits:
    """How long to wait, in seconds; infinite: for ever."""

    first_s: float
    """For the first response."""
    silence_s: float
    """For each further one, from the one before."""
    total_s: float
    """For the end, from the beginning."""


class ResponseStream:
    """A queue with one reader of a connection at one end and one caller at the other.

    The reader calls `put` for each response and, once, `end` or `fail`. The caller awaits `next`.
    The time limits watch the server, not the caller: a slow caller is no silence.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Response] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: IaopError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = -math.inf
        self._deadline = math.inf
        self._total_deadline = math.inf
        self._silence_s = math.inf
        self.answering = False
        """Whether a response has come."""
        self.on_leave: Callable[[], None] = _nothing
        """Ends the work on the server; set by the transport."""

    def watch(self, limits: TimeLimits, timed_out: Callable[[Waited, float], IaopError]) -> None:
        """Fail with the error of `timed_out`, given what was missing and its limit, in time."""
        now = self._loop.time()
        self._limits, self._timed_out = limits, timed_out
        self._silence_s = limits.silence_s
        self._total_deadline = now + limits.total_s
        self._deadline = min(now + limits.first_s, self._total_deadline)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        if self._deadline < math.inf:
            self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        if self._loop.time() < self._deadline:
            self._set_timer()
        elif self._deadline >= self._total_deadline:
            self.fail(self._timed_out("whole answer", self._limits.total_s))
        elif self.answering:
            self.fail(self._timed_out("further response", self._silence_s))
        else:
            self.fail(self._timed_out("first response", self._limits.first_s))

    def put(self, response: Response) -> None:
        """Another response."""
        if self._ended:
            return
        self.answering = True
        self._deadline = min(self._loop.time() + self._silence_s, self._total_deadline)
        # A timer that is too early looks again when its time has come: that is cheaper than
        # setting another one for each response.
        if self._deadline < self._timer_at:
            self._set_timer()
        self._ready.append(response)
        self._wake()

    def end(self) -> None:
        """The server has stated the end of the answer."""
        self._close(None)

    def fail(self, error: IaopError) -> None:
        """There will be no end; nothing happens when there was one."""
        self._close(error)

    def _close(self, error: IaopError | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            if self._timer is not None:
                self._timer.cancel()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Response | None:
        """The next response; None after the last. Raises the error that came instead."""
        while not self._ready:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._ready.popleft()

    def leave(self) -> None:
        """The caller has gone, or has all it wants: the work on the server is cancelled."""
        self._close(None)
        self.on_leave()


def _nothing() -> None: ...
