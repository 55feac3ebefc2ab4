"""A lock that is handed on in the order of asking."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Threads take turns, first come, first served; use it in a `with` statement.

    `threading.Lock` promises no order: a thread that lets go and asks again can get it again and
    again, and another one's answer stands still.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()  # the turn passes on, still taken
            else:
                self._taken = False
