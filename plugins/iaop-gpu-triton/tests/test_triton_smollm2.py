"""A real, small language model through a real Triton: the text is the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from scripted import ended
from triton_server import TritonServer

from iaop_core.errors import ContextLengthExceededError
from iaop_gpu_triton import GpuTritonBackend

QUESTION = "What is the capital of France? Answer in one sentence."
GREEDY = {"temperature": 0}


@pytest.fixture(params=["grpc", "http"])
def backend(request: pytest.FixtureRequest, smollm2: TritonServer) -> Iterator[GpuTritonBackend]:
    url = smollm2.grpc_url if request.param == "grpc" else smollm2.http_url
    with closing(GpuTritonBackend(url, "smollm2")) as made:
        made.load_model()
        yield made


def test_real_model_answers_plainly(backend: GpuTritonBackend) -> None:
    result = backend.infer(QUESTION, params=GREEDY)
    assert result.text == "The capital of France is Paris."
    # The prompt in the model's template has 42 tokens; the answer's eighth is its end.
    assert (result.prompt_tokens, result.completion_tokens) == (42, 8)
    assert result.finish_reason == "stop"
    assert not result.usage_estimated
    assert not result.offline


def test_real_model_streams_the_same_text(backend: GpuTritonBackend) -> None:
    chunks = list(backend.stream(QUESTION, params=GREEDY))
    result = ended(chunks)
    assert result.text == "The capital of France is Paris."
    assert result.completion_tokens == 8
    assert len(chunks) > 4
    assert result.time_to_first_token_ms is not None
    assert result.time_to_first_token_ms < result.latency_ms


def test_real_model_ends_at_the_token_limit(backend: GpuTritonBackend) -> None:
    result = backend.infer(QUESTION, params={**GREEDY, "max_tokens": 3})
    assert (result.text, result.finish_reason) == ("The capital of", "length")
    assert result.completion_tokens == 3


@pytest.mark.parametrize("stop", [" France", "capital of Fr", ["Paris", " is"]], ids=str)
def test_real_model_ends_before_a_stop_text(backend: GpuTritonBackend, stop: str) -> None:
    params = {**GREEDY, "stop": stop}
    plain = backend.infer(QUESTION, params=params)
    streamed = ended(list(backend.stream(QUESTION, params=params)))
    assert plain.text == streamed.text
    assert "The capital of France is Paris.".startswith(plain.text)
    assert plain.finish_reason == "stop"
    assert not any(text in plain.text for text in ([stop] if isinstance(stop, str) else stop))


def test_real_model_repeats_itself_with_the_same_seed(backend: GpuTritonBackend) -> None:
    params = {"temperature": 1.5, "seed": 7, "max_tokens": 20}
    first, second = (backend.infer("Tell me a story.", params=params).text for _ in range(2))
    other = backend.infer("Tell me a story.", params={**params, "seed": 8}).text
    assert first == second != other


def test_context_is_read_by_the_real_model(backend: GpuTritonBackend) -> None:
    bare = backend.infer("What is the code word?", params=GREEDY)
    told = backend.infer("What is the code word?", ["The code word is tangerine."], params=GREEDY)
    assert "tangerine" not in bare.text
    assert "tangerine" in told.text
    assert told.prompt_tokens > bare.prompt_tokens


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(
    backend: GpuTritonBackend,
) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        backend.infer("word " * 9000)
    assert caught.value.context_tokens == 8192
    assert caught.value.prompt_tokens is not None
    assert caught.value.prompt_tokens > 9000
