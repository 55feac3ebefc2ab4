"""How an engine talks to the benchmark: a JSON object a line in, one out.

Everything in this folder runs in the engine's own environment, so this file needs the standard
library alone. A request is `{"messages", "ids", "new_tokens", "arrives_s"}`: one prompt, as chat
messages and as token ids. Its answer tells, in seconds since the run began:

- `submitted`, and `began`: when it was sent, and when its work began;
- `pieces`: when each piece of the answer came, as a rule one token;
- `first`: when the first token was there, and `ended`: when the answer was complete;
- `count` and `prompt_tokens`: tokens of the answer and of the prompt;
- `text` or `ids`: the answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

__all__ = ["Answer", "Clock", "Engine", "Request", "run_clients", "serve"]

Request: TypeAlias = dict[str, Any]
Answer: TypeAlias = dict[str, Any]


class Engine(Protocol):
    """Its public methods are the commands; their arguments and results are JSON."""

    def load(self, **settings: Any) -> dict[str, Any]:
        """Loads the model; returns the versions of what runs it."""

    def run(self, requests: list[Request]) -> list[Answer]:
        """Answers all requests."""


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._started

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


def serve(engine: Engine) -> None:
    """Carries out commands until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not come between the replies
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(engine, command.pop("command"))(**command)
        print(json.dumps(reply), file=replies, flush=True)


def run_clients(
    requests: list[Request], answer: Callable[[Request, Clock, Callable[[], None]], Answer]
) -> list[Answer]:
    """Sends each request from a thread of its own when it arrives.

    Args:
        requests: the requests.
        answer: answers one; calls its last argument at each piece.
    """
    clock = Clock()

    def client(request: Request) -> Answer:
        clock.wait_until(request["arrives_s"])
        submitted, pieces = clock(), []
        told = answer(request, clock, lambda: pieces.append(clock()))
        times = {"submitted": submitted, "began": submitted, "pieces": pieces, "ended": clock()}
        return {**times, "first": pieces[0], **told}

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(client, requests))
