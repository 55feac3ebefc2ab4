"""Rules of one whole answer."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any, get_args

import pytest

from iaop_core.backend import InferenceBackend
from iaop_core.contract.subject import ContractRules, ContractSubject
from iaop_core.errors import IaopError, InvalidRequestError
from iaop_core.messages import FinishReason, InferResult, Prompt, TokenLogprob

__all__ = ["InferContract"]

_MARK = "zebra-4711"
_ENOUGH = 120
"""Tokens for the short JSON that the rules ask for."""
_STATES = ["running", "waiting"]
_SCHEMA = {
    "type": "object",
    "properties": {"state": {"enum": _STATES}, "urgent": {"type": "boolean"}},
    "required": ["state", "urgent"],
    "additionalProperties": False,
}
_MALFORMED_PROMPTS: list[Any] = [
    None,
    42,
    [],
    [None],
    [42],
    [{}],
    [{"role": "user"}],
    [{"role": "judge", "content": "a"}],
]
_MALFORMED_PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": True},
    {"max_tokens": "many"},
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"max_token": 5},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"response_format": "json"},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"grammar": ""},
]
_JSON_PROMPT = "How is the press on line 3? Answer in JSON, with the keys state and urgent."


class InferContract(ContractRules):
    def test_result_is_complete(self, subject: ContractSubject, loaded: InferenceBackend) -> None:
        result = loaded.infer(subject.prompt, params=subject.params_for(loaded))
        assert isinstance(result, InferResult)
        assert str(result) == result.text
        assert result.prompt_tokens >= 1
        assert result.completion_tokens >= 1
        assert result.latency_ms >= 0
        assert result.latency_ms == round(result.latency_ms, 3)
        assert result.finish_reason in get_args(FinishReason)
        first_ms = result.time_to_first_token_ms
        assert first_ms is None or 0 <= first_ms <= result.latency_ms
        assert result.offline == (subject.offline_tag is not None)

    def test_generate_gives_the_text(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        assert isinstance(loaded.generate(subject.prompt, ["a source"]), str)

    def test_chat_messages_are_taken(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        chat: Prompt = [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": subject.prompt},
        ]
        assert loaded.infer(chat, params=subject.params_for(loaded)).completion_tokens >= 1

    def test_context_changes_the_prompt(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        params = subject.params_for(loaded)
        bare = loaded.infer(subject.prompt, params=params)
        told = loaded.infer(subject.prompt, ["a source", "another source"], params=params)
        assert (bare.text, bare.prompt_tokens) != (told.text, told.prompt_tokens)

    def test_malformed_prompt_is_the_callers_error(self, loaded: InferenceBackend) -> None:
        assert [prompt for prompt in _MALFORMED_PROMPTS if not _refuses(loaded, prompt)] == []

    def test_malformed_parameter_is_the_callers_error(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        taken = [p for p in _MALFORMED_PARAMS if not _refuses(loaded, subject.prompt, p)]
        assert taken == []

    def test_token_limit_holds(self, subject: ContractSubject, loaded: InferenceBackend) -> None:
        params = {**subject.params_for(loaded), "max_tokens": 2}
        result = loaded.infer(subject.prompt, params=params)
        if not result.usage_estimated:
            assert result.completion_tokens <= 2
        assert result.finish_reason in ("length", "stop")

    def test_huge_token_limit_is_no_huge_work(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        stream = loaded.stream(
            subject.prompt, params={**subject.params_for(loaded), "max_tokens": 2**40}
        )
        assert next(stream) is not None
        _close(stream)

    def test_prompt_and_answer_are_in_no_repr(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        result = loaded.infer(f"{_MARK} {subject.prompt}", params=subject.params_for(loaded))
        assert _MARK not in repr(result)
        assert _MARK not in repr(loaded)

    def test_prompt_is_in_no_error(self, loaded: InferenceBackend) -> None:
        with pytest.raises(IaopError) as caught:
            loaded.infer([{"role": _MARK, "content": _MARK}])
        assert _MARK not in str(caught.value)

    def test_no_logprobs_unless_asked_for(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        result = loaded.infer(subject.prompt, params=subject.params_for(loaded))
        assert result.logprobs is None

    def test_logprobs_are_those_of_the_answer(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        subject.require_param("logprobs", loaded)
        params = {**subject.params_for(loaded), "logprobs": True}
        result = loaded.infer(subject.prompt, params=params)
        assert result.logprobs, "logprobs that were asked for are told"
        assert all(isinstance(entry, TokenLogprob) for entry in result.logprobs)
        assert not any(entry.top for entry in result.logprobs), "no alternatives were asked for"
        if not result.usage_estimated:
            assert len(result.logprobs) <= result.completion_tokens
        pieces = [entry.bytes for entry in result.logprobs if entry.bytes is not None]
        if len(pieces) == len(result.logprobs):
            told, text = b"".join(pieces), result.text.encode()
            # Some vocabularies begin each text with a space that belongs to no text.
            assert told.startswith(text) or told.removeprefix(b" ").startswith(text)

    def test_top_logprobs_are_the_likeliest_tokens(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        subject.require_param("top_logprobs", loaded)
        params = {**subject.params_for(loaded), "logprobs": True, "top_logprobs": 3}
        result = loaded.infer(subject.prompt, params=params)
        assert result.logprobs
        for entry in result.logprobs:
            likeliest = [other.logprob for other in entry.top]
            assert len(likeliest) == 3
            assert likeliest == sorted(likeliest, reverse=True)
            assert entry.logprob <= likeliest[0] + 0.001
            assert sum(map(math.exp, likeliest)) < 1.001, "they are parts of one probability"

    def test_logprobs_are_the_models_before_the_temperature(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        subject.require_param("top_logprobs", loaded)
        subject.require_param("temperature", loaded)
        told = []
        for temperature in (0.0, 1.5):
            asked = {"max_tokens": 1, "logprobs": True, "top_logprobs": 3}
            params = {**subject.params_for(loaded), **asked, "temperature": temperature}
            result = loaded.infer(subject.prompt, params=params)
            assert result.logprobs
            told.append([other.logprob for other in result.logprobs[0].top])
        assert told[0] == pytest.approx(told[1], abs=0.05)

    def test_json_object_is_one(self, subject: ContractSubject, loaded: InferenceBackend) -> None:
        subject.require_param("response_format", loaded)
        result = _ask_in_form(subject, loaded, response_format={"type": "json_object"})
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), dict)
        else:
            assert result.text.lstrip().startswith("{")

    def test_answer_keeps_to_its_schema(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        subject.require_param("response_format", loaded)
        schema = {"name": "press", "schema": _SCHEMA, "strict": True}
        wanted = {"type": "json_schema", "json_schema": schema}
        result = _ask_in_form(subject, loaded, response_format=wanted)
        assert result.finish_reason == "stop"
        answer = json.loads(result.text)
        assert answer.keys() == {"state", "urgent"}
        assert answer["state"] in _STATES
        assert isinstance(answer["urgent"], bool)

    def test_answer_keeps_to_its_grammar(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        subject.require_param("grammar", loaded)
        result = _ask_in_form(subject, loaded, grammar='start: "state: " ("good" | "bad")')
        assert result.text in ("state: good", "state: bad")
        assert result.finish_reason == "stop"

    @pytest.mark.parametrize(
        "form",
        [
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "nothing"}},
                }
            },
            {"grammar": "start: ("},
        ],
        ids=lambda form: next(iter(form)),
    )
    def test_form_that_can_not_be_kept_is_the_callers_error(
        self, subject: ContractSubject, loaded: InferenceBackend, form: dict[str, Any]
    ) -> None:
        subject.require_param(next(iter(form)), loaded)
        with pytest.raises(InvalidRequestError):
            _ask_in_form(subject, loaded, **form)

    def test_answers_come_on_any_event_loop(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        async def ask() -> str:
            return (await loaded.ainfer(subject.prompt, params=subject.params_for(loaded))).text

        assert len({asyncio.run(ask()) for _ in range(3)}) == 1

    def test_parallel_calls_do_not_mix(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        count = min(4, loaded.capabilities.max_concurrency)
        params = subject.params_for(loaded)
        prompts = [f"{subject.prompt} ({number})" for number in range(count)]
        alone = [loaded.infer(prompt, params=params).text for prompt in prompts]
        together: dict[int, str] = {}

        def ask(number: int) -> None:
            together[number] = loaded.infer(prompts[number], params=params).text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [together.get(number) for number in range(count)] == alone


def _ask_in_form(subject: ContractSubject, loaded: InferenceBackend, **form: Any) -> InferResult:
    params = {**subject.params_for(loaded), "max_tokens": _ENOUGH, **form}
    return loaded.infer(_JSON_PROMPT, params=params)


def _close(stream: Any) -> None:
    stream.close()


def _refuses(backend: InferenceBackend, prompt: Any, params: Any = None) -> bool:
    try:
        backend.infer(prompt, params=params)
    except InvalidRequestError:
        return True
    return False
