"""Jobs wait in order, leave when they are cancelled, and end with the engine; no slot is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_decoders import VOCABULARY
from watched_engine import TIMEOUT_S, Greedy, WatchedEngine

from iaop_onnx_local.engine import EngineClosedError, EngineFullError

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


# -- queue and slots ----------------------------------------------------------------------------


def test_as_many_wait_as_may_and_one_more_is_refused(watched: Open) -> None:
    watch = watched(rows=2, max_waiting=3)
    gate = threading.Event()
    watch.cache.before = lambda call: gate.wait(TIMEOUT_S)
    jobs = [Greedy([n], 4) for n in range(6)]
    cancels = [watch.engine.submit(job) for job in jobs[:5]]
    with pytest.raises(EngineFullError):
        watch.engine.submit(jobs[5])
    cancels[4]()  # one that waits goes, and one more may come
    cancels[4]()
    watch.engine.submit(jobs[5])
    with pytest.raises(EngineFullError):
        watch.engine.submit(Greedy([1], 1))
    cancels[0]()  # one that runs goes
    last = watch.start([30], 2)
    gate.set()
    for job in (*jobs[1:4], jobs[5], last):
        assert job.result() == watch.expected(job.prompt_ids, job.tokens)
    watch.wait_until_idle()
    assert not jobs[0].ended.is_set()
    assert jobs[4].ids == []


def test_cancelled_answer_frees_its_row_within_a_step(watched: Open) -> None:
    watch = watched(rows=1)
    long, next_one = Greedy([1, 2], 60), Greedy([3, 4], 2)
    cancel = None

    def leave(job: Greedy) -> None:
        if len(job.ids) == 5:
            watch.engine.submit(next_one)
            assert cancel is not None
            cancel()

    long.on_token = leave
    with_gate = threading.Event()
    watch.cache.before = lambda call: with_gate.wait(TIMEOUT_S)
    cancel = watch.engine.submit(long)
    with_gate.set()
    assert next_one.result() == watch.expected([3, 4], 2)
    assert len(long.ids) == 5
    assert not long.ended.is_set()


def test_cancelled_prompt_is_read_no_further(watched: Open) -> None:
    watch = watched(rows=2, prompt_part=4)
    running, newcomer = Greedy([1, 2], 30), Greedy(range(40), 2)
    cancels: list[Callable[[], None]] = []

    def act(job: Greedy) -> None:
        if len(job.ids) == 2:
            cancels.append(watch.engine.submit(newcomer))
        if len(job.ids) == 5:
            cancels[0]()

    running.on_token = act
    watch.engine.submit(running)
    running.result()
    assert newcomer.ids == []
    assert watch.cache.tokens_read <= 2 + 4 * 4
    assert watch.answer(range(40), 3) == watch.expected(range(40), 3)


def test_slots_are_right_after_any_mix_of_ends(watched: Open) -> None:
    watch = watched(rows=3, max_waiting=4)
    chance = random.Random(5)
    refused = 0

    def burst(job: Greedy) -> None:
        raise ValueError("this one fails")

    for _ in range(60):
        jobs = []
        for _ in range(9):
            job = Greedy(chance.choices(range(VOCABULARY), k=chance.randint(1, 20)), 6)
            end = chance.choice(["ends", "fails", "cancelled"])
            if end == "fails":
                job.on_token = burst
            try:
                cancel = watch.engine.submit(job)
            except EngineFullError:
                refused += 1
                continue
            if end == "cancelled":
                cancel()
            else:
                jobs.append((job, end))
        for job, end in jobs:
            if end == "fails":
                with pytest.raises(ValueError, match="this one fails"):
                    job.result()
            else:
                assert job.result() == watch.expected(job.prompt_ids, 6)
        watch.wait_until_idle()
    assert refused


# -- the end ------------------------------------------------------------------------------------


def test_closing_ends_all_with_an_error_and_the_thread(watched: Open) -> None:
    watch = watched(rows=2)
    reached = threading.Event()
    jobs = [watch.start([n], 60) for n in range(4)]
    jobs[1].on_token = lambda job: reached.set()
    assert reached.wait(TIMEOUT_S)
    watch.engine.close()
    watch.engine.close()
    assert "watched" not in [thread.name for thread in threading.enumerate()]
    for job in jobs[1:]:
        with pytest.raises(EngineClosedError):
            job.result()
    with pytest.raises(EngineClosedError):
        watch.engine.submit(Greedy([1], 1))
    load = watch.engine.load
    assert (load.running, load.waiting) == (0, 0)


def test_closing_may_let_all_end_that_have_come(watched: Open) -> None:
    watch = watched(rows=2)
    jobs = [watch.start([n], 20) for n in range(6)]
    watch.engine.close(finish=True)
    with pytest.raises(EngineClosedError):
        watch.engine.submit(Greedy([1], 1))
    for job in jobs:
        assert job.result() == watch.expected(job.prompt_ids, 20)
    watch.engine.close()


def test_closing_stops_a_prompt_that_is_being_read(watched: Open) -> None:
    watch = watched(rows=2, prompt_part=2)
    begun = threading.Event()
    running = Greedy([1], 60)
    running.on_token = lambda job: (
        len(job.ids) == 2
        and (
            watch.engine.submit(newcomer),
            begun.set(),
        )
    )
    newcomer = Greedy(range(50), 2)
    watch.engine.submit(running)
    assert begun.wait(TIMEOUT_S)
    watch.engine.close()
    for job in (running, newcomer):
        with pytest.raises(EngineClosedError):
            job.result()


def test_engine_may_be_closed_from_its_own_thread(watched: Open) -> None:
    watch = watched(rows=2)
    job = Greedy([1], 60)
    job.on_token = lambda job: len(job.ids) == 3 and watch.engine.close()
    other = watch.start([2], 60)
    watch.engine.submit(job)
    for each in (job, other):
        with pytest.raises(EngineClosedError):
            each.result()


def test_jobs_may_come_and_go_from_many_threads(watched: Open) -> None:
    watch = watched(rows=3, max_waiting=5)
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            job = Greedy(chance.choices(range(VOCABULARY), k=chance.randint(1, 9)), 5)
            try:
                cancel = watch.engine.submit(job)
            except EngineFullError:
                continue
            if chance.random() < 0.4:
                cancel()
            elif job.result() != watch.expected(job.prompt_ids, 5):
                wrong.append(job)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    watch.wait_until_idle()
