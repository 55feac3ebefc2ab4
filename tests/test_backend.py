"""The contract between core and a backend: whichever face is written, the others follow."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from scripted_site import eventually

from iaop_core import (
    BackendCapabilities,
    BackendHealth,
    InferChunk,
    InferenceBackend,
    InferResult,
    bridge,
)
from iaop_core.errors import InvalidRequestError, StreamInterruptedError

FACES = ("infer", "stream", "ainfer", "astream")


def result(text: str) -> InferResult:
    return InferResult(
        text=text,
        backend_name="b",
        model_id="m",
        prompt_tokens=1,
        completion_tokens=1,
        latency_ms=1.0,
    )


class Bare(InferenceBackend):
    """What every backend here has; the faces are added."""

    name = "b"
    capabilities = BackendCapabilities(streaming=True, max_concurrency=4, on_premises=True)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.begun = threading.Event()
        self.ended = threading.Event()

    def load_model(self, model_id: str = "") -> None: ...

    def health_check(self) -> BackendHealth:
        return BackendHealth(healthy=True)

    def unload(self) -> None: ...

    def note(self) -> None:
        self.threads.add(threading.current_thread().name)


class OnlyInfer(Bare):
    def infer(self, prompt: Any, context: Any = None, *, params: Any = None) -> InferResult:
        self.note()
        check(prompt)
        return result(f"{prompt}!")


class OnlyStream(Bare):
    def stream(
        self, prompt: Any, context: Any = None, *, params: Any = None
    ) -> Iterator[InferChunk]:
        self.note()
        check(prompt)
        self.begun.set()
        try:
            for _ in range(10**6 if prompt == "endless" else 1):
                yield InferChunk(prompt)
                time.sleep(0.001)
            yield InferChunk("!")
            if prompt != "cut":
                yield InferChunk("", result(f"{prompt}!"))
        finally:
            self.ended.set()


class OnlyAinfer(Bare):
    async def ainfer(self, prompt: Any, context: Any = None, *, params: Any = None) -> InferResult:
        self.note()
        check(prompt)
        self.begun.set()
        try:
            await asyncio.sleep(60 if prompt == "endless" else 0)
        finally:
            self.ended.set()
        return result(f"{prompt}!")


class OnlyAstream(Bare):
    async def astream(
        self, prompt: Any, context: Any = None, *, params: Any = None
    ) -> AsyncIterator[InferChunk]:
        self.note()
        check(prompt)
        self.begun.set()
        try:
            for _ in range(10**6 if prompt == "endless" else 1):
                yield InferChunk(prompt)
                await asyncio.sleep(0.001)
            yield InferChunk("!")
            if prompt != "cut":
                yield InferChunk("", result(f"{prompt}!"))
        finally:
            self.ended.set()


def check(prompt: Any) -> None:
    if prompt == "wrong":
        raise InvalidRequestError("wrong")


ALL = [OnlyInfer, OnlyStream, OnlyAinfer, OnlyAstream]
STREAMING = [OnlyStream, OnlyAstream]


def call(backend: InferenceBackend, face: str, prompt: str) -> tuple[str, str]:
    """The joined deltas and the result's text, through that face."""
    if face == "infer":
        text = backend.infer(prompt).text
        return text, text
    if face == "ainfer":
        text = asyncio.run(_ainfer(backend, prompt)).text
        return text, text
    chunks = (
        list(backend.stream(prompt)) if face == "stream" else asyncio.run(_all(backend, prompt))
    )
    assert chunks[-1].result is not None
    return "".join(chunk.delta for chunk in chunks), chunks[-1].result.text


async def _ainfer(backend: InferenceBackend, prompt: str) -> InferResult:
    return await backend.ainfer(prompt)


async def _all(backend: InferenceBackend, prompt: str) -> list[InferChunk]:
    return [chunk async for chunk in backend.astream(prompt)]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("cls", ALL)
def test_one_written_face_gives_the_other_three(cls: type[Bare], face: str) -> None:
    assert call(cls(), face, "hi") == ("hi!", "hi!")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("cls", ALL)
def test_error_is_the_same_through_every_face(cls: type[Bare], face: str) -> None:
    with pytest.raises(InvalidRequestError, match="wrong"):
        call(cls(), face, "wrong")


@pytest.mark.parametrize("face", ["infer", "ainfer"])
@pytest.mark.parametrize("cls", STREAMING)
def test_stream_that_is_cut_is_no_answer(cls: type[Bare], face: str) -> None:
    with pytest.raises(StreamInterruptedError, match="without a result"):
        call(cls(), face, "cut")


@pytest.mark.parametrize("cls", ALL)
def test_generate_is_the_text_of_infer(cls: type[Bare]) -> None:
    assert cls().generate("hi") == "hi!"


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("cls", [OnlyAinfer, OnlyAstream])
def test_asynchronous_face_runs_on_cores_loop_whoever_calls(cls: type[Bare], face: str) -> None:
    backend = cls()
    call(backend, face, "hi")
    bridge.in_thread(lambda: call(backend, face, "hi")).result(10)
    assert backend.threads == {"iaop-core-loop"}


def test_asynchronous_face_of_a_mixin_runs_on_cores_loop_too() -> None:
    class Mixin:
        async def ainfer(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
            return result(threading.current_thread().name)

    class Mixed(Mixin, Bare): ...

    class Below(Mixed): ...

    for cls in (Mixed, Below):
        assert call(cls(), "ainfer", "hi")[0] == "iaop-core-loop"


def test_face_may_call_the_one_above_it() -> None:
    class Polite(OnlyAinfer):
        async def ainfer(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
            answer = await super().ainfer(prompt, context, params=params)
            return result(f"please: {answer.text}")

    for face in FACES:
        assert call(Polite(), face, "hi")[1] == "please: hi!"


def test_asynchronous_iterator_without_aclose_is_taken() -> None:
    class Chunks:
        def __init__(self) -> None:
            self._left = [InferChunk("hi!"), InferChunk("", result("hi!"))]

        def __aiter__(self) -> Chunks:
            return self

        async def __anext__(self) -> InferChunk:
            if not self._left:
                raise StopAsyncIteration
            return self._left.pop(0)

    class Plain(Bare):
        def astream(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
            return Chunks()

    for face in FACES:
        assert call(Plain(), face, "hi") == ("hi!", "hi!")


def test_class_without_any_face_can_not_be_made() -> None:
    with pytest.raises(TypeError, match="must write one of infer, stream, ainfer, astream"):
        Bare()


def test_blocking_face_on_cores_loop_is_refused_instead_of_hanging() -> None:
    class Inner(OnlyAinfer):
        async def ainfer(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
            return self.infer(prompt)

    with pytest.raises(RuntimeError, match="would wait for itself"):
        Inner().infer("hi")


@pytest.mark.parametrize("cls", STREAMING)
def test_closing_a_stream_early_ends_the_work(cls: type[Bare]) -> None:
    backend = cls()
    stream: Any = backend.stream("endless")
    assert next(stream).delta == "endless"
    stream.close()
    stream.close()
    assert backend.ended.wait(5)


@pytest.mark.parametrize("cls", STREAMING)
def test_closing_an_asynchronous_stream_early_ends_the_work(cls: type[Bare]) -> None:
    backend = cls()

    async def leave() -> None:
        stream: Any = backend.astream("endless")
        async with aclosing(stream):
            assert (await anext(stream)).delta == "endless"
        await stream.aclose()
        assert await asyncio.to_thread(backend.ended.wait, 5)

    asyncio.run(leave())


@pytest.mark.parametrize("face", ["ainfer", "astream"])
@pytest.mark.parametrize("cls", [OnlyStream, OnlyAinfer, OnlyAstream])
def test_cancelling_the_task_ends_the_work(cls: type[Bare], face: str) -> None:
    backend = cls()

    async def leave() -> None:
        work = _ainfer(backend, "endless") if face == "ainfer" else _all(backend, "endless")
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        assert await asyncio.to_thread(backend.begun.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(backend.ended.wait, 5)

    asyncio.run(leave())


@pytest.mark.parametrize("cls", [OnlyStream, OnlyAstream, OnlyInfer, OnlyAinfer])
def test_streams_may_be_open_together(cls: type[Bare]) -> None:
    backend = cls()
    streams = [iter(backend.stream(f"p{number}")) for number in range(4)]
    texts = [""] * 4
    for _ in range(3):
        for number, stream in enumerate(streams):
            chunk = next(stream, None)
            texts[number] += chunk.delta if chunk else ""
    assert texts == [f"p{number}!" for number in range(4)]


def test_calls_from_many_threads_and_loops_do_not_mix() -> None:
    backends = [cls() for cls in ALL]

    def many(seed: int) -> list[str]:
        async def together() -> list[str]:
            answers = await asyncio.gather(
                *(b.ainfer(f"{seed}-{n}") for n, b in enumerate(backends * 3))
            )
            return [answer.text for answer in answers]

        return asyncio.run(together()) + [b.infer(f"{seed}-x").text for b in backends]

    work = [bridge.in_thread(lambda seed=seed: many(seed)) for seed in range(8)]
    for seed, future in enumerate(work):
        assert future.result(30) == [*(f"{seed}-{n}!" for n in range(12)), *[f"{seed}-x!"] * 4]


def test_context_manager_closes_and_the_inherited_close_unloads() -> None:
    class Noting(OnlyInfer):
        unloads = 0

        def unload(self) -> None:
            self.unloads += 1

    with Noting() as backend:
        assert backend.infer("hi").text == "hi!"
    assert backend.unloads == 1


def test_abandoned_generators_leave_no_work_behind() -> None:
    backend = OnlyStream()
    stream = backend.stream("endless")
    next(iter(stream))
    before = threading.active_count()
    del stream
    assert backend.ended.wait(5)
    assert eventually(lambda: threading.active_count() <= before)
