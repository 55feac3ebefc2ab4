"""Loading, threads, event loops, forks and the end: nothing hangs and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any
from weakref import ref

import pytest
from scripted_model import PROMPT, write_scripted_model
from tiny_llama import write_tiny_gguf

from iaop_core import GenerationParams, InferResult, Message
from iaop_core.errors import BackendUnavailableError, ModelNotLoadedError
from iaop_onnx_local import OnnxLocalBackend
from iaop_onnx_local.importer.folder import import_gguf
from iaop_onnx_local.streams import Call, stream_answer

Make = Callable[..., OnnxLocalBackend]
Threads = Callable[[], list[threading.Thread]]

LONG = [b"a"] * 900


def wait_for(is_so: Callable[[], bool], told: str) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, told
        time.sleep(0.002)


def wait_until_idle(backend: OnnxLocalBackend) -> None:
    wait_for(
        lambda: "running=0, waiting=0" in backend.health_check().detail, "a slot was not given back"
    )


def run_python(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, which has to end by itself."""
    unset = {"CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join([str(Path(__file__).parent), inherited.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=inherited | {"PYTHONPATH": path} | environment,
    )


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Callable[..., OnnxLocalBackend]]:
    """Makes backends with a tiny model of `GroupQueryAttention`."""
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "llama", dtype="fp32")
    made: list[OnnxLocalBackend] = []

    def make(**settings: Any) -> OnnxLocalBackend:
        made.append(OnnxLocalBackend(device="cpu", **settings))
        made[-1].load_model(str(tmp_path / "llama"))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def engine_threads() -> Threads:
    """Tells the engines' threads that have begun since."""
    before = threading.enumerate()
    return lambda: [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("iaop-onnx") and thread not in before
    ]


# -- unloading and replacing --------------------------------------------------------------------


def test_unloading_ends_answers_of_a_replaced_model_too(
    engine_threads: Threads, scripted: Make, tmp_path: Path
) -> None:
    backend = scripted(LONG)
    stream = backend.stream(PROMPT, params={"max_tokens": 900})
    next(stream)
    backend.load_model(str(write_scripted_model(tmp_path / "next", [b"b"])))
    assert backend.infer(PROMPT).text == "b"
    backend.unload()
    assert engine_threads() == []
    with pytest.raises(BackendUnavailableError, match="was unloaded"):
        list(stream)


def test_unloading_ends_all_that_run_and_all_that_wait(scripted: Make) -> None:
    backend = scripted(LONG, {"max_concurrency": 2})
    ends: list[str] = []

    def ask() -> None:
        try:
            backend.infer(PROMPT, params={"max_tokens": 900})
        except (BackendUnavailableError, ModelNotLoadedError) as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: "running=2" in backend.health_check().detail, "no answer has begun")
    backend.unload()
    for thread in threads:
        thread.join(10)
    assert len(ends) == 6
    with pytest.raises(ModelNotLoadedError):
        backend.infer(PROMPT)
    backend.close()
    backend.close()


def test_backend_closed_while_it_loads_holds_no_model(
    engine_threads: Threads, tmp_path: Path
) -> None:
    folder = write_scripted_model(tmp_path / "model", [b"a"])
    for _ in range(5):
        backend = OnnxLocalBackend(device="cpu")
        thread = threading.Thread(target=backend.load_model, args=(str(folder),))
        thread.start()
        backend.close()
        thread.join()
        backend.close()
        assert engine_threads() == []
        assert not backend.health_check().healthy


def test_models_replaced_under_load_lose_no_answer(
    engine_threads: Threads, scripted: Make, tmp_path: Path
) -> None:
    backend = scripted([b"a"] * 30, {"max_waiting": 100})
    folders = [tmp_path / "scripted-0"]
    folders.append(write_scripted_model(tmp_path / "next", [b"b"] * 30))
    stop, texts, failed = threading.Event(), set[str](), list[Exception]()

    def ask() -> None:
        while not stop.is_set():
            try:
                texts.add(backend.infer(PROMPT).text)
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(1, 9):
        backend.load_model(str(folders[turn % 2]))
        wait_for(lambda turn=turn: "ab"[turn % 2] * 30 in texts, "the new model is not asked")
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert texts == {"a" * 30, "b" * 30}
    wait_for(lambda: len(engine_threads()) == 1, "a replaced model's engine goes on")


def test_engine_that_broke_is_told_by_health_and_loaded_anew(
    scripted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = scripted([b"a"] * 5)
    model = backend._model
    assert model is not None

    def burst(_self: object) -> None:
        raise MemoryError("nothing is left")

    monkeypatch.setattr(type(model._engine), "_make_tokens", burst)
    with pytest.raises(BackendUnavailableError):
        backend.infer(PROMPT)
    monkeypatch.undo()
    wait_for(lambda: not backend.health_check().healthy, "health doesn't tell")
    assert "load the model anew" in backend.health_check().detail
    with pytest.raises(BackendUnavailableError, match="load the model anew"):
        backend.infer(PROMPT)
    backend.load_model(model.model_id)
    assert backend.health_check().healthy
    assert backend.infer(PROMPT).text == "a" * 5


# -- dropping -----------------------------------------------------------------------------------


def test_dropped_backend_leaves_no_thread_and_no_model(
    engine_threads: Threads, llama: Make, tmp_path: Path
) -> None:
    backend = OnnxLocalBackend(device="cpu")
    backend.load_model(str(tmp_path / "llama"))
    stream = backend.stream(PROMPT, params={"max_tokens": 400})
    next(stream)
    model = ref(backend._model)
    session = ref(backend._model.decoder.session)  # type: ignore[union-attr]
    del backend
    gc.collect()
    next(stream)  # who reads an answer keeps what makes it
    del stream
    gc.collect()
    wait_for(lambda: engine_threads() == [], "the engine's thread goes on")
    gc.collect()
    assert model() is None
    assert session() is None


def test_answer_that_has_ended_keeps_no_unloaded_model(llama: Make) -> None:
    backend = llama()
    stream = backend.stream(PROMPT, params={"max_tokens": 3})
    assert list(stream)
    session = ref(backend._model.decoder.session)  # type: ignore[union-attr]
    backend.unload()
    gc.collect()
    assert session() is None


def test_dropped_stream_gives_its_row_back(scripted: Make) -> None:
    backend = scripted(LONG, {"max_concurrency": 1, "max_waiting": 1})
    for _ in range(20):
        stream = backend.stream(PROMPT, params={"max_tokens": 900})
        next(stream)
        del stream
    wait_until_idle(backend)


# -- event loops and threads --------------------------------------------------------------------


def test_loops_and_threads_may_use_one_backend_at_once(scripted: Make) -> None:
    backend = scripted([b"a", b"b", b"c"] * 5, {"max_concurrency": 3, "max_waiting": 200})
    results: list[InferResult] = []

    async def ask_many() -> None:
        async def read() -> InferResult:
            chunks = [chunk async for chunk in backend.astream(PROMPT)]
            result = chunks[-1].result
            assert result is not None
            assert "".join(chunk.delta for chunk in chunks) == result.text
            return result

        asked = [backend.ainfer(PROMPT), read(), backend.ainfer(PROMPT)]
        results.extend(await asyncio.gather(*asked))

    def use(number: int) -> None:
        for _ in range(3):
            if number % 2:
                asyncio.run(ask_many())
            else:
                results.append(backend.infer(PROMPT))
                results.append(list(backend.stream(PROMPT))[-1].result)  # type: ignore[arg-type]

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 * 3 * 3 + 3 * 3 * 2
    assert {result.text for result in results} == {"abc" * 5}
    wait_until_idle(backend)


def test_answer_whose_loop_was_closed_frees_its_row(scripted: Make) -> None:
    backend = scripted([b"a"], {"max_concurrency": 1}, ends=False, context_length=300_000)
    model = backend._model
    assert model is not None
    call = Call(
        lambda: model,
        [Message("user", PROMPT)],
        GenerationParams(max_tokens=290_000),
        backend_name=backend.name,
    )
    loop = asyncio.new_event_loop()
    chunks = stream_answer(call)
    first = loop.run_until_complete(anext(chunks))
    assert first.delta == "a"
    loop.close()  # without closing what runs on it
    wait_until_idle(backend)
    assert backend.infer(PROMPT, params={"max_tokens": 2}).text == "aa"


@pytest.mark.parametrize("way", ["before its first token", "amid its answer", "while it waits"])
def test_cancelled_task_gives_its_place_back(scripted: Make, way: str) -> None:
    backend = scripted(LONG, {"max_concurrency": 2, "max_waiting": 4})

    async def leave() -> None:
        others: list[Any] = []
        if way == "while it waits":
            others = [backend.astream(PROMPT, params={"max_tokens": 900}) for _ in range(2)]
            for other in others:
                await anext(other)
        task = asyncio.create_task(backend.ainfer(PROMPT, params={"max_tokens": 900}))
        if way != "before its first token":
            wanted = "waiting=1" if others else "running=1"
            while wanted not in backend.health_check().detail:
                await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for other in others:
            await other.aclose()

    for _ in range(50):
        asyncio.run(leave())
    wait_until_idle(backend)
    assert backend.infer(PROMPT, params={"max_tokens": 3}).text == "aaa"


def test_reader_that_stops_reading_holds_up_nobody(scripted: Make) -> None:
    backend = scripted([b"a"] * 200, {"max_concurrency": 2})
    idle_reader = backend.stream(PROMPT)
    next(idle_reader)
    for _ in range(5):
        assert backend.infer(PROMPT).text == "a" * 200
    wait_until_idle(backend)
    assert "".join(chunk.delta for chunk in idle_reader) == "a" * 199


# -- processes ----------------------------------------------------------------------------------

LOAD = """
    import os, sys, threading
    from pathlib import Path
    from scripted_model import PROMPT, write_scripted_model
    from iaop_onnx_local import OnnxLocalBackend

    folder = write_scripted_model(Path(sys.argv[1]) / "model", [b"a"] * 900)
    backend = OnnxLocalBackend(device="cpu", threads=2)
    backend.load_model(str(folder))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_refuses_until_it_loads_the_model_itself(tmp_path: Path) -> None:
    text = (
        LOAD
        + """
    stream = backend.stream(PROMPT, params={"max_tokens": 900})
    next(stream)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(sum(len(chunk.delta) for chunk in stream), os.waitstatus_to_exitcode(status))
        sys.exit()
    from iaop_core.errors import BackendUnavailableError
    assert "load the model anew" in backend.health_check().detail
    try:
        backend.infer(PROMPT)
    except BackendUnavailableError as error:
        assert "before this process was forked" in str(error)
    else:
        raise AssertionError("it answers")
    backend.load_model(str(folder))
    stream.close()
    assert backend.health_check().healthy
    print(len(backend.infer(PROMPT, params={"max_tokens": 7}).text), flush=True)
    sys.exit(3)
    """
    )
    done = run_python(text, str(tmp_path))
    assert done.stdout.split() == ["7", "899", "3"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("reader", ["a thread", "nobody", "an event loop"])
def test_process_ends_well_with_answers_under_way(tmp_path: Path, reader: str) -> None:
    text = (
        LOAD
        + """
    import asyncio
    from contextlib import suppress
    from iaop_core.errors import BackendUnavailableError
    def read():
        with suppress(BackendUnavailableError):
            list(backend.stream(PROMPT * 50, params={"max_tokens": 900}))
    async def read_some():
        chunks = [backend.astream(PROMPT, params={"max_tokens": 900}) for _ in range(4)]
        for each in chunks:
            await anext(each)
        kept.extend(chunks)
    kept = []
    if sys.argv[2] == "a thread":
        for _ in range(12):
            threading.Thread(target=read, daemon=True).start()
    elif sys.argv[2] == "nobody":
        kept = [backend.stream(PROMPT, params={"max_tokens": 900}) for _ in range(4)]
        for each in kept:
            next(each)
    else:
        asyncio.run(read_some())
    print("end")
    """
    )
    done = run_python(text, str(tmp_path), reader)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


def test_runtime_tells_nobody_what_it_runs(tmp_path: Path) -> None:
    text = (
        LOAD
        + """
    print(backend.infer(PROMPT).text[:1])
    """
    )
    home = tmp_path / "home"
    home.mkdir()
    done = run_python(text, str(tmp_path), HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"))
    assert done.stdout == "a\n", done.stderr
    assert list(home.rglob("*")) == []  # its id of this machine among them
