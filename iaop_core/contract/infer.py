"""Rules of one whole answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, get_args

import pytest

from iaop_core.backend import InferenceBackend
from iaop_core.contract.subject import ContractRules, ContractSubject
from iaop_core.errors import IaopError, InvalidRequestError
from iaop_core.messages import FinishReason, InferResult, Prompt

__all__ = ["InferContract"]

_MARK = "zebra-4711"


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

    @pytest.mark.parametrize(
        "prompt",
        [None, 42, [], [None], [42], [{}], [{"role": "user"}], [{"role": "judge", "content": "a"}]],
        ids=str,
    )
    def test_malformed_prompt_is_the_callers_error(
        self, loaded: InferenceBackend, prompt: Any
    ) -> None:
        with pytest.raises(InvalidRequestError):
            loaded.infer(prompt)

    @pytest.mark.parametrize(
        "params",
        [
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"max_tokens": True},
            {"max_tokens": "many"},
            {"temperature": "hot"},
            {"temperature": float("nan")},
            {"max_token": 5},
        ],
        ids=str,
    )
    def test_malformed_parameter_is_the_callers_error(
        self, subject: ContractSubject, loaded: InferenceBackend, params: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequestError):
            loaded.infer(subject.prompt, params=params)

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


def _close(stream: Any) -> None:
    stream.close()
