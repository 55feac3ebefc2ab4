"""Calls of every kind share one batch through the backend, and each ends by itself."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_model import PROMPT
from tiny_llama import write_tiny_gguf

from iaop_core import InferResult, LLMGateway, Message
from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    InvalidRequestError,
)
from iaop_onnx_local import OnnxLocalBackend
from iaop_onnx_local.importer.folder import import_gguf

Make = Callable[..., OnnxLocalBackend]

SCHEMA = {
    "type": "object",
    "properties": {"sort": {"enum": ["metal", "wood"]}, "whole": {"type": "boolean"}},
    "required": ["sort", "whole"],
    "additionalProperties": False,
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5},
    "narrowed": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "biased": {"logit_bias": {40: 9.0, 41: 9.0}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "part", "schema": SCHEMA},
        },
        "max_tokens": 60,
    },
    "grammar": {"grammar": 'start: ("ab" | "cd"){5}'},
    "stop": {"stop": ["a", "e", "\n"]},
    "one token": {"max_tokens": 1},
}


def llama_folder(path: Path) -> Path:
    write_tiny_gguf(path / "tiny.gguf", "F32")
    import_gguf(path / "tiny.gguf", path / "llama", dtype="fp32")
    return path / "llama"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxLocalBackend]:
    """A tiny model of `GroupQueryAttention` with random weights, in fp32."""
    folder = llama_folder(tmp_path_factory.mktemp("tiny"))
    with OnnxLocalBackend(device="cpu", max_concurrency=4, max_tokens=40) as backend:
        backend.load_model(str(folder))
        yield backend


def ask_together(asks: list[Callable[[], Any]]) -> list[Any]:
    """The results, or the errors, of calls that are made at the same time."""
    ends: list[Any] = [None] * len(asks)

    def run(number: int) -> None:
        try:
            ends[number] = asks[number]()
        except Exception as error:
            ends[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def facts(result: InferResult) -> tuple[Any, ...]:
    tokens = result.logprobs and [entry.token_id for entry in result.logprobs]
    return result.text, result.finish_reason, result.completion_tokens, tokens


def test_calls_of_every_kind_are_the_same_alone_and_together(llama: OnnxLocalBackend) -> None:
    prompts = [f"{number} What holds the parts? " * (1 + number) for number in range(len(CALLS))]
    asks = [
        lambda prompt=prompt, params=params: llama.infer(prompt, params=params)  # type: ignore[misc]
        for prompt, params in zip(prompts, CALLS.values(), strict=True)
    ]
    alone = [ask() for ask in asks]
    for _ in range(3):
        for one, other in zip(alone, ask_together(asks), strict=True):
            assert facts(other) == facts(one)
    by_name = dict(zip(CALLS, alone, strict=True))
    if by_name["schema"].finish_reason == "stop":
        assert json.loads(by_name["schema"].text)["sort"] in ("metal", "wood")
    assert set(by_name["grammar"].text) <= set("abcd")
    assert len(by_name["grammar"].text) == 10
    assert len(by_name["logprobs"].logprobs or ()) == by_name["logprobs"].completion_tokens
    assert by_name["greedy"].logprobs is None


def test_form_that_can_not_be_held_ends_its_own_answer_alone(llama: OnnxLocalBackend) -> None:
    grammar = 'start: a{1,1000000}\na: b{1,1000000}\nb: "x"'
    complex_one = {"grammar": grammar, "logit_bias": {ord("x"): 90}, "max_tokens": 400}
    alone = llama.infer("Go on.", params={"max_tokens": 100})
    broken, *others = ask_together(
        [lambda: llama.infer("x", params=complex_one)]
        + [lambda: llama.infer("Go on.", params={"max_tokens": 100})] * 3
    )
    assert isinstance(broken, InvalidRequestError), broken
    assert [facts(other) for other in others] == [facts(alone)] * 3


def test_numbers_that_are_none_end_their_own_answer_alone(scripted: Make) -> None:
    # The script goes by the text's length: only the longer prompt comes to where it is broken.
    logits = np.zeros((80, 3), np.float32)
    logits[:, 2] = 10
    logits[60] = np.nan
    backend = scripted([b"a"], logits=logits)
    params = {"max_tokens": 30}
    short, long, other = ask_together(
        [
            lambda: backend.infer(PROMPT, params=params),
            lambda: backend.infer(PROMPT * 50, params=params),
            lambda: backend.infer(PROMPT * 5, params=params),
        ]
    )
    assert (short.text, other.text) == ("a" * 30, "a" * 30)
    assert isinstance(long, BackendProtocolError)
    assert backend.health_check().healthy


def test_full_queue_is_told_as_busy(scripted: Make) -> None:
    backend = scripted([b"a"] * 500, {"max_concurrency": 1, "max_waiting": 0})
    stream = backend.stream(PROMPT, params={"max_tokens": 500})
    next(stream)
    with pytest.raises(BackendUnavailableError) as caught:
        backend.infer(PROMPT)
    assert caught.value.busy
    assert caught.value.may_fail_over
    assert not caught.value.may_retry
    assert backend.health_check().healthy


def test_deadline_of_a_gateway_frees_the_row(tmp_path: Path) -> None:
    values = {
        "backends": {
            "local": {
                "plugin": "onnx-local",
                "model": str(llama_folder(tmp_path)),
                "settings": {"device": "cpu", "max_concurrency": 2},
            }
        }
    }
    with LLMGateway.from_values(values) as gateway:
        known = gateway.ask("Go on.", params={"max_tokens": 5})
        long = {"max_tokens": 300, "logit_bias": {256: -100}}  # never the end token
        for _ in range(10):
            for limit_ms in (1, 10):
                with pytest.raises(BackendTimeoutError):
                    gateway.ask("Go on. " * 20, params=long, timeout_ms=limit_ms)
        deadline = time.monotonic() + 10
        while "running=0" not in gateway.health().backends["local"].detail:
            assert time.monotonic() < deadline
        assert gateway.ask("Go on.", params={"max_tokens": 5}).text == known.text


# -- memory -------------------------------------------------------------------------------------


def resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_is_level_over_many_loads_of_short_and_long_prompts(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", "F32", changes={"llama.context_length": 5000})
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "long", dtype="fp32")
    sizes = []
    with OnnxLocalBackend(device="cpu") as backend:
        for turn in range(20):
            backend.load_model(str(tmp_path / "long"))
            stream = backend.stream("x" * (4000 if turn % 2 else 40), params={"max_tokens": 4})
            if turn % 3:
                assert list(stream)
            else:
                next(stream)  # and is under way at the unload
            backend.unload()
            del stream
            sizes.append(resident_mb())
    assert max(sizes[3:]) < 1.1 * max(sizes[:3]), sizes


# -- the real model -----------------------------------------------------------------------------

TURNS = ["Name three rivers of Europe.", "Which one is the longest?", "Say it in French."]


def test_chat_is_the_same_whether_its_beginning_is_known_or_not(smollm2: Path) -> None:
    params = {"max_tokens": 20}
    chats: list[list[Message]] = []
    texts = []
    with OnnxLocalBackend(device="cpu", batch_invariant=True) as backend:
        backend.load_model(str(smollm2))
        chat: list[Message] = []
        for turn in TURNS:
            chat = [*chat, Message("user", turn)]
            chats.append(chat)
            texts.append(backend.infer(chat, params=params).text)
            chat = [*chat, Message("assistant", texts[-1])]
        backend.unload()
        backend.load_model(str(smollm2))
        anew = [backend.infer(chat, params=params).text for chat in reversed(chats)]
    assert anew[::-1] == texts


def test_real_answers_are_the_same_whatever_comes_and_goes(smollm2_fp32: Path) -> None:
    chance = random.Random(4)
    asked = [
        (f"{n}. Tell me of {what}.", chance.choice([3, 9, 17]))
        for n, what in enumerate(["rivers", "screws", "bread", "ships", "glass", "snow"])
    ]

    with OnnxLocalBackend(device="cpu", max_concurrency=3) as backend:
        backend.load_model(str(smollm2_fp32))

        def ask(prompt: str, tokens: int, delay_s: float = 0.0) -> str:
            time.sleep(delay_s)
            return backend.infer(prompt, params={"max_tokens": tokens}).text

        def leave() -> str:
            stream: Any = backend.stream("Tell me all of it.", params={"max_tokens": 200})
            for _ in range(4):
                next(stream)
            stream.close()
            return ""

        delays = [chance.random() for _ in asked]
        together = ask_together(
            [partial(ask, *each, delay_s) for each, delay_s in zip(asked, delays, strict=True)]
            + [leave] * 2
        )
        assert together == [ask(*each) for each in asked] + ["", ""]


def test_known_beginning_of_a_long_prompt_is_not_read_again(real: OnnxLocalBackend) -> None:
    stem = "The parts are held by screws of steel, and the plates by rivets. " * 20
    params = {"max_tokens": 1}
    first = real.infer(stem + "What holds the plates?", params=params)
    second = real.infer(stem + "And the parts?", params=params)
    assert first.prompt_tokens > 250
    assert second.latency_ms < first.latency_ms / 2
