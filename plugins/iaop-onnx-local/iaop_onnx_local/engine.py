"""Continuous batching: answers join and leave a running batch at each step.

One thread runs the model. A round of it first reads a part of the prompts of the newcomers, then
makes one token for every answer that is under way. The part is small while others wait for their
next token, so a long prompt stalls nobody, and newcomers are read in the order in which they came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from attrs import define, field, frozen
from numpy.typing import NDArray

from iaop_onnx_local.kv_cache import KvCache

__all__ = ["Engine", "EngineClosedError", "EngineFullError", "EngineLoad", "Job"]

_log = logging.getLogger(__name__)

_LONE_PART: Final = 256
"""Prompt tokens of a round when nobody waits for a token."""
_LEAST_PART: Final = 2
"""Prompt tokens of a run: kernels round otherwise for one token than for several, and a prompt must
come out the same however it is cut, and however much of it is known."""
_WORTH_COPYING: Final = 16
"""Tokens: reading fewer is as fast as copying what another row holds of them."""


class EngineClosedError(Exception):
    """The engine takes no more jobs, or was closed before this one's end."""


class EngineFullError(Exception):
    """As many jobs wait as may."""


class Job(Protocol):
    """One answer to make, as the engine sees it."""

    prompt_ids: list[int]
    """At least one token; with the answer no more than the cache's rows hold."""

    def take(self, logits: NDArray[np.floating]) -> int | None:
        """Chooses the next token from `[vocabulary]`; None when the answer has ended.

        Called in the engine's thread. What it raises ends the job.
        """

    def fail(self, error: Exception) -> None:
        """Tells that the job has ended without its end. Called in the engine's thread."""


@frozen(slots=True)
class EngineLoad:
    """What an engine is doing."""

    running: int
    """Jobs that hold a row of the cache."""
    waiting: int
    """Jobs that wait for one."""
    still_s: float
    """How long there has been work and no step has ended."""
    ended: bool = False
    """Whether no job will end any more: it was closed, or its thread is gone."""


@define(eq=False, slots=True)
class _Ticket:
    """A job from submission to its end."""

    job: Job
    options: Any = field(factory=onnxruntime.RunOptions)
    """Of the runs on its prompt: they serve nobody else, so they can be ended at once."""
    cancelled: bool = False


@define(eq=False, slots=True)
class _Row:
    """A row of the cache."""

    index: int
    ids: list[int] = field(factory=list)
    """The tokens that it holds."""
    read: int = 0
    """How many of them were read as a prompt; the others were made."""
    ticket: _Ticket | None = None
    next_id: int = 0
    """The token that was chosen and is to be read."""
    used_at: int = 0
    """When a job last began or ended in it, by a count of such events."""


class Engine:
    """Makes answers, up to the cache's number of rows at a time.

    Args:
        cache: its rows.
        prompt_part: prompt tokens read in one round while other answers are under way.
        max_waiting: jobs that may wait for a row.
        name: of the thread.
        lends_answers: whether a text may go on from an answer that was made, and not only from
            prompts that were read. The kernels for quantized weights round otherwise for the one
            than for the other, so a text could depend on what is still known.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        prompt_part: int,
        max_waiting: int,
        name: str,
        lends_answers: bool = True,
    ) -> None:
        self._cache = cache
        self._lends_answers = lends_answers
        self._prompt_part = prompt_part
        self._max_waiting = max_waiting
        self._rows = [_Row(index) for index in range(cache.rows)]
        self._reading: _Row | None = None
        self._waiting: deque[_Ticket] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._stopped = False
        self._uses = 0
        self._moved_at = 0.0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Callable[[], None]:
        """Takes a job.

        Returns:
            What cancels it: its row is free within a step, and neither `take` nor `fail` is called
            any more. Does nothing once it has ended. From any thread.

        Raises:
            EngineClosedError: after `close`.
            EngineFullError: as many wait as may.
        """
        ticket = _Ticket(job)
        with self._wake:
            if self._closed:
                raise EngineClosedError
            tickets = [row.ticket for row in self._rows]  # each may end at any moment
            free = sum(ticket is None or ticket.cancelled for ticket in tickets)
            if len(self._waiting) >= free + self._max_waiting:
                raise EngineFullError
            if self._is_idle():
                self._moved_at = time.monotonic()
            self._waiting.append(ticket)
            self._wake.notify()

        def cancel() -> None:
            ticket.cancelled = True
            ticket.options.terminate = True
            if not self._thread.is_alive():
                return  # in a forked process the lock may be held for ever
            with self._wake:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                self._wake.notify()

        return cancel

    def close(self, *, finish: bool = False) -> None:
        """Takes no more jobs; ends those under way with an error, or (`finish`) lets them end.

        Returns when the thread has ended, unless it is to finish. Idempotent.
        """
        if not self._thread.is_alive():
            return  # in a forked process the lock may be held for ever
        with self._wake:
            self._closed = True
            if not finish:
                self._stopped = True
                for ticket in [row.ticket for row in self._rows]:
                    if ticket is not None:
                        ticket.options.terminate = True
            self._wake.notify()
        if not finish and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def load(self) -> EngineLoad:
        """What it is doing; never waits for a step."""
        running = sum(row.ticket is not None for row in self._rows)
        waiting = len(self._waiting)
        still_s = time.monotonic() - self._moved_at if running or waiting else 0.0
        return EngineLoad(running, waiting, still_s, not self._thread.is_alive())

    # -- the thread ------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        return not self._waiting and all(row.ticket is None for row in self._rows)

    def _work(self) -> None:
        reason: Exception = EngineClosedError()
        try:
            while self._wait_for_work():
                self._read_prompts()
                self._make_tokens()
        except Exception as error:
            _log.exception("the engine's thread was ended by an error of its own")
            reason = error
        finally:
            with self._wake:
                self._closed = True
                left = [*self._waiting, *(row.ticket for row in self._rows if row.ticket)]
                self._waiting.clear()
                for row in self._rows:
                    row.ticket = None
            for ticket in left:
                _tell(ticket, reason)

    def _wait_for_work(self) -> bool:
        """Returns whether there is any; False when there will be none."""
        with self._wake:
            for row in self._rows:
                if row.ticket is not None and row.ticket.cancelled:
                    row.ticket = None
            while self._is_idle() and not self._closed:
                self._wake.wait()
            return not self._stopped and not self._is_idle()

    def _read_prompts(self) -> None:
        """Reads as much of the newcomers' prompts as a round may."""
        if self._reading is None and not self._waiting:
            return
        left = self._prompt_part if self._running() else _LONE_PART
        while left > 0:
            row = self._reading
            if row is None or row.ticket is None or row.ticket.cancelled:
                row = self._reading = self._seat_next()
                if row is None:
                    return
                if row.ticket is None:
                    continue
            part = _part(row.ticket.job.prompt_ids[len(row.ids) :], left)
            left -= len(part)
            try:
                logits = self._cache.extend(row.index, part, row.ticket.options)
            except Exception as error:
                self._end(row, error)
                continue
            finally:
                self._moved_at = time.monotonic()
            row.ids += part
            row.read = len(row.ids)
            if len(row.ids) == len(row.ticket.job.prompt_ids):
                self._reading = None
                self._take(row, logits)
                left = min(left, self._prompt_part)

    def _seat_next(self) -> _Row | None:
        """Gives a row to the one that has waited longest, with what is known of its prompt.

        Returns:
            The row, without a job where that failed; None when there is none, or none waits.
        """
        free = [row for row in self._rows if row.ticket is None]
        with self._wake:
            if not free or not self._waiting or self._stopped:
                return None
            ticket = self._waiting.popleft()
            prompt = ticket.job.prompt_ids
            # The last part has to be read anyway: the logits after it are wanted.
            lent = {row.index: self._lent(row) for row in self._rows}
            shared = {row: _common(ids, prompt[:-_LEAST_PART]) for row, ids in lent.items()}
            row = _least_loss(free, lent, shared)
            row.ticket = ticket
            self._use(row)
        source = max(self._rows, key=lambda row: shared[row.index])
        try:
            if shared[source.index] >= shared[row.index] + _WORTH_COPYING:
                self._copy(source, row, shared[source.index])
            else:
                del row.ids[shared[row.index] :]
                row.read = min(row.read, len(row.ids))
                self._cache.cut(row.index, len(row.ids))
        except Exception as error:
            row.ids = []
            self._end(row, error)
        return row

    def _make_tokens(self) -> None:
        """Makes one token for every answer that is under way."""
        rows = self._closed_up(self._running())
        if not rows or self._stopped:
            return
        try:
            all_logits = self._cache.step(
                [row.index for row in rows], [row.next_id for row in rows]
            )
        except Exception as error:
            for row in rows:
                self._end(row, error)
            return
        finally:
            self._moved_at = time.monotonic()
        for row, logits in zip(rows, all_logits, strict=True):
            row.ids.append(row.next_id)
            self._take(row, logits)

    def _running(self) -> list[_Row]:
        """The rows whose answers are under way, in order."""
        return [
            row
            for row in self._rows
            if row.ticket is not None and row is not self._reading and not row.ticket.cancelled
        ]

    def _closed_up(self, rows: list[_Row]) -> list[_Row]:
        """Moves answers from the far end into gaps, since a run computes the gaps as well.

        A gap is left for a newcomer, where there is one.
        """
        if not (self._cache.steps_spans and self._cache.joins_rows):
            return rows
        while rows and rows[-1].index - rows[0].index >= len(rows):
            gaps = [row for row in self._rows[rows[0].index : rows[-1].index] if not row.ticket]
            if not gaps or self._waiting or self._reading:
                break
            gap, last = gaps[0], rows[-1]
            try:
                self._copy(last, gap, len(last.ids))
            except Exception as error:
                self._end(last, error)
                return self._running()
            gap.next_id, gap.used_at = last.next_id, last.used_at
            gap.ticket, last.ticket = last.ticket, None
            rows = self._running()
        return rows

    def _copy(self, source: _Row, target: _Row, length: int) -> None:
        target.ids = []  # in case it fails halfway
        self._cache.copy(source.index, target.index, length)
        target.ids = source.ids[:length]
        target.read = min(source.read, length)

    def _lent(self, row: _Row) -> list[int]:
        """What another text may go on from."""
        return row.ids if self._lends_answers else row.ids[: row.read]

    def _take(self, row: _Row, logits: NDArray[np.floating]) -> None:
        ticket = row.ticket
        if ticket is None or ticket.cancelled:
            return
        try:
            token = ticket.job.take(logits)
        except Exception as error:
            self._end(row, error)
            return
        if token is None:
            self._use(row)
            row.ticket = None
        else:
            row.next_id = token

    def _use(self, row: _Row) -> None:
        self._uses += 1
        row.used_at = self._uses

    def _end(self, row: _Row, error: Exception) -> None:
        ticket, row.ticket = row.ticket, None
        if ticket is not None:
            _tell(ticket, EngineClosedError() if self._stopped else error)


def _tell(ticket: _Ticket, error: Exception) -> None:
    if not ticket.cancelled:
        try:
            ticket.job.fail(error)
        except Exception:  # the other jobs go on
            _log.exception("an answer's end could not be told")


def _least_loss(
    free: Sequence[_Row], lent: Mapping[int, Sequence[int]], shared: Mapping[int, int]
) -> _Row:
    """The row to give away: one all of whose content goes on, an empty one, the oldest one."""
    continued = [row for row in free if 0 < len(lent[row.index]) == shared[row.index]]
    if continued:
        return max(continued, key=lambda row: shared[row.index])
    return min(free, key=lambda row: (bool(row.ids), row.used_at))


def _part(unread: list[int], left: int) -> list[int]:
    """What to read now of a prompt, of about `left` tokens."""
    size = max(left, _LEAST_PART)
    return unread[:size] if len(unread) - size >= _LEAST_PART else unread[: size + _LEAST_PART - 1]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    length = min(len(one), len(other))
    if list(one[:length]) == list(other[:length]):
        return length
    return next(place for place in range(length) if one[place] != other[place])
