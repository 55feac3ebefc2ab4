"""Answers of a model with the vLLM contract, through a real Triton, over gRPC and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from scripted import ended, record, script

from iaop_core.errors import CapabilityNotSupportedError
from iaop_gpu_triton import GpuTritonBackend

Make = Callable[..., GpuTritonBackend]
CHINESE = "你好，世界 👩‍👩‍👧 e\u0301\u2028\u0085 end"


def sampling(backend: GpuTritonBackend, tag: str) -> dict[str, Any]:
    """The sampling parameters that the request with that tag sent."""
    (text,) = record(backend, tag)["sent_values"]["sampling_parameters"]
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("model", ["echo", "echo-plain", "echo-minimal"])
def test_plain_answer_is_whole_and_without_the_prompt(make: Make, model: str) -> None:
    backend = make(model)
    backend.load_model()
    result = backend.infer(script(tokens=["one ", "two ", "three"]))
    assert result.text == "one two three"
    assert result.finish_reason == "stop"
    assert not result.offline


@pytest.mark.parametrize("model", ["echo", "echo-minimal"])
def test_stream_brings_a_delta_for_each_response(make: Make, model: str) -> None:
    backend = make(model)
    backend.load_model()
    chunks = list(backend.stream(script(tokens=["one ", "two ", "three"])))
    assert [chunk.delta for chunk in chunks] == ["one ", "two ", "three", ""]
    assert ended(chunks).finish_reason == "stop"


def test_stream_of_a_model_that_does_not_stream_is_one_delta_and_the_end(make: Make) -> None:
    backend = make("echo-plain")
    backend.load_model()
    chunks = list(backend.stream(script(tokens=["one ", "two"])))
    assert [chunk.delta for chunk in chunks] == ["one two", ""]
    assert ended(chunks).finish_reason == "stop"


@pytest.mark.parametrize("end", ["flag_on_last", "empty_final"])
@pytest.mark.parametrize("tokens", [[], ["only"], ["a", "b"], ["a", "", "b"]], ids=len)
def test_stream_ends_once_whatever_form_its_end_has(
    echo: GpuTritonBackend, end: str, tokens: list[str]
) -> None:
    chunks = list(echo.stream(script(tokens=[*tokens, "."], end=end)))
    assert ended(chunks).text == "".join(tokens) + "."
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.delta for chunk in chunks[:-1])


def test_tokens_and_finish_reason_are_the_servers(echo: GpuTritonBackend) -> None:
    whole = echo.infer("one two three four")
    cut = ended(list(echo.stream("one two three four", params={"max_tokens": 3})))
    assert (whole.prompt_tokens, whole.completion_tokens) == (4, 4)
    assert (cut.prompt_tokens, cut.completion_tokens) == (4, 3)
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert not whole.usage_estimated
    assert not cut.usage_estimated


def test_tokens_are_marked_as_estimates_when_the_server_counts_none(make: Make) -> None:
    backend = make("echo-minimal")
    backend.load_model()
    whole = backend.infer("one two three four")
    cut = backend.infer("one two three four", params={"max_tokens": 3})
    assert whole.usage_estimated
    assert whole.completion_tokens == len(whole.text) // 4
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")


def test_only_listed_tensors_are_sent(make: Make) -> None:
    backend = make("echo-minimal")
    backend.load_model()
    backend.infer(script(tag="minimal", tokens=["a"]))
    sent = sorted(record(backend, "minimal")["sent_values"])
    assert sent == ["sampling_parameters", "stream", "text_input"]


def test_sampling_parameters_are_json_of_their_types(echo: GpuTritonBackend) -> None:
    params = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "stop": ["a", "停"],
        "seed": 2**53,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    echo.infer(script(tag="all-params", tokens=["x"]), params=params)
    sent = sampling(echo, "all-params")
    assert sent == params
    assert type(sent["temperature"]) is int


def test_single_stop_text_is_sent_as_a_list(echo: GpuTritonBackend) -> None:
    echo.infer(script(tag="one-stop", tokens=["x"]), params={"stop": "a"})
    assert sampling(echo, "one-stop")["stop"] == ["a"]


def test_unset_parameters_are_not_sent_but_a_finite_token_limit_is(make: Make) -> None:
    backend = make("echo", max_tokens=77)
    backend.load_model()
    backend.infer(script(tag="no-params", tokens=["x"]))
    assert sampling(backend, "no-params") == {"max_tokens": 77}


def test_parameter_that_the_contract_cannot_carry_is_refused_by_name(
    echo: GpuTritonBackend,
) -> None:
    with pytest.raises(CapabilityNotSupportedError, match="logit_bias"):
        echo.infer("a", params={"logit_bias": {1: 1.0}})


@pytest.mark.parametrize("split_bytes", [1, 2, 3, 5])
def test_characters_split_over_responses_stay_whole(
    echo: GpuTritonBackend, split_bytes: int
) -> None:
    prompt = script(tokens=[CHINESE], split_bytes=split_bytes)
    chunks = list(echo.stream(prompt))
    assert ended(chunks).text == CHINESE
    assert all("\ufffd" not in chunk.delta for chunk in chunks)


def test_text_of_any_kind_passes_both_ways(echo: GpuTritonBackend) -> None:
    text = CHINESE + '\x00\x01\t\r\n"quoted" \\ data: x\n\ndata: {}\n\n'
    assert echo.infer(script(tokens=[text])).text == text
    assert ended(list(echo.stream(script(tokens=[text])))).text == text


def test_six_megabytes_pass_both_ways(make: Make) -> None:
    backend = make("echo", timeout_ms=30_000)
    backend.load_model()
    size = 6_000_000
    assert len(backend.infer(script(tokens=["x"], repeat=size)).text) == size
    assert backend.infer("y" * size).text == "y" * size
    assert ended(list(backend.stream("z" * size))).text == "z" * size


def test_single_user_turn_is_sent_unchanged(echo: GpuTritonBackend) -> None:
    assert echo.infer("  as it is\n").text == "  as it is\n"
    assert echo.infer([{"role": "user", "content": "as it is"}]).text == "as it is"


def test_chat_is_laid_out_as_role_and_content_paragraphs(echo: GpuTritonBackend) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    assert echo.infer(chat).text == (
        "system: Be brief.\n\nuser: Hello\n\nassistant: Hi.\n\nuser: Bye\n\nassistant:"
    )


def test_context_is_laid_before_the_question(echo: GpuTritonBackend) -> None:
    result = echo.infer("What is it?", ["甲 source", "another"])
    assert result.text == "Sources:\n[1] 甲 source\n[2] another\n\nWhat is it?"


def test_pinned_version_answers(make: Make) -> None:
    backend = make("echo", model_version="1")
    backend.load_model()
    assert backend.infer("pinned").text == "pinned"


def test_time_to_first_token_is_of_the_first_response(echo: GpuTritonBackend) -> None:
    result = ended(list(echo.stream(script(tokens=["a", "b"], first_delay_s=0.1, delay_s=0.3))))
    assert result.time_to_first_token_ms is not None
    assert 100 <= result.time_to_first_token_ms < 300
    assert result.latency_ms >= 400
