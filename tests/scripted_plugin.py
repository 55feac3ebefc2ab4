"""A plugin whose backends do what a test tells them, found and made as any other plugin's are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from attrs import Factory, define, field, frozen

from iaop_core import (
    BackendCapabilities,
    BackendHealth,
    BackendSpec,
    GenerationParams,
    InferChunk,
    InferenceBackend,
    InferResult,
    hookimpl,
)

SCRIPTS: dict[str, Script] = {}
"""What each backend does, by the `script` of its settings."""


@define
class Script:
    """`answer(prompt)` yields texts, chunks and errors to raise, in the given face."""

    name: str
    answer: Callable[[Any], Any] = lambda prompt: iter(["a ", str(prompt)])
    face: str = "stream"
    on_premises: bool = True
    streaming: bool = True
    max_concurrency: int = 8
    params: frozenset[str] = frozenset({"max_tokens", "temperature"})
    offline: bool = False
    load: Callable[[], Any] = lambda: None
    health: Callable[[], Any] = lambda: BackendHealth(True, "loaded=True")
    close: Callable[[], Any] = lambda: None
    make: Callable[[], Any] = lambda: None
    calls: list[str] = Factory(list)
    """The prompts, in the order of the calls."""
    running: int = 0
    most_running: int = 0
    ended: int = 0
    threads: set[str] = Factory(set)
    lock: Any = field(factory=threading.Lock, repr=False)

    def began(self, prompt: Any) -> None:
        with self.lock:
            self.calls.append(str(prompt))
            self.threads.add(threading.current_thread().name)
            self.running += 1
            self.most_running = max(self.most_running, self.running)

    def has_ended(self) -> None:
        with self.lock:
            self.running -= 1
            self.ended += 1


@frozen
class ScriptedSettings:
    script: str


class _Scripted(InferenceBackend):
    name = "scripted"

    def __init__(self, script: Script) -> None:
        self.script = script
        script.make()

    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(
            streaming=self.script.streaming,
            max_concurrency=self.script.max_concurrency,
            on_premises=self.script.on_premises,
            params=self.script.params,
            device="cpu",
            offline_mode=True,
        )

    @property
    def offline(self) -> bool:
        return self.script.offline

    def load_model(self, model_id: str = "") -> None:
        self.script.load()

    def health_check(self) -> Any:
        return self.script.health()

    def unload(self) -> None: ...

    def close(self) -> None:
        self.script.close()

    def chunk(self, item: Any, so_far: list[str]) -> Any:
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, str):
            so_far.append(item)
            return InferChunk(item)
        return item

    def end(self, so_far: list[str]) -> InferChunk:
        text = "".join(so_far)
        return InferChunk("", answer_of(text, offline=self.script.offline))


def answer_of(text: str, **facts: Any) -> InferResult:
    return InferResult(
        **{
            "text": text,
            "backend_name": "scripted",
            "model_id": "script",
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "latency_ms": 1.0,
            "device": "cpu",
            **facts,
        }
    )


NO_END = object()
"""As the last item of an answer: the stream just stops."""


class _Sync(_Scripted):
    def stream(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
        GenerationParams.from_input(params)
        self.script.began(prompt)
        so_far: list[str] = []
        try:
            for item in self.script.answer(prompt):
                if item is NO_END:
                    return
                yield self.chunk(item, so_far)
            yield self.end(so_far)
        finally:
            self.script.has_ended()


class _Async(_Scripted):
    async def astream(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
        self.script.began(prompt)
        so_far: list[str] = []
        try:
            async for item in self.script.answer(prompt):
                if item is NO_END:
                    return
                yield self.chunk(item, so_far)
            yield self.end(so_far)
        finally:
            self.script.has_ended()


class _SyncWhole(_Scripted):
    def infer(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
        self.script.began(prompt)
        so_far: list[str] = []
        try:
            for item in self.script.answer(prompt):
                self.chunk(item, so_far)
            return self.end(so_far).result
        finally:
            self.script.has_ended()


class _AsyncWhole(_Scripted):
    async def ainfer(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
        self.script.began(prompt)
        so_far: list[str] = []
        try:
            async for item in self.script.answer(prompt):
                self.chunk(item, so_far)
            return self.end(so_far).result
        finally:
            self.script.has_ended()


_FACES = {"stream": _Sync, "astream": _Async, "infer": _SyncWhole, "ainfer": _AsyncWhole}


def _make(settings: ScriptedSettings) -> InferenceBackend:
    script = SCRIPTS[settings.script]
    return _FACES[script.face](script)


@hookimpl
def iaop_backends() -> Sequence[BackendSpec]:
    return [
        BackendSpec(
            name="scripted",
            summary="Does what a test tells it",
            api_version="1.0",
            capabilities=BackendCapabilities(
                streaming=True, max_concurrency=8, on_premises=True, offline_mode=True
            ),
            settings_class=ScriptedSettings,
            factory=_make,
        )
    ]
