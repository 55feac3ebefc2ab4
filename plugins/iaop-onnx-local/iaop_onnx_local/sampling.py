"""Chooses the next token from the model's logits, in float32 whatever the model computes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

__all__ = ["Sampler", "SamplingParams"]


@frozen(kw_only=True, slots=True)
class SamplingParams:
    """How to choose. The defaults choose the most likely token and change nothing."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Of the k most likely tokens; 0: of all."""
    top_p: float = 1.0
    """Of the fewest tokens that are together this likely, after `top_k`."""
    min_p: float = 0.0
    """Of the tokens at least this likely, as a part of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that the token is in the answer."""
    logit_bias: Mapping[int, float] = field(factory=dict)
    """Added to the logits."""
    seed: int | None = None


class Sampler:
    """Chooses the tokens of one answer. The same seed chooses the same from the same logits."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._random = np.random.default_rng(params.seed)
        self._counts: dict[int, int] = {}
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
        self._leaves_logits = (
            params.repetition_penalty == 1
            and not params.presence_penalty
            and not params.frequency_penalty
            and not params.logit_bias
        )

    def choose(self, logits: NDArray[np.floating]) -> int:
        """Chooses from the logits `[vocabulary]` of the next position.

        Raises:
            FloatingPointError: the logits hold NaN, or nothing but minus infinity.
        """
        scores = logits if self._leaves_logits else self._penalised(logits)
        best = int(scores.argmax())
        top = float(scores[best])
        if np.isnan(top) or top == -np.inf:  # argmax finds a NaN before anything else
            raise FloatingPointError("the model computed no usable number for the next token")
        if self._params.temperature > 0 and top != np.inf:
            best = self._draw(scores.astype(np.float32), top)
        if not self._leaves_logits:
            self._counts[best] = self._counts.get(best, 0) + 1
            self._seen.add(best)
        return best

    def _penalised(self, logits: NDArray[np.floating]) -> NDArray[np.float32]:
        params, scores = self._params, logits.astype(np.float32)
        if params.repetition_penalty != 1:
            ids = np.fromiter(self._seen, np.int64)
            known = scores[ids]
            penalty = np.float32(params.repetition_penalty)
            scores[ids] = np.where(known > 0, known / penalty, known * penalty)
        for token, count in self._counts.items():
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        return scores

    def _draw(self, scores: NDArray[np.float32], top: float) -> int:
        params = self._params
        weights = np.exp((scores - np.float32(top)) / np.float32(params.temperature))
        ids = np.arange(len(weights))
        if 0 < params.top_k < len(weights):
            ids = np.sort(np.argpartition(weights, -params.top_k)[-params.top_k :])
            weights = weights[ids]
        if params.top_p < 1:
            kept = _likeliest(weights, params.top_p)
            ids, weights = ids[kept], weights[kept]
        if params.min_p > 0:
            kept = np.flatnonzero(weights >= params.min_p)  # the most likely one weighs 1
            ids, weights = ids[kept], weights[kept]
        sums = np.cumsum(weights, dtype=np.float64)
        place = np.searchsorted(sums, self._random.random() * sums[-1], side="right")
        return int(ids[min(int(place), len(ids) - 1)])


def _likeliest(weights: NDArray[np.float32], share: float) -> NDArray[np.int64]:
    """The places, in order, of the fewest weights that make up the share of their sum.

    Sorts only as many of the largest as it takes: of a whole vocabulary that is most of the time.
    """
    wanted, size = float(weights.sum(dtype=np.float64)) * share, 128
    while True:
        size = min(size, len(weights))
        largest = np.argpartition(weights, -size)[-size:]
        largest = largest[np.argsort(-weights[largest], kind="stable")]
        sums = np.cumsum(weights[largest], dtype=np.float64)
        if sums[-1] >= wanted or size == len(weights):
            count = int(np.searchsorted(sums, wanted)) + 1
            return np.sort(largest[:count])
        size *= 8
