"""Prompts, messages and parameters: what is malformed is the caller's error, and shown nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from iaop_core import (
    GenerationParams,
    InferChunk,
    InferResult,
    Message,
    as_messages,
    estimate_tokens,
    with_context,
)
from iaop_core.errors import CapabilityNotSupportedError, InvalidRequestError

SECRET_TEXT = "zebra-4711"


def _name(value: object) -> str:
    return repr(value).partition(" at 0x")[0]


def test_string_prompt_is_one_user_turn() -> None:
    assert as_messages("hi") == (Message("user", "hi"),)


def test_developer_role_is_read_as_system() -> None:
    assert as_messages([{"role": "developer", "content": "be brief"}])[0].role == "system"


def test_text_parts_are_joined_without_anything_between() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_messages([{"role": "user", "content": parts}])[0].content == "ab"


def test_null_fields_of_a_message_are_taken_as_absent() -> None:
    message = {"role": "user", "content": "a", "tool_calls": None, "name": "line-3"}
    assert as_messages([message])[0].content == "a"


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        42,
        b"bytes",
        [],
        {},
        {"role": "user", "content": "a"},
        [None],
        ["text"],
        [[]],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 42}],
        [{"role": "user", "content": [42]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 7}]}],
        [{"role": "user", "content": [{"text": "a"}]}],
        [{"role": "judge", "content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": "a", "tool_calls": [1]}],
        [{"role": "user", "content": "a", 5: "b"}],
        "half a pair \ud83d",
        [{"role": "user", "content": "half a pair \ud83d"}],
        (message for message in [{"role": "user", "content": "a"}]),
    ],
    ids=_name,
)
def test_malformed_prompt_is_the_callers_error(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_messages(prompt)
    assert caught.value.param == "messages"


def test_image_part_is_refused_as_a_capability() -> None:
    image = {"type": "image_url", "image_url": {"url": SECRET_TEXT}}
    with pytest.raises(CapabilityNotSupportedError) as caught:
        as_messages([{"role": "user", "content": [image]}])
    assert caught.value.capability == "image_url"
    assert SECRET_TEXT not in str(caught.value)


def test_context_is_laid_before_the_last_user_turn() -> None:
    chat = [Message("user", "one"), Message("assistant", "two"), Message("user", "three")]
    laid = with_context(chat, ["x", "y"])
    assert [message.content for message in laid] == [
        "one",
        "two",
        "Sources:\n[1] x\n[2] y\n\nthree",
    ]


@pytest.mark.parametrize("context", [None, [], ()])
def test_empty_context_changes_nothing(context: Any) -> None:
    assert with_context(as_messages("hi"), context) == as_messages("hi")


@pytest.mark.parametrize(
    "context",
    ["text", b"bytes", 7, {"a": 1}, [1], [None], (text for text in ["a"]), ["\ud83d"]],
    ids=_name,
)
def test_context_that_is_no_list_of_texts_is_refused(context: Any) -> None:
    with pytest.raises(InvalidRequestError):
        with_context(as_messages("hi"), context)


def test_context_without_a_user_turn_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="user message"):
        with_context([Message("system", "a")], ["x"])


def test_texts_are_in_no_repr() -> None:
    result = InferResult(
        text=SECRET_TEXT,
        backend_name="b",
        model_id="m",
        prompt_tokens=1,
        completion_tokens=1,
        latency_ms=1.23456,
    )
    assert SECRET_TEXT not in repr([Message("user", SECRET_TEXT), InferChunk(SECRET_TEXT, result)])
    assert str(result) == SECRET_TEXT
    assert result.latency_ms == 1.235


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 1), ("abc", 1), ("abcdefgh", 2), ("你好你好你好你好你", 2)]
)
def test_token_estimate_is_a_quarter_of_the_characters(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


HUGE = 10**400


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"max_tokens": 1.0},
        {"max_tokens": "5"},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 2.01},
        {"temperature": HUGE},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 1.5},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0},
        {"stop": 5},
        {"stop": [""]},
        {"stop": ["a", None]},
        {"stop": b"a"},
        {"stop": "\ud83d"},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: None}},
        {"logit_bias": {1: HUGE}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": 5},
    ],
    ids=lambda params: repr(params)[:40],
)
def test_parameter_out_of_range_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerationParams.from_input(params)
    (name,) = params
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("params", [5, "max_tokens", [("max_tokens", 1)]])
def test_params_of_another_type_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequestError):
        GenerationParams.from_input(params)


def test_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'max_tokens'"):
        GenerationParams.from_input({"max_token": 5})


def test_null_parameters_are_taken_as_absent() -> None:
    params = GenerationParams.from_input({"max_tokens": None, "stop": None, "logit_bias": None})
    assert not params.given


def test_one_stop_text_is_a_list_of_one() -> None:
    assert GenerationParams.from_input({"stop": "END"}).stop == ("END",)


def test_bias_keys_of_json_are_token_ids() -> None:
    assert GenerationParams.from_input({"logit_bias": {"5": -1}}).logit_bias == {5: -1}


def test_parameter_that_is_not_supported_is_refused_by_name() -> None:
    params = GenerationParams(max_tokens=5, seed=0)
    params.require_supported(frozenset({"max_tokens", "seed"}), backend="b")
    with pytest.raises(CapabilityNotSupportedError, match="'b' can't honour the parameter 'seed'"):
        params.require_supported(frozenset({"max_tokens"}), backend="b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": None},
        {"completion_tokens": -1},
        {"completion_tokens": 2.5},
        {"text": None},
        {"model_id": None},
        {"finish_reason": "because"},
    ],
    ids=_name,
)
def test_result_with_fields_of_other_types_can_not_be_made(wrong: dict[str, Any]) -> None:
    facts: dict[str, Any] = {
        "text": "a",
        "backend_name": "b",
        "model_id": "m",
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "latency_ms": 1,
    }
    InferResult(**facts)
    with pytest.raises((TypeError, ValueError)):
        InferResult(**{**facts, **wrong})
