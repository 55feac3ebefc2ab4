"""Rules of a streamed answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from iaop_core.backend import InferenceBackend
from iaop_core.contract.subject import ContractRules, ContractSubject
from iaop_core.messages import InferChunk

__all__ = ["StreamContract"]


class StreamContract(ContractRules):
    def test_stream_has_one_end_and_it_is_last(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        _check(list(loaded.stream(subject.prompt, params=subject.params_for(loaded))))

    def test_asynchronous_stream_keeps_the_same_rules(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        async def collect() -> list[InferChunk]:
            params = subject.params_for(loaded)
            return [chunk async for chunk in loaded.astream(subject.prompt, params=params)]

        _check(asyncio.run(collect()))

    def test_streamed_text_is_the_text_of_infer(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        params = subject.params_for(loaded)
        whole = loaded.infer(subject.prompt, params=params)
        end = list(loaded.stream(subject.prompt, params=params))[-1].result
        assert end is not None
        assert end.text == whole.text
        assert end.finish_reason == whole.finish_reason

    def test_streamed_logprobs_join_to_those_of_the_result(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        subject.require_param("logprobs", loaded)
        params = {**subject.params_for(loaded), "logprobs": True}
        *deltas, end = loaded.stream(subject.prompt, params=params)
        _check([*deltas, end])
        assert end.result is not None
        assert end.result.logprobs
        if loaded.capabilities.streaming:
            assert any(chunk.logprobs for chunk in deltas), "they come with the text"

    def test_no_delta_holds_half_a_character(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        prompt = "请用中文和表情符号回答 👩‍👩‍👧：你好吗？"
        for max_tokens in range(1, 9):
            params = {**subject.params_for(loaded), "max_tokens": max_tokens}
            chunks = list(loaded.stream(prompt, params=params))
            _check(chunks)
            assert all("\ufffd" not in chunk.delta for chunk in chunks)

    def test_closing_early_frees_the_backend(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        params = {**subject.params_for(loaded), "max_tokens": 200}
        for _ in range(loaded.capabilities.max_concurrency + 1):
            stream: Any = loaded.stream(subject.prompt, params=params)
            next(stream)
            started = time.monotonic()
            stream.close()
            stream.close()
            assert time.monotonic() - started < 1, "closing waits for the engine"
        assert loaded.infer(subject.prompt, params=subject.params_for(loaded)).model_id

    def test_closing_early_asynchronously_frees_the_backend(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        async def leave() -> None:
            params = {**subject.params_for(loaded), "max_tokens": 200}
            stream: Any = loaded.astream(subject.prompt, params=params)
            await anext(stream)
            await asyncio.wait_for(stream.aclose(), 1)

        asyncio.run(leave())
        assert loaded.infer(subject.prompt, params=subject.params_for(loaded)).model_id

    def test_streams_may_be_open_together(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        params = subject.params_for(loaded)
        count = min(3, loaded.capabilities.max_concurrency)
        expected = loaded.infer(subject.prompt, params=params).text
        streams: list[Iterator[InferChunk]] = [
            iter(loaded.stream(subject.prompt, params=params)) for _ in range(count)
        ]
        texts = [""] * count
        open_streams = set(range(count))
        while open_streams:
            for number in sorted(open_streams):
                chunk = next(streams[number], None)
                if chunk is None:
                    open_streams.discard(number)
                else:
                    texts[number] += chunk.delta
        assert texts == [expected] * count


def _check(chunks: list[InferChunk]) -> None:
    assert chunks, "a stream has an end"
    assert all(isinstance(chunk, InferChunk) for chunk in chunks)
    *deltas, end = chunks
    assert end.result is not None, "the last chunk carries the result"
    assert end.delta == "", "the last chunk brings no text"
    assert all(chunk.result is None for chunk in deltas), "only the last chunk is the end"
    assert all(chunk.delta for chunk in deltas), "no delta is empty"
    assert "".join(chunk.delta for chunk in deltas) == end.result.text
    logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs)
    assert logprobs == (end.result.logprobs or ()), "the logprobs joined are the result's"
