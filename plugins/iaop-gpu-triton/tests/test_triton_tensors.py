"""The kinds of language model: each gets its own tensors, and nothing that it doesn't list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import ended, record, script
from tokenizer_folder import write_tokenizer_folder

from iaop_core.errors import (
    CapabilityNotSupportedError,
    InvalidRequestError,
    ModelLoadError,
    ValuesError,
)
from iaop_gpu_triton import GpuTritonBackend
from iaop_gpu_triton.detection import contract_of
from iaop_gpu_triton.tensors import ModelMetadata, TensorSpec

Make = Callable[..., GpuTritonBackend]
ODD = {"prompt": "PROMPT", "answer": "COMPLETION", "max_tokens": "LIMIT"}
WORDS = "one two three four"


def loaded(make: Make, model: str, **settings: Any) -> GpuTritonBackend:
    backend = make(model, **settings)
    backend.load_model()
    return backend


# -- every kind ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["ensemble", "ensemble-old", "real-ensemble", "llm-api", "llm-api-decoupled"]
)
def test_answer_is_whole_and_without_the_prompt(make: Make, model: str) -> None:
    backend = loaded(make, model)
    prompt = script(tokens=["one ", "two ", "三"])
    plain, streamed = backend.infer(prompt), ended(list(backend.stream(prompt)))
    assert plain.text == streamed.text == "one two 三"
    assert plain.finish_reason == streamed.finish_reason == "stop"


@pytest.mark.parametrize("model", ["ensemble", "real-ensemble", "llm-api-decoupled"])
def test_decoupled_model_streams_its_responses(make: Make, model: str) -> None:
    chunks = list(loaded(make, model).stream(script(tokens=["a", "b", "c"])))
    assert [chunk.delta for chunk in chunks] == ["a", "b", "c", ""]


@pytest.mark.parametrize("model", ["ensemble-old", "llm-api"])
def test_model_that_is_not_decoupled_is_never_asked_to_stream(make: Make, model: str) -> None:
    backend = loaded(make, model)
    chunks = list(backend.stream(script(tag=f"stream-{model}", tokens=["a", "b"])))
    assert [chunk.delta for chunk in chunks] == ["ab", ""]
    sent = record(backend, f"stream-{model}")["sent_values"]
    assert sent["stream" if model == "ensemble-old" else "streaming"] == [False]


@pytest.mark.parametrize("model", ["echo", "ensemble", "llm-api", "odd"])
def test_characters_split_over_responses_stay_whole_on_every_contract(
    make: Make, model: str
) -> None:
    text = "你好👩‍👩‍👧 e\u0301"
    backend = loaded(make, model, tensors=ODD if model == "odd" else {})
    chunks = list(backend.stream(script(tokens=[text], split_bytes=2)))
    assert ended(chunks).text == text


@pytest.mark.parametrize("model", ["ensemble", "llm-api", "llm-api-decoupled"])
def test_token_limit_holds_and_is_told(make: Make, model: str) -> None:
    result = loaded(make, model).infer(WORDS, params={"max_tokens": 3})
    assert result.text == "one two three "
    assert result.finish_reason == "length"


# -- TensorRT-LLM, ensemble or BLS ---------------------------------------------------------------


def test_ensemble_gets_a_tensor_for_each_parameter(make: Make) -> None:
    backend = loaded(make, "ensemble")
    params = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 40,
        "stop": ["a", "停"],
        "seed": 2**63 + 1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
    }
    backend.infer(script(tag="ensemble", tokens=["x"]), params=params)
    told = record(backend, "ensemble")
    sent = told["sent_values"]
    stops = sent.pop("stop_words")
    assert stops == ["a", "停"]
    assert told["shapes"]["stop_words"] == [1, 2]
    assert told["shapes"]["text_input"] == told["shapes"]["temperature"] == [1, 1]
    assert {name: sent[name] for name in params if name != "stop"} == {
        name: [value] for name, value in params.items() if name != "stop"
    }
    for wish in ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"):
        assert sent[wish] == [True]
    assert not {"bad_words", "min_tokens", "beam_width"} & sent.keys()


def test_ensemble_at_temperature_zero_is_greedy_by_top_k_too(make: Make) -> None:
    backend = loaded(make, "ensemble")
    backend.infer(script(tag="greedy", tokens=["x"]), params={"temperature": 0})
    sent = record(backend, "greedy")["sent_values"]
    assert (sent["temperature"], sent["top_k"]) == ([0.0], [1])


def test_ensemble_counts_tokens_and_its_finish_reason_is_derived(make: Make) -> None:
    backend = loaded(make, "ensemble")
    whole, cut = backend.infer(WORDS), backend.infer(WORDS, params={"max_tokens": 4})
    assert (whole.prompt_tokens, whole.completion_tokens) == (4, 4)
    assert not whole.usage_estimated
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")


def test_old_ensemble_gets_the_older_names_and_its_echo_is_taken_off(make: Make) -> None:
    backend = loaded(make, "ensemble-old")
    prompt = script(tag="old", tokens=["x"])
    assert backend.infer(prompt, params={"seed": 7, "stop": "s"}).text == "x"
    sent = record(backend, "old")["sent_values"]
    assert sent.keys() == {
        *("text_input", "max_tokens", "stream", "random_seed", "stop_words"),
    }
    assert backend.infer(prompt).usage_estimated
    with pytest.raises(InvalidRequestError, match=r"stop has 2 values.*takes 1"):
        backend.infer(prompt, params={"stop": ["a", "b"]})


def test_stop_text_that_an_ensemble_leaves_in_its_answer_is_cut(make: Make) -> None:
    backend = loaded(make, "ensemble")
    prompt = script(tokens=["a", "EN", "D", "zz"])
    plain = backend.infer(prompt, params={"stop": "END"})
    streamed = ended(list(backend.stream(prompt, params={"stop": "END"})))
    assert plain.text == streamed.text == "a"
    assert plain.finish_reason == streamed.finish_reason == "stop"
    kept = backend.infer(script(tokens=["a", "EN"]), params={"stop": "END"})
    assert kept.text == "aEN"


@pytest.mark.parametrize("param", ["min_p", "logit_bias"])
def test_parameter_that_the_loaded_model_has_no_tensor_for_is_refused_by_name(
    make: Make, param: str
) -> None:
    backend = loaded(make, "ensemble")
    assert param not in backend.capabilities.params
    value = {1: 1.0} if param == "logit_bias" else 0.1
    with pytest.raises(CapabilityNotSupportedError, match=param):
        backend.infer("a", params={param: value})


def test_capabilities_tell_the_parameters_of_the_loaded_model(make: Make) -> None:
    backend = make("ensemble-old")
    assert "top_p" in backend.capabilities.params
    backend.load_model()
    assert backend.capabilities.params == {"max_tokens", "temperature", "seed", "stop"}


def test_token_limit_beyond_the_tensor_is_as_good_as_none(make: Make) -> None:
    backend = loaded(make, "ensemble")
    backend.infer(script(tag="huge", tokens=["x"]), params={"max_tokens": 2**40})
    assert record(backend, "huge")["sent_values"]["max_tokens"] == [2**31 - 1]


def test_value_that_a_tensor_cannot_hold_is_refused_by_name(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match=r"seed.*UINT64") as caught:
        loaded(make, "ensemble").infer("a", params={"seed": 2**64})
    assert caught.value.param == "seed"


# -- TensorRT-LLM, LLM API -----------------------------------------------------------------------


def test_llm_api_gets_its_prefixed_tensors_and_never_its_cancelling_stop(make: Make) -> None:
    backend = loaded(make, "llm-api-decoupled")
    params = {"temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["a", "b"]}
    backend.infer(script(tag="api", tokens=["x"]), params=params)
    told = record(backend, "api")
    sent = told["sent_values"]
    assert sent["sampling_param_stop"] == ["a", "b"]
    assert told["shapes"]["sampling_param_stop"] == [2]
    assert told["shapes"]["text_input"] == [1]
    assert sent["sampling_param_temperature"] == [0.5]
    assert sent["sampling_param_exclude_input_from_output"] == [True]
    assert not {"stop", "sampling_param_best_of"} & sent.keys()


def test_llm_api_states_the_finish_reason_and_no_counts(make: Make) -> None:
    result = loaded(make, "llm-api").infer(WORDS, params={"max_tokens": 2})
    assert result.finish_reason == "length"
    assert result.usage_estimated


# -- models of their own kind --------------------------------------------------------------------


def test_odd_model_is_used_by_the_tensors_that_the_values_name(make: Make) -> None:
    backend = loaded(make, "odd", tensors=ODD)
    assert backend.infer(WORDS, params={"max_tokens": 2}).text == "one two "
    assert ended(list(backend.stream(WORDS))).text == WORDS
    assert backend.capabilities.params == {"max_tokens"}
    with pytest.raises(CapabilityNotSupportedError, match="temperature"):
        backend.infer("a", params={"temperature": 1})


def test_prompt_before_the_answer_is_kept_where_the_values_say_so(make: Make) -> None:
    backend = loaded(make, "odd", tensors=ODD, strip_prompt=False)
    assert backend.infer("a b", params={"max_tokens": 1}).text == "a ba "


def test_tensors_that_the_model_has_not_are_refused_at_load(make: Make) -> None:
    with pytest.raises(ModelLoadError, match=r"no tensor TEXT.*PROMPT \(BYTES\)"):
        make("odd", tensors={**ODD, "prompt": "TEXT"}).load_model()
    with pytest.raises(ModelLoadError, match="no tensor LIMIT"):
        make("odd", tensors={**ODD, "answer": "LIMIT"}).load_model()


@pytest.mark.parametrize("tensors", [{"prompt": "P"}, {"prompt": "P", "answer": "A", "tone": "T"}])
def test_tensors_of_the_values_need_known_roles(tensors: dict[str, str]) -> None:
    with pytest.raises(ValuesError, match="tensors"):
        GpuTritonBackend(tensors=tensors)


def test_model_that_requires_more_than_a_text_is_refused_at_load() -> None:
    def metadata(*required: str) -> ModelMetadata:
        names = ("text_input", "max_tokens", *required)
        inputs = {
            name: TensorSpec(name, "INT32" if name in ("max_tokens", "images") else "BYTES", (1,))
            for name in names
        }
        outputs = {"text_output": TensorSpec("text_output", "BYTES", (-1,))}
        return ModelMetadata("m", inputs, outputs, False, frozenset(names))

    with pytest.raises(ModelLoadError, match="requires images"):
        contract_of(metadata("images"), {})
    contract = contract_of(metadata("bad_words", "stop_words"), {})
    assert contract.params == {"max_tokens", "stop"}


# -- chat ----------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
]


def test_chat_goes_through_the_template_of_a_tokenizers_folder(make: Make, tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path)
    backend = loaded(make, "echo", chat_template=str(folder))
    assert backend.infer(CHAT).text == "<system>Be brief.</s><user>Hello</s><assistant>"
    assert backend.infer("Hello").text == "<user>Hello</s><assistant>"
    kept = loaded(make, "echo", chat_template=str(folder), send_bos=True)
    assert kept.infer("Hello").text == "<s><user>Hello</s><assistant>"


def test_sources_stand_in_the_user_turn_of_the_template(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[-1].content }}")
    backend = loaded(make, "echo", chat_template=str(file))
    assert backend.infer("What?", ["a source"]).text == "Sources:\n[1] a source\n\nWhat?"


def test_template_that_refuses_the_chat_is_the_callers_error(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% if messages %}{{ raise_exception('no system role') }}{% endif %}")
    with pytest.raises(InvalidRequestError, match="no system role"):
        loaded(make, "echo", chat_template=str(file)).infer(CHAT)


@pytest.mark.parametrize(
    "content", [None, "{% for %}", "root:x:0:0"], ids=["missing", "malformed", "another-file"]
)
def test_template_that_cannot_be_used_is_a_load_error(
    make: Make, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_text(content)
    backend = make("echo", chat_template=str(file))
    with pytest.raises(ModelLoadError, match="the setting chat_template"):
        backend.load_model()
    with pytest.raises(RuntimeError, match="load_model"):
        backend.infer("a")


def test_prompt_and_settings_are_in_no_error(make: Make) -> None:
    secret = "house recipe"
    with pytest.raises(InvalidRequestError) as caught:
        loaded(make, "ensemble").infer(f"{secret} " * 3, params={"seed": 2**70})
    assert secret not in json.dumps(str(caught.value))
