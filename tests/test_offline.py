"""The offline kernel: deterministic, marked, and strict about its life."""

from __future__ import annotations

import pytest

from iaop_core import OfflineKernel
from iaop_core.errors import ModelNotLoadedError


def test_kernel_has_the_life_of_a_real_engine() -> None:
    kernel = OfflineKernel("gpu")
    assert not kernel.is_server_live()
    kernel.start_server()
    assert kernel.is_server_live()
    assert not kernel.is_model_ready()
    kernel.load("m")
    assert kernel.is_model_ready("m")
    assert kernel.is_model_ready()
    assert not kernel.is_model_ready("other")
    kernel.unload()
    assert not kernel.is_model_ready()
    kernel.load("m")
    kernel.stop_server()
    assert not kernel.is_server_live()
    assert not kernel.is_model_ready()


def test_kernel_fails_closed_before_load_and_names_the_backend() -> None:
    with pytest.raises(ModelNotLoadedError, match="'gpu-triton' has no model loaded"):
        OfflineKernel("gpu", backend_name="gpu-triton").infer("hi")


def test_answer_is_the_tag_the_model_the_prompt_and_three_sources() -> None:
    kernel = OfflineKernel("gpu")
    kernel.load("m")
    result = kernel.infer("你好", ["甲", "乙", "丙", "丁"])
    assert result.text == "[gpu:m] 你好\n[来源: 甲]\n[来源: 乙]\n[来源: 丙]"
    assert result.offline
    assert result.usage_estimated
    assert result.completion_tokens == len(result.text) // 4


@pytest.mark.parametrize(
    ("max_tokens", "shown", "reason"), [(3, 3, "length"), (9, 9, "stop"), (None, 9, "stop")]
)
def test_prompt_is_cut_to_max_tokens_characters(
    max_tokens: int | None, shown: int, reason: str
) -> None:
    kernel = OfflineKernel("gpu")
    kernel.load("m")
    result = kernel.infer("123456789", max_tokens=max_tokens)
    assert (result.text, result.finish_reason) == (f"[gpu:m] {'123456789'[:shown]}", reason)


def test_prompt_is_cut_to_256_characters_by_default() -> None:
    kernel = OfflineKernel("gpu")
    kernel.load("m")
    assert kernel.infer("x" * 300).text == f"[gpu:m] {'x' * 256}"


def test_same_question_has_the_same_answer() -> None:
    kernel = OfflineKernel("gpu")
    kernel.load("m")
    assert len({kernel.infer("hi").text for _ in range(5)}) == 1
