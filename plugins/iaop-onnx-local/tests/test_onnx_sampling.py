"""The next token is chosen as the parameters say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from iaop_onnx_local.sampling import Sampler, SamplingParams

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def shares(logits: Any = LOGITS, count: int = 20_000, **params: Any) -> dict[int, float]:
    """How often each token is chosen."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 5, **params}), [])
    drawn = Counter(sampler.choose(logits) for _ in range(count))
    return {token: number / count for token, number in sorted(drawn.items())}


def chosen(logits: Any = LOGITS, prompt: tuple[int, ...] = (), **params: Any) -> int:
    return Sampler(SamplingParams(**params), prompt).choose(np.asarray(logits, np.float32))


def near(**expected: float) -> Any:
    return pytest.approx({int(k[1:]): v for k, v in expected.items()}, abs=0.015)


def test_default_is_the_most_likely_token() -> None:
    assert chosen() == 1
    assert chosen(temperature=0.0, top_p=0.1, seed=3) == 1


def test_temperature_one_draws_by_likelihood() -> None:
    assert shares() == near(t0=0.05, t1=0.4, t2=0.1, t3=0.3, t4=0.15)


def test_low_temperature_sharpens() -> None:
    weights = np.array([0.05, 0.4, 0.1, 0.3, 0.15]) ** 2
    expected = dict(enumerate(weights / weights.sum()))
    assert shares(temperature=0.5) == pytest.approx(expected, abs=0.015)


def test_top_k_keeps_the_k_most_likely() -> None:
    assert shares(top_k=2) == near(t1=4 / 7, t3=3 / 7)
    assert shares(top_k=1) == {1: 1.0}
    assert shares(top_k=99) == shares()


def test_top_p_keeps_the_fewest_that_reach_the_share() -> None:
    assert shares(top_p=0.6) == near(t1=4 / 7, t3=3 / 7)
    assert shares(top_p=0.75) == near(t1=0.4 / 0.85, t3=0.3 / 0.85, t4=0.15 / 0.85)
    assert shares(top_p=0.0001) == {1: 1.0}


def test_top_p_counts_what_top_k_left() -> None:
    assert shares(top_k=3, top_p=0.8) == near(t1=4 / 7, t3=3 / 7)


def test_min_p_is_a_part_of_the_most_likely() -> None:
    assert shares(min_p=0.3) == near(t1=0.4 / 0.85, t3=0.3 / 0.85, t4=0.15 / 0.85)
    assert shares(min_p=1.0) == {1: 1.0}


def test_top_p_over_a_whole_vocabulary_is_exact() -> None:
    random = np.random.default_rng(0)
    for scale in (0.01, 1.0, 5.0):  # from nearly even to sharp
        logits = random.normal(0, scale, 20_000).astype(np.float32)
        weights = np.exp(logits - logits.max()).astype(np.float64)
        order = np.argsort(-weights)
        count = int(np.searchsorted(np.cumsum(weights[order]), 0.7 * weights.sum())) + 1
        allowed = set(order[: count + 1].tolist())
        sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.7, seed=1), [])
        assert {sampler.choose(logits) for _ in range(300)} <= allowed


def test_same_seed_chooses_the_same() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
        return [sampler.choose(LOGITS) for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    assert chosen([2.0, 1.5, -1.0], prompt=(0,), repetition_penalty=2.0) == 1
    assert chosen([-1.0, -1.5, -9.0], prompt=(0,), repetition_penalty=2.0) == 1
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [])
    logits = np.array([2.0, 1.5, 1.2], np.float32)
    assert [sampler.choose(logits) for _ in range(3)] == [0, 1, 2]
    assert logits.tolist() == pytest.approx([2.0, 1.5, 1.2])  # the engine's buffer is left alone


def test_presence_penalty_counts_once_and_frequency_each_time() -> None:
    logits = np.array([2.0, 1.4], np.float32)
    once = Sampler(SamplingParams(presence_penalty=0.5), [0, 0, 0])
    assert [once.choose(logits) for _ in range(3)] == [0, 0, 0]
    each = Sampler(SamplingParams(frequency_penalty=0.5), [0, 0, 0])
    assert [each.choose(logits) for _ in range(4)] == [0, 0, 1, 0]


def test_logit_bias_forces_and_forbids() -> None:
    assert chosen(logit_bias={0: 100.0}) == 0
    assert chosen(logit_bias={1: -100.0}) == 3


def test_half_precision_logits_are_drawn_in_single_precision() -> None:
    logits = np.zeros(60_000, np.float16)  # their sum overflows half precision
    drawn = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=1), [])
    assert len({drawn.choose(logits) for _ in range(50)}) > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_an_error_and_infinite_ones_certain(temperature: float) -> None:
    with pytest.raises(FloatingPointError):
        chosen([np.nan] * 3, temperature=temperature)
    with pytest.raises(FloatingPointError):
        chosen([1.0, np.nan, 2.0], temperature=temperature)
    with pytest.raises(FloatingPointError):
        chosen([-np.inf] * 3, temperature=temperature)
    assert chosen([1.0, np.inf, 2.0], temperature=temperature) == 1
    assert chosen([-np.inf, 0.0, -np.inf], temperature=temperature) == 1
