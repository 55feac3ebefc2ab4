"""What a row holds serves the next text that begins alike, and the answer is the same to the token.

Prompt tokens that are read are counted, so a beginning that is said to be known is not read again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_decoders import VOCABULARY
from watched_engine import KINDS, Greedy, WatchedEngine, open_tiny_cache

STEM = [7, 3, 31, 12, 5, 5, 28, 19, 0, 2, 39, 6, 11, 24, 8, 17, 1, 33, 9, 4]
LEAST = 2
"""Tokens at the end of a prompt that are read in any case."""

Open = Callable[..., WatchedEngine]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Open]:
    made: list[WatchedEngine] = []

    def make(kind: str = "grouped", **options: Any) -> WatchedEngine:
        made.append(WatchedEngine(tmp_path, kind, **options))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def tokens_read(watch: WatchedEngine, prompt: list[int], tokens: int = 6) -> int:
    """Checks an answer; returns how many tokens of its prompt were read."""
    before = watch.cache.tokens_read
    assert watch.answer(prompt, tokens) == watch.expected(prompt, tokens)
    return watch.cache.tokens_read - before


@pytest.mark.parametrize("kind", KINDS)
def test_beginning_that_another_text_had_is_not_read_again(watched: Open, kind: str) -> None:
    watch = watched(kind)
    assert tokens_read(watch, [*STEM, 1, 2, 3]) == len(STEM) + 3
    assert tokens_read(watch, [*STEM, 9, 9, 9, 9]) == 4
    assert tokens_read(watch, [*STEM, 1, 2, 3]) == LEAST
    assert tokens_read(watch, STEM) == LEAST  # the beginning of what rows hold
    assert tokens_read(watch, STEM[1:]) == len(STEM) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_beginning_is_taken_from_an_answer_under_way(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=3)
    first = Greedy([*STEM, 1, 2], 30)
    others: list[Greedy] = []

    def invite(job: Greedy) -> None:
        if len(job.ids) in (3, 9):
            others.append(watch.start([*STEM, 1, 2, *job.ids[:2], 30 + len(others), 4], 12))

    first.on_token = invite
    watch.engine.submit(first)
    assert first.result() == watch.expected(first.prompt_ids, 30)
    for other in others:
        assert other.result() == watch.expected(other.prompt_ids, 12)
    assert len(others) == 2
    assert watch.cache.tokens_read == len(STEM) + 2 + 2 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_chat_goes_on_in_its_own_row(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=2)
    text = STEM[:6]
    assert tokens_read(watch, text, 4) == 6
    for turn in range(5):
        text = [*text, *watch.expected(text, 4), turn, 30]
        # The answer's last token was never read, and what the user said is new.
        assert tokens_read(watch, text, 4) == 1 + 2
    assert watch.cache.of("copy") == []


@pytest.mark.parametrize("kind", KINDS)
def test_chat_may_go_on_from_its_prompts_alone(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=2, lends_answers=False)
    text = STEM[:6]
    assert tokens_read(watch, text, 4) == 6
    for turn in range(5):
        text = [*text, *watch.expected(text, 4), turn, 30]
        assert tokens_read(watch, text, 4) == 4 + 2
    assert watch.cache.of("copy") == []
    # Nor does another text go on from an answer under way.
    watch = watched(kind, rows=2, lends_answers=False)
    others: list[Greedy] = []
    first = Greedy(STEM, 30)
    first.on_token = lambda job: (
        len(job.ids) == 20 and others.append(watch.start([*STEM, *job.ids, 1, 2], 5))
    )
    watch.engine.submit(first)
    assert first.result() == watch.expected(STEM, 30)
    assert others[0].result() == watch.expected(others[0].prompt_ids, 5)
    assert watch.cache.tokens_read == len(STEM) + 20 + 2


@pytest.mark.parametrize("kind", KINDS)
def test_chats_by_turns_keep_their_rows(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=3)
    chats = [STEM[:6], STEM[6:11], STEM[11:]]
    for text in chats:
        tokens_read(watch, text, 3)
    for turn in range(4):
        for number, text in enumerate(chats):
            chats[number] = text = [*text, *watch.expected(text, 3), turn]
            assert tokens_read(watch, text, 3) == 1 + 1


def test_row_that_was_used_longest_ago_is_given_away(watched: Open) -> None:
    watch = watched(rows=2)
    chat = STEM
    tokens_read(watch, chat, 3)
    for other in range(4):  # in between come others, which know nothing of it
        tokens_read(watch, [other] * 20, 2)
        chat = [*chat, *watch.expected(chat, 3), 30]
        assert tokens_read(watch, chat, 3) == 1 + 1
    tokens_read(watch, [38] * 20, 2)
    tokens_read(watch, [39] * 20, 2)
    assert tokens_read(watch, chat, 3) == len(chat)


def test_beginning_that_is_hardly_longer_is_not_copied(watched: Open) -> None:
    watch = watched()
    tokens_read(watch, STEM[:6])
    assert tokens_read(watch, [*STEM[:6], 39, 39]) == 8
    assert watch.cache.of("copy") == []


def test_text_that_failed_lends_no_more_than_was_read(watched: Open) -> None:
    watch = watched(rows=2, prompt_part=4)

    def burst(call: Any) -> None:
        if call[0] == "extend" and len(watch.cache.of("extend")) == 3:
            raise RuntimeError("the device is gone")

    watch.cache.before = burst
    others = watch.start([1, 2], 30)  # so that the prompt is read in parts
    job = watch.start([*STEM, 1], 3)
    with pytest.raises(RuntimeError):
        job.result()
    assert others.result() == watch.expected([1, 2], 30)
    assert tokens_read(watch, [*STEM, 1], 3) > len(STEM) - 16
    assert tokens_read(watch, [*STEM, 2, 2], 3) == 2


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_what_they_are_said_to_hold_after_any_use(
    tmp_path: Path, kind: str, seed: int
) -> None:
    """Rows that lie inside a batch and have no part in it keep what they hold, full ones too."""
    chance = random.Random(seed)
    rows, capacity = 5, 24
    tiny, cache = KINDS[kind], open_tiny_cache(tmp_path, kind, rows=rows, capacity=capacity)
    texts: list[list[int]] = [[] for _ in range(rows)]

    def check(row: int, logits: Any) -> None:
        np.testing.assert_allclose(logits, tiny.logits(texts[row]), rtol=1e-3, atol=1e-3)

    for _ in range(250):
        row, other = chance.sample(range(rows), 2)
        use = chance.choice(["extend", "fill", "step", "step", "step", "cut", "copy"])
        if use in ("extend", "fill"):
            room = capacity - len(texts[row])
            new = chance.choices(range(VOCABULARY), k=min(room, chance.randint(1, 9)))
            if use == "fill" and kind != "in-pairs":  # whose neighbours are stepped with it
                new = chance.choices(range(VOCABULARY), k=room)
            if new:
                texts[row] += new
                check(row, cache.extend(row, new))
        elif use == "step":
            chosen = [
                r for r in range(rows) if 0 < len(texts[r]) < capacity and chance.random() < 0.5
            ]
            new = chance.choices(range(VOCABULARY), k=len(chosen))
            for each, token in zip(chosen, new, strict=True):
                texts[each].append(token)
            for each, logits in zip(chosen, cache.step(chosen, new), strict=True):
                check(each, logits)
        elif use == "cut":
            length = chance.randint(0, len(texts[row]))
            cache.cut(row, length)
            del texts[row][length:]
        else:
            length = chance.randint(0, len(texts[row]))
            if length:
                cache.copy(row, other, length)
                texts[other] = texts[row][:length]
        # A full row inside a batch gives up its last token, and says so.
        texts = [text[: cache.lengths[place]] for place, text in enumerate(texts)]
        assert cache.lengths == [len(text) for text in texts]
        assert sum(cache.lengths) * cache.decoder.cache_bytes_per_token <= cache.max_bytes
