"""Chooses the next token from the model's logits, in float32 whatever the model computes in.

It is called once for each token of each answer, beside the engine on the same cores, so it touches
a whole vocabulary as seldom as it can: greedy once, and sampling sorts only the likeliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

if TYPE_CHECKING:
    from iaop_onnx_local.constraint import Constraint

__all__ = ["Chosen", "Sampler", "SamplingParams"]

_WIDTH = 256
"""Columns that a vocabulary is looked at in; neighbours, often alike, fall into different ones."""
_GREEDY_BELOW = 1e-5
"""A lower temperature is taken as 0: only ties would tell them apart, and float32 could not."""


@frozen(kw_only=True, slots=True)
class SamplingParams:
    """How to choose. The defaults choose the most likely token and change nothing."""

    temperature: float = 0.0
    """0, and anything below 1e-5, is greedy: the most likely, of equals the lowest id."""
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
    """0 or more. None: another one each time."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to tell beside the chosen one; None: no log probability."""


@frozen(slots=True)
class Chosen:
    """The next token."""

    token_id: int
    logprob: float | None = None
    """Natural logarithm of the probability that the model gave it, the softmax of the logits as
    they came; minus infinity for one that the model held impossible. None when not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, the likeliest first."""


class Sampler:
    """Chooses the tokens of one answer.

    Each choice with a temperature takes one number of the seed's sequence, whatever the logits are
    and whoever else is in the batch: the same seed chooses the same from the same logits.

    Args:
        params: how to choose.
        prompt_ids: the prompt, for `repetition_penalty`.
        constraint: what the answer must keep to; it is told each token that is chosen.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._random = (
            np.random.default_rng(params.seed) if params.temperature >= _GREEDY_BELOW else None
        )
        self._penalties = _Penalties(params, prompt_ids) if _penalises(params) else None

    def choose(self, logits: NDArray[np.floating]) -> Chosen:
        """Chooses from the logits `[vocabulary]` of the next position, the same after it as before.

        Raises:
            FloatingPointError: the logits hold NaN, or nothing but minus infinity.
            InvalidRequestError: the constraint has become too complex to go on with.
        """
        raw = logits if logits.dtype == np.float32 else logits.astype(np.float32)
        if self._penalties is None:
            token = self._choose_from(raw)
        else:
            with self._penalties.taken_from(raw):
                token = self._choose_from(raw)
            self._penalties.count(token)
        if self._constraint is not None:
            self._constraint.advance(token)
        if self._params.top_logprobs is None:
            return Chosen(token)
        return _with_logprobs(raw, token, self._params.top_logprobs)

    def _choose_from(self, scores: NDArray[np.float32]) -> int:
        if self._constraint is not None:
            scores = scores.copy()
            self._constraint.mask(scores)
        token = int(scores.argmax())
        best = float(scores[token])
        if best != best or best == -np.inf:  # argmax finds a NaN before anything else
            raise FloatingPointError("the model computed no usable number for the next token")
        if self._random is not None:
            share = self._random.random()
            if best != np.inf:
                token = self._draw(scores, best, share)
        return token

    def _draw(self, scores: NDArray[np.float32], best: float, share: float) -> int:
        params = self._params
        if 0 < params.top_k < len(scores):
            ids = _likeliest(scores, params.top_k)
            weights = _weights(scores[ids], best, params.temperature)
            if params.top_p < 1:
                sums = np.cumsum(weights, dtype=np.float64)
                count = _count_to(sums, params.top_p * float(sums[-1]))
                ids, weights = ids[:count], weights[:count]
        elif params.top_p < 1:
            ids, weights = _nucleus(scores, best, params.temperature, params.top_p)
        elif params.min_p > 0:
            least = best + params.temperature * float(np.log(params.min_p))
            ids = np.flatnonzero(scores >= least)
            weights = _weights(scores[ids], best, params.temperature)
        else:
            return _pick(_weights(scores, best, params.temperature), share)
        if params.min_p > 0:
            kept = weights >= params.min_p  # the most likely one weighs 1
            ids, weights = ids[kept], weights[kept]
        return int(ids[_pick_in(weights, share)[0]])


class _Penalties:
    """What an answer's own tokens, and those of its prompt, change in the logits."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._counts_tokens = _counts_tokens(params)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._biases = np.fromiter(params.logit_bias.values(), np.float32)
        # Different tokens of the prompt, then of the answer, and how often the answer has each.
        seen = dict.fromkeys(prompt_ids) if params.repetition_penalty != 1 else {}
        self._places = {token: place for place, token in enumerate(seen)}
        self._ids = np.fromiter([*seen, *[0] * 64], np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)

    @contextmanager
    def taken_from(self, scores: NDArray[np.float32]) -> Iterator[None]:
        """Changes the scores in place for as long as the context lasts.

        They are few of many, and copying all takes longer than all the rest.
        """
        size = len(self._places)
        ids, counts = self._ids[:size], self._counts[:size]
        before, biased_before = scores[ids], scores[self._bias_ids]
        self._change(scores, ids, counts)
        try:
            yield
        finally:
            scores[ids] = before
            scores[self._bias_ids] = biased_before

    def _change(
        self, scores: NDArray[np.float32], ids: NDArray[np.int64], counts: NDArray[np.float32]
    ) -> None:
        params = self._params
        if params.repetition_penalty != 1:
            known, penalty = scores[ids], params.repetition_penalty
            scores[ids] = np.where(known > 0, known / penalty, known * penalty)
        if params.presence_penalty or params.frequency_penalty:
            scores[ids] -= (
                params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            )
        scores[self._bias_ids] += self._biases

    def count(self, token: int) -> None:
        """Takes note of a token of the answer."""
        if not self._counts_tokens:
            return
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1


def _counts_tokens(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )


def _penalises(params: SamplingParams) -> bool:
    return _counts_tokens(params) or bool(params.logit_bias)


def _weights(scores: NDArray[np.float32], best: float, temperature: float) -> NDArray[np.float32]:
    """Likelihoods as parts of the most likely one's."""
    weights = scores - np.float32(best)
    weights *= np.float32(1 / temperature)
    np.exp(weights, out=weights)
    return weights


def _likeliest(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The places of the highest scores, the highest first, of equals the lower place.

    They are as many as asked for, or all that are more than minus infinity.
    """
    size, rows = len(scores), len(scores) // _WIDTH
    if count <= _WIDTH // 2 and rows:
        # So many columns have a maximum of at least this, so it is low enough for all sought.
        highest = scores[: rows * _WIDTH].reshape(rows, _WIDTH).max(axis=0)
        least = np.partition(highest, _WIDTH - count)[_WIDTH - count]
    elif count < size:
        least = np.partition(scores, size - count)[size - count]
    else:
        least = np.float32(-np.inf)
    ids = np.flatnonzero(scores >= least if least > -np.inf else scores > least)
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def _nucleus(
    scores: NDArray[np.float32], best: float, temperature: float, share: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The fewest tokens that are together as likely as the share, and their weights."""
    every = _weights(scores, best, temperature)
    wanted = share * float(every.sum())
    for size in (_WIDTH // 4, _WIDTH * 2):
        ids = _likeliest(scores, size)
        weights = every[ids]
        sums = np.cumsum(weights, dtype=np.float64)
        if sums[-1] >= wanted:
            count = _count_to(sums, wanted)
            return ids[:count], weights[:count]
    # A flat distribution: many tokens, whose order does not matter, only where they end.
    falling = np.sort(every)[::-1]
    count = _count_to(np.cumsum(falling, dtype=np.float64), wanted)
    least = falling[min(count, len(falling)) - 1]
    above = np.flatnonzero(every > least)
    ids = np.append(above, np.flatnonzero(every == least)[: count - len(above)])
    return ids, every[ids]


def _count_to(sums: NDArray[np.float64], wanted: float) -> int:
    """How many of the first it takes to reach what is wanted."""
    return int(np.searchsorted(sums, wanted)) + 1


def _pick(weights: NDArray[np.float32], share: float) -> int:
    """A place drawn by weight. First the column is drawn: sums are cheaper than running sums."""
    rows = len(weights) // _WIDTH
    if rows < 2:
        return _pick_in(weights, share)[0]
    main = rows * _WIDTH
    columns = weights[:main].reshape(rows, _WIDTH)
    column, share = _pick_in(np.append(columns.sum(axis=0), weights[main:].sum()), share)
    if column == _WIDTH:
        return main + _pick_in(weights[main:], share)[0]
    return _pick_in(columns[:, column], share)[0] * _WIDTH + column


def _pick_in(weights: NDArray[np.float32], share: float) -> tuple[int, float]:
    """The place where the running sum passes the share of the whole, and the share left there.

    Never one that weighs nothing.
    """
    sums = np.cumsum(weights, dtype=np.float64)
    mark = share * float(sums[-1])
    place = int(np.searchsorted(sums, mark, side="right"))
    if place == len(sums):  # rounding took the mark to the very end
        place = int(np.flatnonzero(weights)[-1])
    before = float(sums[place - 1]) if place else 0.0
    return place, min(max((mark - before) / float(weights[place]), 0.0), 1 - 2**-53)


def _with_logprobs(raw: NDArray[np.float32], token: int, count: int) -> Chosen:
    best = raw.max()
    if best == np.inf:  # the infinite ones share all of the probability
        raw = np.where(raw == np.inf, np.float32(0), np.float32(-np.inf))
        best = np.float32(0)
    total = float(best) + float(np.log(_weights(raw, float(best), 1.0).sum(dtype=np.float64)))
    ids = _likeliest(raw, count) if count else ()
    top = tuple((int(other), min(float(raw[other]) - total, 0.0)) for other in ids)
    return Chosen(token, min(float(raw[token]) - total, 0.0), top)
