"""Prompts, messages and parameters: what is malformed is the caller's error, and shown nowhere."""

from __future__ import annotations

import math
import traceback
from typing import Any

import pytest
from attrs import evolve

from iaop_core import (
    GenerationParams,
    InferChunk,
    InferResult,
    JsonSchema,
    Message,
    ResponseFormat,
    TokenLogprob,
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
    other = TokenLogprob(SECRET_TEXT, SECRET_TEXT.encode(), 4711, -1.5)
    told = (TokenLogprob(SECRET_TEXT, SECRET_TEXT.encode(), 4711, -0.5, (other,)),)
    shown = repr([told, InferChunk("a", logprobs=told), evolve(result, logprobs=told)])
    assert SECRET_TEXT not in shown
    assert "4711" not in shown
    assert str(result) == SECRET_TEXT
    assert result.latency_ms == 1.235


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 1), ("abc", 1), ("abcdefgh", 2), ("你好你好你好你好你", 2)]
)
def test_token_estimate_is_a_quarter_of_the_characters(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


HUGE = 10**400
SCHEMA = {"name": "press-3", "schema": {"type": "object"}}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {**SCHEMA, **fields}}


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
        {"logprobs": 1},
        {"logprobs": "yes"},
        {"top_logprobs": 2},
        {"response_format": "json_object"},
        {"response_format": {}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": ["json_object"]}},
        {"response_format": {"type": "json_object", "schema": {}}},
        {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": "a"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"response_format": json_schema(name="a b")},
        {"response_format": json_schema(name="a" * 65)},
        {"response_format": json_schema(name=5)},
        {"response_format": json_schema(strict="yes")},
        {"response_format": json_schema(description=5)},
        {"response_format": json_schema(more=1)},
        {"response_format": json_schema(schema=True)},
        {"response_format": json_schema(schema={"const": float("nan")})},
        {"response_format": json_schema(schema={"const": {1, 2}})},
        {"response_format": json_schema(schema={"const": "\ud83d"})},
        {"grammar": 5},
        {"grammar": " "},
        {"grammar": 'start: "\ud83d"'},
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


@pytest.mark.parametrize("top_logprobs", [-1, 21, True, 2.0])
def test_alternatives_are_twenty_at_most(top_logprobs: Any) -> None:
    with pytest.raises(InvalidRequestError, match="top_logprobs is a whole number"):
        GenerationParams(logprobs=True, top_logprobs=top_logprobs)
    assert GenerationParams(logprobs=True, top_logprobs=20).top_logprobs == 20


def test_alternatives_are_those_of_tokens_asked_for() -> None:
    with pytest.raises(InvalidRequestError, match="needs logprobs"):
        GenerationParams(logprobs=False, top_logprobs=0)


@pytest.mark.parametrize(
    "params",
    [{"logprobs": False}, {"response_format": {"type": "text"}}, {"grammar": None}],
    ids=repr,
)
def test_asking_for_what_there_is_anyway_is_not_asking(params: dict[str, Any]) -> None:
    given = GenerationParams.from_input(params)
    assert not given.given
    given.require_supported(frozenset({"max_tokens"}), backend="b")


def test_response_format_is_read_as_the_api_has_it() -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    asked = json_schema(schema=schema, strict=True)
    read = GenerationParams.from_input({"response_format": asked}).response_format
    assert read == ResponseFormat(
        type="json_schema", json_schema=JsonSchema(name="press-3", schema=schema, strict=True)
    )
    assert read.as_mapping == asked
    schema["type"] = "array"
    assert read.json_schema is not None
    assert read.json_schema.schema["type"] == "object", "it is a copy"
    assert GenerationParams(response_format=read).response_format is read


def test_schema_and_grammar_are_in_no_repr() -> None:
    asked = json_schema(schema={"const": SECRET_TEXT}, description=SECRET_TEXT)
    assert SECRET_TEXT not in repr(GenerationParams.from_input({"response_format": asked}))
    assert SECRET_TEXT not in repr(GenerationParams(grammar=f'start: "{SECRET_TEXT}"'))
    for wrong in ({"const": {SECRET_TEXT}}, {"const": "\ud83d" + SECRET_TEXT}):
        with pytest.raises(InvalidRequestError) as caught:
            GenerationParams.from_input({"response_format": json_schema(schema=wrong)})
        assert SECRET_TEXT not in "".join(traceback.format_exception(caught.value))


def test_schema_of_endless_depth_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(InvalidRequestError):
        GenerationParams.from_input({"response_format": json_schema(schema=schema)})


def test_answer_has_one_form() -> None:
    with pytest.raises(InvalidRequestError, match="give one"):
        GenerationParams.from_input(
            {"response_format": {"type": "json_object"}, "grammar": 'start: "a"'}
        )


@pytest.mark.parametrize(
    ("logprob", "told"),
    [(-0.5, -0.5), (-math.inf, -9999.0), (-12345.6, -9999.0), (0.0, 0.0), (1e-7, 0.0)],
)
def test_log_probability_is_a_number_of_json(logprob: float, told: float) -> None:
    assert TokenLogprob("a", b"a", 1, logprob).logprob == told


def test_log_probability_that_is_no_number_can_not_be_told() -> None:
    with pytest.raises(ValueError, match="is a number"):
        TokenLogprob("a", b"a", 1, math.nan)


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
