"""An engine on a tiny real model, whose every use of the cache is seen, and greedy jobs for it.

A test acts between two uses of the cache, in the engine's own thread, so it chooses the order in
which things happen and needs no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_decoders import TinyDecoder

from iaop_onnx_local.decoder import Decoder
from iaop_onnx_local.engine import Engine
from iaop_onnx_local.growing_cache import GrowingCache
from iaop_onnx_local.kv_cache import KvCache
from iaop_onnx_local.session import open_session
from iaop_onnx_local.shared_cache import SharedCache

GROUPED = TinyDecoder(grouped=True, rotary=True, key_size=16, value_size=16)
PADDED = TinyDecoder(positions=True)
IN_TURNS = TinyDecoder()
KINDS = {"grouped": GROUPED, "in-pairs": GROUPED, "padded": PADDED, "in-turns": IN_TURNS}
CAPACITY = 64
TIMEOUT_S = 30.0


def open_tiny_cache(folder: Path, kind: str, *, rows: int, capacity: int = CAPACITY) -> KvCache:
    path = KINDS[kind].write(folder / f"{kind}.onnx")
    opened = open_session(path, device="cpu", threads=1)
    decoder = Decoder(opened, path, head_size=None, kv_heads=None)
    if decoder.shares_buffer:
        return SharedCache(decoder, rows=rows, capacity=capacity, pairs=kind == "in-pairs")
    return GrowingCache(decoder, rows=rows, capacity=capacity)


class WatchedCache:
    """A cache that notes how it is used."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.calls: list[tuple[Any, ...]] = []
        """`("extend", row, tokens)`, `("step", rows)`, `("cut", row, length)` and
        `("copy", source, target, length)`."""
        self.before: Callable[[tuple[Any, ...]], object] = lambda call: None
        """Called in the engine's thread with each use before it happens; it may raise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def extend(self, row: int, token_ids: Sequence[int], options: Any = None) -> Any:
        self._note("extend", row, len(token_ids))
        return self._cache.extend(row, token_ids, options)

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> Any:
        self._note("step", list(rows))
        return self._cache.step(rows, token_ids)

    def cut(self, row: int, length: int) -> None:
        self._note("cut", row, length)
        self._cache.cut(row, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self._note("copy", source, target, length)
        self._cache.copy(source, target, length)

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == kind]

    @property
    def tokens_read(self) -> int:
        """Of prompts."""
        return sum(call[2] for call in self.of("extend"))

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self.before(call)


class Greedy:
    """A job that takes the likeliest token, so many times."""

    def __init__(self, prompt_ids: Sequence[int], tokens: int) -> None:
        self.prompt_ids = list(prompt_ids)
        self.tokens = tokens
        self.ids: list[int] = []
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.on_token: Callable[[Greedy], object] = lambda job: None
        """Called in the engine's thread after each token; it may raise."""

    def take(self, logits: np.ndarray[Any, Any]) -> int | None:
        assert not self.ended.is_set(), "the engine goes on with a job that has ended"
        self.ids.append(int(logits.argmax()))
        self.on_token(self)
        if len(self.ids) < self.tokens:
            return self.ids[-1]
        self.ended.set()
        return None

    def fail(self, error: Exception) -> None:
        assert not self.ended.is_set(), "the engine ends a job twice"
        self.error = error
        self.ended.set()

    def result(self) -> list[int]:
        """Waits for the end."""
        assert self.ended.wait(TIMEOUT_S), "the job doesn't end"
        if self.error is not None:
            raise self.error
        return self.ids


class WatchedEngine:
    """An engine on a watched cache of a tiny model."""

    def __init__(
        self,
        folder: Path,
        kind: str = "grouped",
        *,
        rows: int = 4,
        capacity: int = CAPACITY,
        prompt_part: int = 8,
        max_waiting: int = 1000,
        lends_answers: bool = True,
    ) -> None:
        self.tiny = KINDS[kind]
        self.cache = WatchedCache(open_tiny_cache(folder, kind, rows=rows, capacity=capacity))
        self.engine = Engine(
            self.cache,  # type: ignore[arg-type]
            prompt_part=prompt_part,
            max_waiting=max_waiting,
            name="watched",
            lends_answers=lends_answers,
        )

    def __enter__(self) -> WatchedEngine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.engine.close()

    def start(self, prompt_ids: Sequence[int], tokens: int = 8) -> Greedy:
        job = Greedy(prompt_ids, tokens)
        self.engine.submit(job)
        return job

    def answer(self, prompt_ids: Sequence[int], tokens: int = 8) -> list[int]:
        return self.start(prompt_ids, tokens).result()

    def expected(self, prompt_ids: Sequence[int], tokens: int = 8) -> list[int]:
        """The greedy answer by the model's definition, which knows no cache and no batch."""
        ids = list(prompt_ids)
        for _ in range(tokens):
            ids.append(int(self.tiny.logits(ids).argmax()))
        return ids[len(prompt_ids) :]

    def wait_until_idle(self) -> None:
        deadline = threading.Event()
        for _ in range(int(TIMEOUT_S * 1000)):
            load = self.engine.load
            if not load.running and not load.waiting:
                return
            deadline.wait(0.001)
        raise AssertionError(f"the engine doesn't come to rest: {self.engine.load}")
