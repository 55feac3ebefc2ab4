"""Against a real server with a real model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from llama_server import LlamaServer

from iaop_cloud_api import CloudApiBackend
from iaop_core import InferResult, Secret
from iaop_core.errors import (
    BackendUnavailableError,
    ContextLengthExceededError,
    CredentialsRefusedError,
    StreamInterruptedError,
)

GREEDY = {"temperature": 0.0, "seed": 1}


@pytest.fixture
def real(llama: LlamaServer) -> Iterator[CloudApiBackend]:
    backend = CloudApiBackend(base_url=llama.base_url, model=llama.model)
    backend.load_model()
    yield backend
    backend.close()


def test_real_answer_is_counted_by_the_server(real: CloudApiBackend) -> None:
    result = real.infer(
        "What is the capital of France? Answer in one sentence.",
        params={**GREEDY, "max_tokens": 24},
    )
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"
    assert result.prompt_tokens > 10
    assert 7 <= result.completion_tokens <= 8
    assert not result.usage_estimated


def test_real_stream_comes_token_by_token(real: CloudApiBackend) -> None:
    *deltas, end = real.stream("Count from one to twenty.", params={**GREEDY, "max_tokens": 32})
    assert end.result is not None
    assert len(deltas) > 16
    assert end.result.completion_tokens == 32
    assert end.result.finish_reason == "length"
    assert not end.result.usage_estimated
    assert end.result.time_to_first_token_ms is not None
    assert end.result.time_to_first_token_ms < end.result.latency_ms


def test_real_streams_one_right_after_the_other_are_all_answered(real: CloudApiBackend) -> None:
    for number in range(40):
        chunks = list(real.stream("Hi", params={"max_tokens": 1 + number % 8}))
        assert chunks[-1].result is not None


def test_real_stop_text_ends_the_answer(real: CloudApiBackend) -> None:
    prompt = "Count from one to twenty, with a comma between the numbers."
    whole = real.infer(prompt, params={**GREEDY, "max_tokens": 32})
    stop = whole.text[6:9]
    cut = real.infer(prompt, params={**GREEDY, "max_tokens": 32, "stop": [stop]})
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_real_logprobs_are_those_of_the_tokens(real: CloudApiBackend) -> None:
    params = {**GREEDY, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    result = real.infer("What is the capital of France?", params=params)
    assert result.logprobs is not None
    assert "".join(entry.token for entry in result.logprobs) == result.text
    assert all(entry.top[0].token == entry.token for entry in result.logprobs)
    assert all(isinstance(entry.token_id, int) for entry in result.logprobs)
    without = real.infer("What is the capital of France?", params={**params, "top_logprobs": 0})
    assert without.logprobs is not None
    assert [entry.top for entry in without.logprobs] == [()] * 8


def test_real_overflow_tells_both_numbers(real: CloudApiBackend) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        real.infer("x " * 9000)
    assert caught.value.prompt_tokens is not None
    assert caught.value.prompt_tokens > 9000
    assert caught.value.context_tokens is not None
    assert str(caught.value.context_tokens) in str(caught.value)


def test_real_server_stops_work_when_a_stream_is_left(
    real: CloudApiBackend, llama: LlamaServer
) -> None:
    # All four of its slots are taken by endless answers; when they are left, a fifth gets through.
    streams = [real.stream(f"Tell me story {n}.", params={"max_tokens": 1500}) for n in range(4)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    started = time.monotonic()
    real.infer("Hi", params={"max_tokens": 1})
    assert time.monotonic() - started < 8  # the four would take longer


def test_real_key_is_checked() -> None:
    with LlamaServer(api_key="sk-right") as server:

        def ask(key: str) -> InferResult:
            backend = CloudApiBackend(
                base_url=server.base_url, model=server.model, api_key=Secret(key, literal=True)
            )
            with backend:
                backend.load_model()
                return backend.infer("Hi", params={"max_tokens": 1})

        assert ask("sk-right").completion_tokens == 1
        with pytest.raises(CredentialsRefusedError) as caught:
            ask("sk-wrong")
        assert "sk-wrong" not in str(caught.value)


def test_real_server_killed_within_a_stream_is_an_error() -> None:
    with LlamaServer() as server:
        backend = CloudApiBackend(base_url=server.base_url, model=server.model)
        with backend:
            backend.load_model()
            stream = backend.stream("Tell me a story.", params={"max_tokens": 1500})
            next(stream)
            killing = threading.Timer(0.2, server.kill)
            killing.start()
            with pytest.raises(StreamInterruptedError):
                list(stream)
            killing.join()
            with pytest.raises(BackendUnavailableError) as caught:
                backend.infer("Hi")
            assert not caught.value.may_have_run
            assert not backend.health_check()
