"""What goes wrong on a server or on the way to it ends promptly, with an error of its kind."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from early_server import early_grpc_server, early_http_server
from scripted import ended, outcome_within, record, script
from tcp_proxy import TcpProxy
from triton_server import TritonServer

from iaop_core import InferChunk
from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    ServiceError,
    StreamInterruptedError,
)
from iaop_gpu_triton import GpuTritonBackend

Make = Callable[..., GpuTritonBackend]


@pytest.fixture(params=["grpc", "http"])
def proxied(
    request: pytest.FixtureRequest, triton: TritonServer
) -> Iterator[tuple[TcpProxy, GpuTritonBackend]]:
    """A backend that reaches the server through a proxy."""
    port = triton.grpc_port if request.param == "grpc" else triton.http_port
    with TcpProxy(port) as proxy:
        url = f"{request.param}://{proxy.address}"
        with closing(GpuTritonBackend(url, "echo", timeout_ms=1000)) as backend:
            backend.load_model()
            yield proxy, backend


def read_until_error(stream: Iterator[InferChunk]) -> tuple[list[str], ServiceError, float]:
    """The deltas before the error, the error, and the seconds from the last delta to it."""
    deltas, since = [], time.monotonic()
    try:
        for chunk in stream:
            assert chunk.result is None, "a stream that fails has no result"
            deltas.append(chunk.delta)
            since = time.monotonic()
    except ServiceError as error:
        return deltas, error, time.monotonic() - since
    pytest.fail("the stream ended without an error")


# -- the model's own errors --------------------------------------------------------------------


@pytest.mark.parametrize("end_after_error", [True, False], ids=["final-flag", "no-final-flag"])
def test_model_error_in_a_stream_reaches_the_caller_at_once(
    echo: GpuTritonBackend, end_after_error: bool
) -> None:
    prompt = script(tokens=["a", "b", "c"], fail_after=2, end_after_error=end_after_error)
    deltas, error, seconds = read_until_error(iter(echo.stream(prompt)))
    assert deltas == ["a", "b"]
    assert isinstance(error, BackendUnavailableError)
    assert "scripted failure" in str(error)
    assert error.may_have_run
    assert seconds < 1
    assert echo.infer("still here").text == "still here"


@pytest.mark.parametrize("fail_after", [0, 1])
def test_model_error_fails_a_plain_answer(echo: GpuTritonBackend, fail_after: int) -> None:
    with pytest.raises(BackendUnavailableError, match="scripted failure") as caught:
        echo.infer(script(tokens=["a", "b"], fail_after=fail_after))
    assert "N/A" not in str(caught.value)


@pytest.mark.parametrize("model", ["echo", "echo-plain"])
def test_model_error_does_not_repeat_the_prompt(make: Make, model: str) -> None:
    backend = make(model)
    backend.load_model()
    secret = "the recipe of the house"
    fails = script(fail_after=0, error_text=["bad:", secret, "too", "long"])
    chat = [
        {"role": "user", "content": secret},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": fails},
    ]
    with pytest.raises(BackendUnavailableError, match=r"says: bad.*too long") as caught:
        backend.infer(chat)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("model", ["echo", "echo-plain"])
@pytest.mark.parametrize("words", ["stage 2 is not ready", "unexpected shape of the cache"])
def test_models_error_that_reads_like_tritons_is_no_reason_to_ask_again(
    make: Make, url: str, model: str, words: str
) -> None:
    backend = make(model)
    backend.load_model()
    tag = f"{url} {model} {words[:7]}"
    with pytest.raises(BackendUnavailableError, match=words) as caught:
        backend.infer(script(tag=tag, tokens=["a"], fail_after=0, error_text=words.split()))
    assert caught.value.may_have_run
    assert record(backend, tag)["runs"] == 1


def test_answer_without_any_response_is_an_interruption(echo: GpuTritonBackend) -> None:
    with pytest.raises(StreamInterruptedError, match="without the end"):
        list(echo.stream(script(tokens=[])))


def test_response_without_its_text_is_a_protocol_error(echo: GpuTritonBackend) -> None:
    with pytest.raises(BackendProtocolError, match="text_output"):
        list(echo.stream(script(tokens=["a", "b"], omit_output=True)))
    assert echo.infer("still here").text == "still here"


def test_answer_that_is_not_utf8_is_a_protocol_error(make: Make) -> None:
    # The split model sends bytes as they are: pieces in the wrong order are no text.
    backend = make("echo")
    backend.load_model()
    with pytest.raises(BackendProtocolError, match="UTF-8"):
        backend.infer(script(tokens=["ab"], raw_hex="61ff62"))


# -- time --------------------------------------------------------------------------------------


def test_plain_answer_must_be_whole_within_the_time_limit(make: Make) -> None:
    backend = make("echo", timeout_ms=500)
    backend.load_model()
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError, match="500 ms") as caught:
        backend.infer(script(tokens=["a"], first_delay_s=10))
    assert 0.4 < time.monotonic() - started < 1.5
    assert caught.value.timeout_ms == 500


def test_stream_may_last_longer_than_the_time_limit(make: Make) -> None:
    backend = make("echo", timeout_ms=500)
    backend.load_model()
    chunks = list(backend.stream(script(tokens=list("abcdef"), delay_s=0.2)))
    assert ended(chunks).text == "abcdef"
    assert ended(chunks).latency_ms > 900


def test_stream_that_falls_silent_is_a_timeout(make: Make) -> None:
    backend = make("echo", timeout_ms=500)
    backend.load_model()
    prompt = script(tokens=["a", "b"], delay_s=10)
    deltas, error, seconds = read_until_error(iter(backend.stream(prompt)))
    assert deltas == ["a"]
    assert isinstance(error, BackendTimeoutError)
    assert 0.4 < seconds < 1.5


def test_stream_without_its_final_flag_is_an_error_and_no_hang(make: Make) -> None:
    backend = make("echo", timeout_ms=500)
    backend.load_model()
    prompt = script(tokens=["a", "b"], end="never")
    deltas, error, seconds = read_until_error(iter(backend.stream(prompt)))
    assert deltas == ["a", "b"]
    assert isinstance(error, BackendTimeoutError)
    assert seconds < 1.5


# -- the network and the server ----------------------------------------------------------------


def test_connection_cut_in_a_stream_is_an_interruption(
    proxied: tuple[TcpProxy, GpuTritonBackend],
) -> None:
    proxy, backend = proxied
    stream = iter(backend.stream(script(tokens=["a", "b", "c"], delay_s=0.3)))
    assert next(stream).delta == "a"
    proxy.cut()
    _, error, seconds = read_until_error(stream)
    assert isinstance(error, StreamInterruptedError)
    assert seconds < 1
    assert backend.infer("again").text == "again"


def test_black_hole_in_a_stream_is_a_timeout_and_the_next_call_works(
    proxied: tuple[TcpProxy, GpuTritonBackend],
) -> None:
    proxy, backend = proxied
    stream = iter(backend.stream(script(tokens=["a", "b", "c"], delay_s=0.3)))
    assert next(stream).delta == "a"
    proxy.mode = "silent"
    _, error, seconds = read_until_error(stream)
    assert isinstance(error, BackendTimeoutError)
    assert seconds < 2
    proxy.mode = "forward"
    assert backend.infer("again").text == "again"


def test_black_hole_before_a_connection_is_unavailable(
    proxied: tuple[TcpProxy, GpuTritonBackend],
) -> None:
    proxy, backend = proxied
    proxy.cut()
    proxy.mode = "silent"
    with pytest.raises(ServiceError) as caught:
        backend.infer("a")
    assert isinstance(caught.value, BackendUnavailableError | BackendTimeoutError)
    proxy.mode = "forward"
    assert backend.infer("again").text == "again"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_next_call_works_after_the_server_was_killed_and_is_back(protocol: str) -> None:
    with TritonServer("echo") as server:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        with GpuTritonBackend(url, "echo", timeout_ms=3000) as backend:
            backend.load_model()
            stream = iter(backend.stream(script(tokens=["a", "b"], delay_s=10)))
            assert next(stream).delta == "a"
            server.kill()
            _, error, seconds = read_until_error(stream)
            assert isinstance(error, StreamInterruptedError)
            assert seconds < 1
            with pytest.raises(BackendUnavailableError, match="can't be reached") as caught:
                backend.infer("a")
            assert not caught.value.may_have_run
            health = backend.health_check()
            assert not health.healthy
            assert health.detail.startswith("probe_error: ")
            server.start()
            assert backend.infer("again").text == "again"
            assert backend.health_check().healthy


@pytest.mark.parametrize("face", ["infer", "stream"])
def test_grpc_stream_closed_in_order_without_its_end_is_an_interruption(face: str) -> None:
    with early_grpc_server(["a", "b"], tells_final=True) as url:
        with closing(GpuTritonBackend(url, "early")) as backend:
            backend.load_model()
            with pytest.raises(StreamInterruptedError, match="without the end"):
                list(getattr(backend, face)("x"))


def test_grpc_server_that_never_tells_the_last_response_ends_by_closing() -> None:
    with early_grpc_server(["a", "b"], tells_final=False) as url:
        with closing(GpuTritonBackend(url, "early")) as backend:
            backend.load_model()
            assert ended(list(backend.stream("x"))).text == "ab"
    with early_grpc_server([], tells_final=False) as url:
        with closing(GpuTritonBackend(url, "early")) as backend:
            backend.load_model()
            with pytest.raises(StreamInterruptedError):
                backend.infer("x")


TOKEN = b'data: {"text_output":"a","finish_reason":"None"}\n\n'
LAST = b'data: {"text_output":"b","finish_reason":"stop"}'


@pytest.mark.parametrize(
    "body", [b"", TOKEN, TOKEN + LAST, TOKEN + LAST.replace(b"stop", b"abort") + b"\n\n"]
)
def test_http_stream_that_ends_without_its_end_is_an_interruption(body: bytes) -> None:
    with early_http_server(body) as url, closing(GpuTritonBackend(url, "early")) as backend:
        backend.load_model()
        with pytest.raises(StreamInterruptedError):
            list(backend.stream("x"))


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_http_stream_is_split_at_line_ends_and_nowhere_else(line_end: bytes) -> None:
    text = "a\u2028b\u0085c\x0bd"
    event = b"data: " + json.dumps({"text_output": text}, ensure_ascii=False).encode()
    body = (b": comment\n" + event + b"\n\n" + LAST + b"\n\n").replace(b"\n", line_end)
    with early_http_server(body) as url, closing(GpuTritonBackend(url, "early")) as backend:
        backend.load_model()
        assert ended(list(backend.stream("x"))).text == text + "b"


@pytest.mark.parametrize("body", [b"data: no JSON\n\n", b"data: 42\n\n"])
def test_http_stream_of_another_protocol_is_told(body: bytes) -> None:
    with early_http_server(body) as url, closing(GpuTritonBackend(url, "early")) as backend:
        backend.load_model()
        with pytest.raises(BackendProtocolError):
            backend.infer("x")


# -- callers that leave, and many at once --------------------------------------------------------


def test_stream_closed_early_is_cancelled_on_the_server(echo: GpuTritonBackend) -> None:
    stream = echo.stream(script(tag="closed", tokens=list("abc"), delay_s=9))
    assert next(iter(stream)).delta == "a"
    started = time.monotonic()
    stream.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 0.5
    assert outcome_within(echo, "closed", 1) == "cancelled"


@pytest.mark.parametrize("face", ["ainfer", "astream"])
def test_call_left_before_its_first_token_is_cancelled_on_the_server(
    echo: GpuTritonBackend, url: str, face: str
) -> None:
    # Over HTTP Triton looks after its client only when it has something to send.
    first_delay_s, within_s = (1.5, 2.5) if url.startswith("http") else (9, 1)
    prompt = script(tag=face, tokens=list("abc"), first_delay_s=first_delay_s, delay_s=9)

    async def ask() -> None:
        if face == "ainfer":
            await echo.ainfer(prompt)
        async for _ in echo.astream(prompt):
            pass

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(), 0.3)

    asyncio.run(leave())
    assert outcome_within(echo, face, within_s) == "cancelled"


def test_concurrent_streams_overlap_and_do_not_mix(echo: GpuTritonBackend) -> None:
    count = 8
    first_at: dict[int, float] = {}
    texts: dict[int, tuple[str, str, float]] = {}

    def read(number: int) -> None:
        tokens = [f"{number}-{i} " for i in range(10)]
        chunks = []
        for chunk in echo.stream(script(tokens=tokens, delay_s=0.02 * (1 + number % 3))):
            first_at.setdefault(number, time.monotonic())
            chunks.append(chunk)
        texts[number] = (ended(chunks).text, "".join(tokens), time.monotonic())

    threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(texts) == count
    assert all(got == sent for got, sent, _ in texts.values())
    assert max(first_at.values()) < min(end for _, _, end in texts.values())


def test_streams_left_in_the_moment_of_their_end_do_no_harm_to_the_server(
    echo: GpuTritonBackend,
) -> None:
    # A cancellation that meets the end of its request is fatal to many releases of Triton.
    for _ in range(500):
        stream = echo.stream("an answer that is there at once")
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
    assert echo.infer("alive").text == "alive"


def test_process_ends_while_a_stream_is_open(url: str) -> None:
    code = (
        "from iaop_gpu_triton import GpuTritonBackend\n"
        f"backend = GpuTritonBackend({url!r}, 'echo'); backend.load_model()\n"
        f"stream = iter(backend.stream({script(tokens=['a', 'b'], delay_s=60)!r}))\n"
        "print(next(stream).delta, flush=True)\n"
    )
    for ending in ("", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code + ending], capture_output=True, text=True, timeout=20
        )
        assert done.stdout == "a\n", done.stderr
        assert time.monotonic() - started < 5


def test_unload_ends_streams_under_way_with_an_error(make: Make) -> None:
    backend = make("echo")
    backend.load_model()
    stream = iter(backend.stream(script(tokens=["a", "b"], delay_s=1.5)))
    assert next(stream).delta == "a"
    backend.unload()
    _, error, seconds = read_until_error(stream)
    assert isinstance(error, StreamInterruptedError)
    assert seconds < 1
