"""Loading, limits, concurrency, cancellation and unloading."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_model import PROMPT, write_scripted_model

from iaop_core.errors import (
    BackendProtocolError,
    BackendUnavailableError,
    ContextLengthExceededError,
    InvalidRequestError,
    ModelLoadError,
)
from iaop_onnx_local import OnnxLocalBackend

Make = Callable[..., OnnxLocalBackend]

STORY = "Tell me a long story about a dragon."


# -- loading ------------------------------------------------------------------------------------


def test_missing_model_names_the_ways_to_get_one() -> None:
    with pytest.raises(ModelLoadError) as caught:
        OnnxLocalBackend(device="cpu").load_model("no-such-model")
    for part in ("'no-such-model'", "iaop-onnx fetch", "iaop-onnx import"):
        assert part in str(caught.value)


def test_gguf_file_as_a_model_names_the_import(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelLoadError, match="iaop-onnx import"):
        OnnxLocalBackend(device="cpu").load_model(str(tmp_path / "a.gguf"))


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "settings", "told"),
    [
        (drop("model.onnx"), {}, "holds no ONNX file"),
        (drop("tokenizer.json"), {}, "no tokenizer.json"),
        (drop("generation_config.json"), {}, "eos_token_id"),
        (drop("config.json"), {}, "context length"),
        (write("config.json", "{"), {}, "can't be read"),
        (write("tokenizer.json", "{}"), {}, "can't be read as a tokenizer"),
        (write("model.onnx", "not a model"), {}, "damaged or no ONNX model"),
        (lambda f: None, {"context_length": 2000}, "ends at 1000"),
        (lambda f: None, {"model_file": "q4.onnx"}, "there is no q4.onnx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_folder_that_cannot_be_loaded_tells_why(
    tmp_path: Path, change: Callable[[Path], object], settings: dict[str, Any], told: str
) -> None:
    folder = write_scripted_model(tmp_path / "model", [b"a"])
    change(folder)
    backend = OnnxLocalBackend(device="cpu", **settings)
    with pytest.raises(ModelLoadError, match=told):
        backend.load_model(str(folder))


def test_model_file_can_be_chosen(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [b"a"])
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "small.onnx")
    with OnnxLocalBackend(device="cpu", model_file="onnx/small.onnx") as backend:
        backend.load_model(str(folder))
        assert backend.infer(PROMPT).text == "a"


def test_loading_and_answering_touch_no_network(
    scripted: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", refuse)
    assert scripted([b"a"]).infer(PROMPT).text == "a"


# -- limits -------------------------------------------------------------------------------------


def test_prompt_is_never_cut_and_the_answer_keeps_to_the_context(scripted: Make) -> None:
    backend = scripted([b"a"], ends=False, context_length=32)
    for prompt_tokens, max_tokens, expected in ((30, 10, 2), (31, None, 1), (20, 5, 5)):
        params = {"max_tokens": max_tokens} if max_tokens else None
        result = backend.infer(PROMPT * prompt_tokens, params=params)
        assert result.prompt_tokens == prompt_tokens
        assert (result.completion_tokens, result.finish_reason) == (expected, "length")
    for prompt_tokens in (32, 40):
        with pytest.raises(ContextLengthExceededError) as caught:
            backend.infer(PROMPT * prompt_tokens)
        assert caught.value.prompt_tokens == prompt_tokens
        assert caught.value.context_tokens == 32
        assert str(prompt_tokens) in str(caught.value)
        assert "32" in str(caught.value)


def test_context_length_can_be_lowered(scripted: Make) -> None:
    backend = scripted([b"a"], {"context_length": 8}, ends=False)
    assert backend.infer(PROMPT).completion_tokens == 7


def test_max_tokens_of_the_settings_holds_where_the_call_is_silent(scripted: Make) -> None:
    backend = scripted([b"a"], {"max_tokens": 7}, ends=False)
    assert backend.infer(PROMPT).completion_tokens == 7
    assert backend.infer(PROMPT, params={"max_tokens": 9}).completion_tokens == 9


def test_logit_bias_for_a_token_that_is_not_there_is_refused(scripted: Make) -> None:
    backend = scripted([b"a"])
    with pytest.raises(InvalidRequestError, match="token 999"):
        backend.infer(PROMPT, params={"logit_bias": {999: 1}})


def test_unusable_logits_are_an_error_not_a_token(scripted: Make) -> None:
    logits = np.full((1, 3), np.nan, np.float32)
    with pytest.raises(BackendProtocolError, match="no usable number"):
        scripted([b"a"], logits=logits).infer(PROMPT)


def test_half_precision_model_answers(scripted: Make) -> None:
    logits = np.eye(3, dtype=np.float16)[[2, 0]]
    assert scripted([b"a"], logits=logits).infer(PROMPT).text == "a"


def test_recommended_sampling_holds_unless_the_call_says_otherwise(tmp_path: Path) -> None:
    folder = write_scripted_model(
        tmp_path / "model", [b"a", b"b"], logits=np.zeros((1, 4), np.float32)
    )

    def texts(params: dict[str, Any], **config: Any) -> set[str]:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **config}))
        with OnnxLocalBackend(device="cpu") as backend:
            backend.load_model(str(folder))
            return {backend.infer(PROMPT, params={"max_tokens": 9, **params}).text for _ in "12345"}

    assert texts({}) == {""}  # greedy: of equal logits the first, which is the end
    assert len(texts({}, do_sample=True)) > 1
    assert texts({"temperature": 0}, do_sample=True) == {""}
    assert len(texts({"top_p": 0.99})) > 1  # who narrows the choice wants to choose
    assert len(texts({"seed": 3})) == 1


# -- several at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["fp32", "quantized"])
def test_seeded_answers_are_the_same_alone_and_together(
    request: pytest.FixtureRequest, weights: str
) -> None:
    quantized = weights == "quantized"  # whose kernels round otherwise for one row
    model = request.getfixturevalue("smollm2" if quantized else "smollm2_fp32")
    params = [{"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": n} for n in range(4)]
    prompts = [STORY, STORY, "Name three rivers.", STORY + " It begins with a storm at sea."]
    together = [""] * 4
    with OnnxLocalBackend(device="cpu", batch_invariant=quantized) as backend:
        backend.load_model(str(model))
        alone = [
            backend.infer(prompt, params=each).text
            for prompt, each in zip(prompts, params, strict=True)
        ]
        assert len(set(alone)) == 4

        def ask(number: int) -> None:
            together[number] = backend.infer(prompts[number], params=params[number]).text

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone


def test_one_more_than_the_slots_is_refused(scripted: Make) -> None:
    backend = scripted([b"a"] * 500, {"max_concurrency": 2, "max_waiting": 0})
    first, second = backend.stream(PROMPT), backend.stream(PROMPT)
    next(first), next(second)
    with pytest.raises(BackendUnavailableError, match="all rows are taken") as caught:
        backend.infer(PROMPT)
    assert caught.value.may_fail_over
    first.close()  # type: ignore[attr-defined]
    assert backend.infer(PROMPT, params={"max_tokens": 50}).text == "a" * 50
    del second  # an iterator that is dropped gives its slot back, too
    gc.collect()
    streams = [backend.stream(PROMPT) for _ in range(2)]
    assert all(next(stream).delta == "a" for stream in streams)


def test_slot_comes_back_after_every_kind_of_end(scripted: Make) -> None:
    backend = scripted([b"a"] * 20, {"max_concurrency": 1, "context_length": 30})
    for _ in range(20):
        backend.infer(PROMPT)
        with pytest.raises(ContextLengthExceededError):
            backend.infer(PROMPT * 40)
        stream: Any = backend.stream(PROMPT)
        next(stream)
        stream.close()
        never_begun: Any = backend.stream(PROMPT)
        never_begun.close()
        assert list(never_begun) == []
    assert backend.infer(PROMPT).finish_reason == "stop"


def test_short_answer_does_not_wait_for_a_long_one(real: OnnxLocalBackend) -> None:
    long: Any = real.stream(STORY, params={"max_tokens": 2000})
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(sum(1 for _ in long)))
    thread.start()
    real.infer("Hi.", params={"max_tokens": 8})
    assert thread.is_alive()
    long.close()
    thread.join(5)
    assert taken[0] < 2000


# -- leaving ------------------------------------------------------------------------------------


def test_closing_stops_a_long_prompt_within_a_second(real: OnnxLocalBackend) -> None:
    stream: Any = real.stream("word " * 7000)
    chunks: list[Any] = []
    thread = threading.Thread(target=lambda: chunks.extend(stream))
    thread.start()
    time.sleep(0.5)
    started = time.monotonic()
    stream.close()
    thread.join(5)
    assert time.monotonic() - started < 1
    assert chunks == []


def test_cancelling_a_task_stops_the_engine_within_a_second(real: OnnxLocalBackend) -> None:
    async def leave() -> float:
        task = asyncio.create_task(real.ainfer("word " * 7000))
        await asyncio.sleep(0.5)
        task.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        while "running=0" not in real.health_check().detail:
            await asyncio.sleep(0.01)
        return time.monotonic() - started

    assert asyncio.run(leave()) < 1


def test_health_answers_at_once_during_a_long_prompt(real: OnnxLocalBackend) -> None:
    stream: Any = real.stream("word " * 7000)
    thread = threading.Thread(target=lambda: list(stream))
    thread.start()
    time.sleep(0.3)
    for _ in range(5):
        started = time.monotonic()
        assert real.health_check().healthy
        assert time.monotonic() - started < 0.2
    stream.close()
    thread.join()


def test_health_fails_when_a_step_does_not_end(smollm2: Path) -> None:
    with OnnxLocalBackend(device="cpu", stall_timeout_s=0.02) as backend:
        backend.load_model(str(smollm2))
        assert backend.health_check().healthy
        stream: Any = backend.stream("word " * 2000)
        thread = threading.Thread(target=lambda: list(stream))
        thread.start()
        deadline = time.monotonic() + 30
        while (health := backend.health_check()).healthy and time.monotonic() < deadline:
            time.sleep(0.001)
        stream.close()
        thread.join()
        assert "stalled: no step of the engine has ended for" in health.detail
        while "running=0" not in backend.health_check().detail:
            time.sleep(0.001)
        assert backend.health_check().healthy


def test_unloading_ends_the_answers_under_way_with_an_error(real: OnnxLocalBackend) -> None:
    with OnnxLocalBackend(device="cpu") as backend:
        backend.load_model()
        stream = backend.stream(STORY, params={"max_tokens": 2000})
        next(stream)
        started = time.monotonic()
        backend.unload()
        with pytest.raises(BackendUnavailableError, match="was unloaded before the answer's end"):
            list(stream)
        assert time.monotonic() - started < 1


def test_replacing_a_model_lets_its_answers_end(scripted: Make, tmp_path: Path) -> None:
    backend = scripted([b"a"] * 9)
    stream = backend.stream(PROMPT)
    next(stream)
    backend.load_model(str(write_scripted_model(tmp_path / "next", [b"b"])))
    assert backend.infer(PROMPT).text == "b"
    end = list(stream)[-1].result
    assert end is not None
    assert end.text == "a" * 9


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_comes_back_at_unload(smollm2: Path) -> None:
    pages = []
    with OnnxLocalBackend(device="cpu") as backend:
        for turn in range(10):
            backend.load_model(str(smollm2))
            backend.infer("word " * (200 if turn % 2 else 7), params={"max_tokens": 8})
            backend.unload()
            gc.collect()
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    megabytes = [page * os.sysconf("SC_PAGE_SIZE") / 1e6 for page in pages]
    assert max(megabytes[4:]) < 1.1 * max(megabytes[2:4]), megabytes


def test_repr_tells_what_is_loaded(scripted: Make) -> None:
    backend = scripted([b"a"])
    assert "on cpu" in repr(backend)
    backend.unload()
    assert "no model" in repr(backend)
    assert "offline" in repr(OnnxLocalBackend(offline=True))
