"""The contract between core and an inference backend. Business code depends on this alone."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from iaop_core import bridge
from iaop_core.capabilities import BackendCapabilities, BackendHealth
from iaop_core.errors import StreamInterruptedError
from iaop_core.messages import InferChunk, InferResult, Params, Prompt

__all__ = ["Context", "InferenceBackend", "Mode", "start_work"]

Context: TypeAlias = Sequence[str] | None
Mode: TypeAlias = Literal["infer", "stream"]

_FACES = ("infer", "stream", "ainfer", "astream")
_PINNED = "_runs_on_core_loop"


class InferenceBackend(ABC):
    """Runs one model on one kind of hardware or service.

    An author writes `capabilities`, `load_model`, `health_check` and `unload`, and at least one of
    `infer`, `stream`, `ainfer`, `astream`; core derives the others. The asynchronous ones always
    run on core's event loop (`iaop_core.bridge`), whoever calls them; the synchronous ones run in
    whatever thread calls them, several at a time up to `capabilities.max_concurrency`.
    """

    name: str
    """The backend's name, equal to its entry point's name."""

    _own: frozenset[str] = frozenset()
    """Which of the four faces the class, or a base of it, has written itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for face, pin in (("ainfer", _pin_call), ("astream", _pin_stream)):
            method = getattr(cls, face)  # written here, or inherited from a class beside ours
            if method is not getattr(InferenceBackend, face) and not hasattr(method, _PINNED):
                setattr(cls, face, pin(method))
        cls._own = frozenset(
            face for face in _FACES if getattr(cls, face) is not getattr(InferenceBackend, face)
        )

    def __new__(cls, *_args: Any, **_kwargs: Any) -> InferenceBackend:
        backend = super().__new__(cls)
        if not cls._own:
            raise TypeError(f"{cls.__name__} must write one of {', '.join(_FACES)}")
        return backend

    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities:
        """What the backend can do; answering touches no device and no network."""

    @property
    def offline(self) -> bool:
        """Whether answers come from the offline kernel; a backend with an offline mode says so."""
        return False

    @abstractmethod
    def load_model(self, model_id: str = "") -> None:
        """Load or bind a model; an empty id means the configured default.

        Loading the model that is loaded is a no-op. Loading another one replaces it, and the new
        one is ready before the old one goes. Raises `ModelLoadError`, `BackendUnavailableError`.
        """

    @abstractmethod
    def health_check(self) -> BackendHealth:
        """How the loaded model is. Never raises: a failing probe is unhealthy, `probe_error: …`."""

    @abstractmethod
    def unload(self) -> None:
        """Release the model; safe when nothing is loaded. `infer` then fails closed."""

    def infer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        """One answer. `context` is a sequence of source texts.

        Raises `ModelNotLoadedError` before `load_model`, and what `iaop_core.errors` tells.
        """
        if "stream" in self._own:
            return _result_of(self.stream(prompt, context, params=params), self.name)
        return _result_of(_blocking(start_work(self, "infer", prompt, context, params)), self.name)

    def stream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> Iterator[InferChunk]:
        """The answer as it is made: deltas, then one chunk with `delta=""` and the result.

        A stream without that end is an error. No delta holds half a character. Closing the iterator
        early cancels the work within a second.
        """
        if "infer" in self._own and not self._own & {"astream", "ainfer"}:
            yield from _as_chunks(self.infer(prompt, context, params=params))
        else:
            yield from _blocking(start_work(self, "stream", prompt, context, params))

    async def ainfer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        """As `infer`. Cancelling the task cancels the work."""
        work = start_work(self, "infer", prompt, context, params)
        result = None
        async with aclosing(_suspending(work)) as chunks:
            async for chunk in chunks:
                result = chunk.result or result
        return _required(result, self.name)

    async def astream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> AsyncIterator[InferChunk]:
        """As `stream`. Closing the generator, or cancelling the task, cancels the work."""
        work = start_work(self, "stream", prompt, context, params)
        async with aclosing(_suspending(work)) as chunks:
            async for chunk in chunks:
                yield chunk

    def generate(self, prompt: Prompt, context: Context = None) -> str:
        """The text of `infer`."""
        return self.infer(prompt, context).text

    def close(self) -> None:
        """Release everything; the backend is not used afterwards. The inherited one unloads."""
        self.unload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def start_work(
    backend: InferenceBackend,
    mode: Mode,
    prompt: Prompt,
    context: Context,
    params: Params,
    *,
    on_end: Callable[[], None] | None = None,
) -> bridge.Work[InferChunk]:
    """Begin one call in the face that the backend's author wrote, off the caller's thread.

    In the mode `infer` the deltas may be left out. `on_end` is called when the backend has really
    ended the call, also when the caller has long gone.
    """
    own = backend._own

    async def ainfer() -> AsyncIterator[InferChunk]:
        for chunk in _as_chunks(await backend.ainfer(prompt, context, params=params)):
            yield chunk

    def infer() -> Iterator[InferChunk]:
        yield from _as_chunks(backend.infer(prompt, context, params=params))

    faces = ("ainfer", "infer", "astream", "stream")
    if mode == "stream":
        faces = ("astream", "stream", "ainfer", "infer")
    face = next(face for face in faces if face in own)
    if face == "ainfer":
        return bridge.pump_async(ainfer, on_end)
    if face == "astream":
        return bridge.pump_async(lambda: backend.astream(prompt, context, params=params), on_end)
    if face == "infer":
        return bridge.pump(infer, on_end)
    return bridge.pump(lambda: backend.stream(prompt, context, params=params), on_end)


def _as_chunks(result: InferResult) -> Iterator[InferChunk]:
    logprobs = result.logprobs or ()
    if result.text:
        yield InferChunk(result.text, logprobs=logprobs)
        logprobs = ()
    yield InferChunk("", result, logprobs)


def _result_of(chunks: Iterator[InferChunk], name: str) -> InferResult:
    result = None
    for chunk in chunks:
        result = chunk.result or result
    return _required(result, name)


def _required(result: InferResult | None, name: str) -> InferResult:
    if result is None:
        raise StreamInterruptedError(
            f"backend {name!r} ended its stream without a result; the answer is not complete",
            backend=name,
        )
    return result


def _blocking(work: bridge.Work[InferChunk]) -> Iterator[InferChunk]:
    with work:
        while (chunk := bridge.drive(bridge.block(work.next()))) is not None:
            yield chunk


async def _suspending(work: bridge.Work[InferChunk]) -> AsyncGenerator[InferChunk, None]:
    with work:
        while (chunk := await bridge.suspend(work.next())) is not None:
            yield chunk


def _pin_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a coroutine method on core's loop, from wherever it is awaited."""

    @functools.wraps(method)
    async def pinned(self: InferenceBackend, *args: Any, **kwargs: Any) -> Any:
        if bridge.on_core_loop():
            return await method(self, *args, **kwargs)
        return await bridge.on_core(method(self, *args, **kwargs))

    setattr(pinned, _PINNED, True)
    return pinned


def _pin_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run an asynchronous generator method on core's loop, from wherever it is iterated."""

    @functools.wraps(method)
    async def pinned(self: InferenceBackend, *args: Any, **kwargs: Any) -> Any:
        if bridge.on_core_loop():
            items = method(self, *args, **kwargs)
            try:
                async for item in items:
                    yield item
            finally:
                if hasattr(items, "aclose"):
                    await items.aclose()
        else:
            work = bridge.pump_async(lambda: method(self, *args, **kwargs))
            async with aclosing(_suspending(work)) as chunks:
                async for item in chunks:
                    yield item

    setattr(pinned, _PINNED, True)
    return pinned
