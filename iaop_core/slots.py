"""Places at a backend: a semaphore that threads and event loops wait for alike, in order."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress

from iaop_core.bridge import Wait

__all__ = ["Slots"]


class Slots:
    """At most `limit` holders at a time; the others wait first come, first served."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    @property
    def in_use(self) -> int:
        return self.limit - self._free

    async def acquire(self, wait: Wait, timeout_s: float) -> None:
        """Take a slot. Raises `TimeoutError`; a slot granted in that very moment is given back."""
        future: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self._waiting.append(future)
        try:
            await wait(future, timeout_s)
        except BaseException:
            if future.cancel():
                with self._lock, suppress(ValueError):
                    self._waiting.remove(future)
            else:
                self.release()
            raise

    def release(self) -> None:
        """Give a slot back; the longest waiting caller gets it."""
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        future.set_result(None)
