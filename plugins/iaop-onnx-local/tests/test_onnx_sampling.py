"""The next token is chosen as the parameters say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from iaop_onnx_local.sampling import Chosen, Sampler, SamplingParams

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def shares(logits: Any = LOGITS, count: int = 20_000, **params: Any) -> dict[int, float]:
    """How often each token is chosen."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 5, **params}), [])
    drawn = Counter(sampler.choose(logits).token_id for _ in range(count))
    return {token: number / count for token, number in sorted(drawn.items())}


def chosen(logits: Any = LOGITS, prompt: tuple[int, ...] = (), **params: Any) -> int:
    return Sampler(SamplingParams(**params), prompt).choose(np.asarray(logits, np.float32)).token_id


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
        assert {sampler.choose(logits).token_id for _ in range(300)} <= allowed


def test_same_seed_chooses_the_same() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
        return [sampler.choose(LOGITS).token_id for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    assert chosen([2.0, 1.5, -1.0], prompt=(0,), repetition_penalty=2.0) == 1
    assert chosen([-1.0, -1.5, -9.0], prompt=(0,), repetition_penalty=2.0) == 1
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [])
    logits = np.array([2.0, 1.5, 1.2], np.float32)
    assert [sampler.choose(logits).token_id for _ in range(3)] == [0, 1, 2]
    assert logits.tolist() == pytest.approx([2.0, 1.5, 1.2])  # the engine's buffer is left alone


def test_presence_penalty_counts_once_and_frequency_each_time() -> None:
    logits = np.array([2.0, 1.4], np.float32)
    once = Sampler(SamplingParams(presence_penalty=0.5), [0, 0, 0])
    assert [once.choose(logits).token_id for _ in range(3)] == [0, 0, 0]
    each = Sampler(SamplingParams(frequency_penalty=0.5), [0, 0, 0])
    assert [each.choose(logits).token_id for _ in range(4)] == [0, 0, 1, 0]


def test_logit_bias_forces_and_forbids() -> None:
    assert chosen(logit_bias={0: 100.0}) == 0
    assert chosen(logit_bias={1: -100.0}) == 3


def test_half_precision_logits_are_drawn_in_single_precision() -> None:
    logits = np.zeros(60_000, np.float16)  # their sum overflows half precision
    drawn = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=1), [])
    assert len({drawn.choose(logits).token_id for _ in range(50)}) > 40


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


VOCABULARIES = [3, 200, 600, 1024, 5000]


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 2}, {"top_k": 400}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str
)
def test_shares_are_those_of_the_definition(size: int, params: dict[str, Any]) -> None:
    random = np.random.default_rng(size)
    logits = random.normal(0, 1, size).astype(np.float32)
    logits[random.integers(0, size, 3)] += np.log(size)  # so that counting them is quick
    expected = defined_shares(logits, **params)
    drawn = shares(logits, count=4_000, **params)
    assert set(drawn) <= set(np.flatnonzero(expected).tolist())
    likely = np.flatnonzero(expected > 0.02)
    assert len(likely)
    for token in likely.tolist():
        assert drawn.get(token, 0) == pytest.approx(expected[token], abs=0.03)


def defined_shares(
    logits: Any, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray[Any, Any]:
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-weights, kind="stable")[: top_k or None]
    if top_p < 1:
        sums = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    order = order[weights[order] >= min_p * weights.max()]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    return kept / kept.sum()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.full(5000, -np.inf, np.float32)
    possible = [0, 255, 256, 4700, 4999]
    logits[possible] = 0
    for params in ({}, {"top_k": 50}, {"top_k": 4000}, {"top_p": 0.99}, {"min_p": 0.1}):
        assert set(shares(logits, count=500, **params)) == set(possible)


def test_flat_distribution_is_cut_by_top_p() -> None:
    logits = np.zeros(20_000, np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.5, seed=1), [])
    assert max(sampler.choose(logits).token_id for _ in range(2000)) in range(9000, 10_001)


@pytest.mark.parametrize("temperature", [1e-50, 1e-9, 1e-5, 1e-3])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    assert set(shares(temperature=temperature, count=50)) == {1}


def test_draws_depend_on_the_seed_and_their_number_alone() -> None:
    """Not on what earlier logits were: a batch's other answers, or an infinite one, change none."""

    def draw(first: list[np.ndarray[Any, Any]]) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=7), [])
        return [sampler.choose(logits).token_id for logits in [*first, *[LOGITS] * 20]][-20:]

    sure = np.array([0, np.inf, 0, 0, 0], np.float32)
    assert draw([LOGITS] * 3) == draw([LOGITS[::-1].copy()] * 3) == draw([sure] * 3)
    assert draw([LOGITS] * 3) != draw([LOGITS] * 2)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0, "top_p": 0.9}, {"logit_bias": {1: 9}, "repetition_penalty": 1.3}],
)
def test_row_of_a_batch_is_chosen_from_and_left_alone(params: dict[str, Any]) -> None:
    batch = np.random.default_rng(0).normal(0, 1, (3, 1, 5000)).astype(np.float32)
    before = batch.copy()
    for row in (batch[1, 0], batch[:, 0].T[:5000, 1]):
        chosen = Sampler(SamplingParams(seed=3, top_logprobs=2, **params), []).choose(row)
        alone = Sampler(SamplingParams(seed=3, top_logprobs=2, **params), []).choose(row.copy())
        assert chosen == alone
    assert (batch == before).all()


def test_penalties_follow_a_long_answer() -> None:
    logits = np.zeros(1000, np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=1.0, repetition_penalty=1.1), [5, 5, 6])
    assert [sampler.choose(logits).token_id for _ in range(1000)] == list(range(1000))


# -- log probabilities --------------------------------------------------------------------------


def test_no_logprob_is_told_unless_asked_for() -> None:
    assert Sampler(SamplingParams(), []).choose(LOGITS) == Chosen(1, None, ())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_logprobs_are_the_log_softmax_of_the_logits(dtype: Any) -> None:
    logits = np.random.default_rng(1).normal(0, 5, 3000).astype(dtype)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    chosen = Sampler(SamplingParams(top_logprobs=20), []).choose(logits)
    assert chosen.logprob == pytest.approx(exact.max(), abs=1e-4)
    order = np.argsort(-exact, kind="stable")[:20]
    assert [token for token, _ in chosen.top] == order.tolist()
    assert [logprob for _, logprob in chosen.top] == pytest.approx(exact[order], abs=1e-4)
    assert chosen.top[0] == (chosen.token_id, chosen.logprob)


def test_logprobs_are_the_models_whatever_else_is_asked() -> None:
    plain = Sampler(SamplingParams(top_logprobs=5), []).choose(LOGITS)
    changed = SamplingParams(
        temperature=0.3,
        top_k=2,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias={0: 100.0},
        seed=1,
        top_logprobs=5,
    )
    told = Sampler(changed, [1, 2]).choose(LOGITS)
    assert told.token_id == 0
    assert told.logprob == pytest.approx(np.log(0.05), abs=1e-5)
    assert told.top == plain.top


def test_logprobs_of_certain_and_impossible_tokens() -> None:
    sure = Sampler(SamplingParams(top_logprobs=2), []).choose(
        np.array([1.0, np.inf, -np.inf], np.float32)
    )
    assert (sure.logprob, sure.top) == (0.0, ((1, 0.0),))
    logits = np.array([0.0, -np.inf, 0.0], np.float32)
    told = Sampler(SamplingParams(top_logprobs=3), []).choose(logits)
    assert told.top == ((0, pytest.approx(np.log(0.5))), (2, pytest.approx(np.log(0.5))))
