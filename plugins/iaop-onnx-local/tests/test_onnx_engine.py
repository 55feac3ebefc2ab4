"""Answers join and leave the running batch at each step, and each is as if it were alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_decoders import VOCABULARY
from watched_engine import CAPACITY, KINDS, TIMEOUT_S, Greedy, WatchedEngine

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


# -- batched equals alone -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_as_if_alone_whatever_comes_and_goes(
    watched: Open, kind: str, seed: int
) -> None:
    chance = random.Random(seed)
    watch = watched(kind, rows=chance.choice([2, 4, 5]), prompt_part=chance.choice([1, 3, 8, 64]))
    jobs: list[Greedy] = []
    cancelled: set[int] = set()
    stems = [chance.choices(range(VOCABULARY), k=40) for _ in range(3)]

    def make_job() -> tuple[Greedy, int | None]:
        """A job, and after how many tokens it is cancelled."""
        stem, known = chance.choice(stems), chance.choice([0, 1, 17, 30, 38])
        prompt = stem[:known] + chance.choices(range(VOCABULARY), k=chance.randint(1, 12))
        tokens = chance.choice([1, 2, 5, CAPACITY])
        job = Greedy(prompt, min(tokens, CAPACITY - len(prompt)))
        return job, chance.choice([None, None, None, 0, 1, 3])

    def submit() -> None:
        job, leaves_after = make_job()
        jobs.append(job)
        number = len(jobs) - 1
        cancel = watch.engine.submit(job)
        if leaves_after == 0:
            cancelled.add(number)
            cancel()
        elif leaves_after is not None:

            def leave(job: Greedy) -> None:
                if len(job.ids) == leaves_after and job.tokens > leaves_after:
                    cancelled.add(number)
                    cancel()

            job.on_token = leave

    def come(_call: Any) -> None:
        for _ in range(chance.choice([0, 0, 0, 0, 1, 1, 3])):
            if len(jobs) < 50:
                submit()

    watch.cache.before = come
    submit()
    while len(jobs) < 50:  # in case all have left before the last came
        watch.wait_until_idle()
        if len(jobs) < 50:
            submit()
    watch.wait_until_idle()
    assert cancelled
    for number, job in enumerate(jobs):
        expected = watch.expected(job.prompt_ids, job.tokens)
        if number in cancelled:
            assert not job.ended.is_set()
            assert job.ids == expected[: len(job.ids)]
            assert len(job.ids) <= 3
        else:
            assert job.result() == expected
    load = watch.engine.load
    assert (load.running, load.waiting, load.still_s) == (0, 0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_answer_may_join_and_leave_at_each_step_of_another(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=2)
    others: list[Greedy] = []
    long = Greedy([3, 1, 4, 1, 5], 30)

    def invite(job: Greedy) -> None:
        if not others or others[-1].ended.is_set():
            number = len(others)
            others.append(watch.start([number, 9, number], 1 + number % 4))

    long.on_token = invite
    watch.engine.submit(long)
    assert long.result() == watch.expected(long.prompt_ids, 30)
    assert len(others) > 8
    for other in others:
        assert other.result() == watch.expected(other.prompt_ids, other.tokens)
    joined = [call[1] for call in watch.cache.of("step") if len(call[1]) == 2]
    assert joined, "they were never in one batch"


def test_answers_under_way_are_made_in_one_step(watched: Open) -> None:
    watch = watched(rows=4)
    gate = threading.Event()
    watch.cache.before = lambda call: gate.wait(TIMEOUT_S)
    jobs = [watch.start([n, n + 1, n + 2], 10) for n in range(4)]
    gate.set()
    for job in jobs:
        job.result()
    assert [0, 1, 2, 3] in [call[1] for call in watch.cache.of("step")]
    assert len(watch.cache.of("step")) < 4 * 9 / 2


def test_gap_in_the_batch_is_closed_without_a_change_of_the_answers(watched: Open) -> None:
    watch = watched(rows=4)
    gate = threading.Event()
    watch.cache.before = lambda call: gate.wait(TIMEOUT_S)
    jobs = [watch.start([n, 7, n], tokens) for n, tokens in enumerate([20, 3, 3, 20])]
    gate.set()
    for job in jobs:
        assert job.result() == watch.expected(job.prompt_ids, job.tokens)
    assert [call[:3] for call in watch.cache.of("copy")] == [("copy", 3, 1)]
    assert watch.cache.of("step")[-1] == ("step", [0, 1])


@pytest.mark.parametrize("kind", ["padded", "in-turns"])
def test_nothing_is_moved_where_gaps_cost_nothing(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=4)
    gate = threading.Event()
    watch.cache.before = lambda call: gate.wait(TIMEOUT_S)
    jobs = [watch.start([n, 7, n], tokens) for n, tokens in enumerate([20, 3, 3, 20])]
    gate.set()
    for job in jobs:
        assert job.result() == watch.expected(job.prompt_ids, job.tokens)
    assert watch.cache.of("copy") == []


# -- prompts ------------------------------------------------------------------------------------


def test_long_prompt_is_read_in_parts_and_the_others_go_on_in_between(watched: Open) -> None:
    watch = watched(rows=2, prompt_part=8)
    newcomer = Greedy(range(40), 2)
    running = Greedy([1, 2, 3], 20)

    def invite(job: Greedy) -> None:
        if len(job.ids) == 5:
            watch.engine.submit(newcomer)

    running.on_token = invite
    watch.engine.submit(running)
    assert running.result() == watch.expected([1, 2, 3], 20)
    assert newcomer.result() == watch.expected(range(40), 2)
    kinds = [(call[0], call[2]) if call[0] == "extend" else call[0] for call in watch.cache.calls]
    first = kinds.index(("extend", 8))
    assert kinds[first : first + 9] == [("extend", 8), "step"] * 4 + [("extend", 8)]


def test_prompt_is_read_in_few_parts_when_nobody_waits(watched: Open) -> None:
    watch = watched(rows=2, prompt_part=2)
    watch.answer(range(40), 2)
    assert watch.cache.of("extend") == [("extend", 0, 40)]


def test_newcomers_are_read_in_the_order_in_which_they_came(watched: Open) -> None:
    watch = watched(rows=2, prompt_part=4)
    order: list[int] = []
    gate = threading.Event()
    watch.cache.before = lambda call: gate.wait(TIMEOUT_S)
    jobs = []
    for number in range(12):
        job = Greedy([number] * (3 + 5 * (number % 3)), 1 + number % 4)
        job.on_token = lambda job, n=number: order.append(n)  # type: ignore[misc]
        watch.engine.submit(job)
        jobs.append(job)
    gate.set()
    for job in jobs:
        job.result()
    firsts = list(dict.fromkeys(order))
    assert firsts == list(range(12))


@pytest.mark.parametrize("kind", KINDS)
def test_shortest_prompts_and_answers_are_served(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=3)
    for length in (1, 2, 3):
        for tokens in (1, 2):
            prompt = [5, 6, 7][:length]
            assert watch.answer(prompt, tokens) == watch.expected(prompt, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_row_may_be_filled_to_its_capacity(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=3)
    longest = Greedy(range(30), CAPACITY - 30)
    others: list[Greedy] = []
    longest.on_token = lambda job: others.append(watch.start([len(job.ids) % 40], 2))
    watch.engine.submit(longest)
    assert longest.result() == watch.expected(range(30), CAPACITY - 30)
    for other in others:
        assert other.result() == watch.expected(other.prompt_ids, 2)
    # What the full row holds serves another text.
    prompt = [*range(30), *longest.ids[:-1]]
    read = watch.cache.tokens_read
    assert watch.answer(prompt, 1) == longest.ids[-1:]
    assert watch.cache.tokens_read - read == 2


# -- what fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_job_that_fails_ends_alone(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=3)
    gate = threading.Event()
    watch.cache.before = lambda call: gate.wait(TIMEOUT_S)
    jobs = [watch.start([n, n], 12) for n in range(3)]

    def burst(job: Greedy) -> None:
        if len(job.ids) == 4:
            raise FloatingPointError("no number")

    jobs[1].on_token = burst
    gate.set()
    with pytest.raises(FloatingPointError):
        jobs[1].result()
    for job in (jobs[0], jobs[2]):
        assert job.result() == watch.expected(job.prompt_ids, 12)
    assert watch.answer([8], 3) == watch.expected([8], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_that_fails_ends_alone(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=2)
    running = Greedy([1, 2, 3], 20)
    bad = Greedy([1, 10**9, 3], 2)  # there is no such token
    running.on_token = lambda job: len(job.ids) == 3 and watch.engine.submit(bad)
    watch.engine.submit(running)
    assert running.result() == watch.expected([1, 2, 3], 20)
    with pytest.raises(Exception, match="out of"):
        bad.result()
    assert watch.answer([1, 5, 3], 3) == watch.expected([1, 5, 3], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_step_that_fails_ends_its_answers_and_no_others(watched: Open, kind: str) -> None:
    watch = watched(kind, rows=2)
    gate = threading.Event()
    steps = 0

    def burst(call: Any) -> None:
        nonlocal steps
        gate.wait(TIMEOUT_S)
        if call[0] == "step":
            steps += 1
            if steps == 4:
                raise RuntimeError("the device is gone")

    watch.cache.before = burst
    jobs = [watch.start([n, 5, n], 9) for n in range(4)]
    gate.set()
    for job in jobs[:2]:
        with pytest.raises(RuntimeError, match="the device is gone"):
            job.result()
    for job in jobs[2:]:
        assert job.result() == watch.expected(job.prompt_ids, 9)
    # What the failed rows are said to hold is what they hold.
    prompt = [0, 5, 0, *jobs[0].ids, 7, 7]
    assert watch.answer(prompt, 4) == watch.expected(prompt, 4)


@pytest.mark.parametrize("use", ["copy", "cut"])
def test_failure_to_give_a_row_ends_one_answer(watched: Open, use: str) -> None:
    watch = watched(rows=2)
    stem = list(range(30))
    watch.answer(stem, 2)

    def burst(call: Any) -> None:
        if call[0] == use:
            watch.cache.before = lambda call: None
            raise MemoryError("no room")

    watch.cache.before = burst
    prompt = [*stem, 3, 3] if use == "copy" else [9, 9, 9]
    running = watch.start(prompt, 3)
    with pytest.raises(MemoryError):
        running.result()
    assert watch.answer([4, 4], 3) == watch.expected([4, 4], 3)
    assert watch.answer(prompt, 3) == watch.expected(prompt, 3)


def test_error_that_nobody_takes_ends_no_other_answer(watched: Open) -> None:
    watch = watched(rows=2)

    class Deaf(Greedy):
        def take(self, logits: np.ndarray[Any, Any]) -> int | None:
            raise ValueError("it fails")

        def fail(self, error: Exception) -> None:
            raise RuntimeError("and can't be told")

    running = Greedy([1, 2], 12)
    running.on_token = lambda job: len(job.ids) == 3 and watch.engine.submit(Deaf([3], 1))
    watch.engine.submit(running)
    assert running.result() == watch.expected([1, 2], 12)
    watch.wait_until_idle()
