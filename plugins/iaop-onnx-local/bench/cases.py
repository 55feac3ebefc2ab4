"""What is measured: one function for each case, on one model."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import answers
from attrs import frozen
from environments import make_environment
from measuring import Measurer, progress
from process import EngineProcess
from prompts import PromptMaker, Request
from table import Figure, Row, Section

__all__ = ["CASES", "Bench", "Model"]

PROMPT: Final = 128
NEW: Final = 128
TOGETHER: Final = 8
PREFIX: Final = 512
MIXED_REQUESTS: Final = 48
MIXED_LENGTHS: Final = (16, 512)
MIXED_RATE: Final = 4.0
"""Requests per second, several times what any engine here can serve: all are saturated."""

OURS: Final = "onnx-local"
GENAI: Final = "onnxruntime-genai"
LOOP: Final = "session.run loop"
LLAMA: Final = "llama.cpp"
_SCRIPTS: Final = {
    OURS: "onnx_local.py",
    GENAI: "genai.py",
    LOOP: "session_loop.py",
    LLAMA: "llamacpp.py",
}


@frozen(slots=True)
class Model:
    """A model folder, and the GGUF file that it was made from where engines can share that."""

    name: str
    title: str
    folder: Path
    gguf: Path | None = None


@frozen(slots=True)
class Bench:
    """What the cases have in common."""

    model: Model
    prompts: PromptMaker
    measurer: Measurer
    threads: int
    rounds: int
    versions: dict[str, str]
    """Filled in as engines are started."""

    @contextmanager
    def engines(self, *names: str, slots: int = 1, **loop: bool) -> Iterator[list[EngineProcess]]:
        """Starts engines; llama.cpp only where the model has a GGUF file.

        Args:
            names: which.
            slots: how many requests llama.cpp takes at once.
            loop: further settings of the session.run loop.
        """
        common: dict[str, Any] = {"threads": self.threads}
        onnx = {**common, "model": str(self.model.folder), "end_ids": self.prompts.end_ids}
        with ExitStack() as stack:
            started = []
            for name in names:
                if name == LLAMA and self.model.gguf is None:
                    continue
                python, script = Path(sys.executable), _SCRIPTS[name]
                if name in (GENAI, LLAMA):
                    python = make_environment(script.removesuffix(".py"))
                settings = {**onnx, **loop} if name == LOOP else onnx
                if name == LLAMA:
                    settings = {**common, "model": str(self.model.gguf), "slots": slots}
                engine = EngineProcess(name, python, script, **settings)
                stack.callback(engine.close)
                self.versions.update(engine.versions)
                started.append(engine)
            yield started

    def text(self, answer: dict[str, Any]) -> str:
        """The text of an answer, whichever way its engine told it."""
        return answer["text"] if "text" in answer else self.prompts.decode(answer["ids"])

    def title(self, what: str, rounds: int) -> str:
        return f"{self.model.title}: {what}; medians of {rounds} round(s)"

    def lone_requests(self, seed: str) -> list[Request]:
        return [self.prompts.make(seed, PROMPT, NEW)]

    def joint_requests(self, seed: str) -> list[Request]:
        return [self.prompts.make(f"{seed} {n}", PROMPT, NEW) for n in range(TOGETHER)]

    def mixed_requests(self, seed: str) -> list[Request]:
        """A Poisson stream; lengths of prompts and answers are spread evenly."""
        chance, moment, requests = random.Random(seed), 0.0, []
        for number in range(MIXED_REQUESTS):
            tokens, new_tokens = (chance.randint(*MIXED_LENGTHS) for _ in range(2))
            requests.append(
                self.prompts.make(f"{seed} {number}", tokens, new_tokens, arrives_s=moment)
            )
            moment += chance.expovariate(MIXED_RATE)
        return requests


def alone(bench: Bench) -> Section:
    """One request at a time."""
    with bench.engines(OURS, GENAI, LOOP, LLAMA) as engines:
        found = bench.measurer.in_turns(
            f"{bench.model.name}, alone", engines, bench.rounds, bench.lone_requests
        )
    rows = {
        name: Row(
            name,
            {
                "prompt tokens/s": [answers.prompt_rate(one) for (one,) in rounds],
                "decode tokens/s": [answers.alone_decode_rate(one) for (one,) in rounds],
            },
        )
        for name, rounds in found.items()
    }
    figures = []
    for peer, limit in ((GENAI, 1.0), (LLAMA, 0.95), (LOOP, None)):
        if peer in rows:
            figures += _ratios(rows[OURS], rows[peer], at_least=limit)
    run_s = statistics.median(statistics.median(one["run_s"]) for (one,) in found[LOOP])
    step_s = 1 / rows[OURS].median("decode tokens/s")
    figures.append(
        Figure("share of a decode step outside session.run", 1 - run_s / step_s, at_most=0.1)
    )
    ours, theirs = ([bench.text(one) for (one,) in found[name]] for name in (OURS, GENAI))
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return Section(
        bench.title(f"one request, prompt {PROMPT}, answer {NEW} tokens", bench.rounds),
        list(rows.values()),
        figures,
        [f"{same} of {len(ours)} answers of {OURS} and {GENAI} are the same text"],
    )


def together(bench: Bench) -> Section:
    """Eight requests at once."""
    label = f"{bench.model.name}, {TOGETHER} together"
    with bench.engines(OURS, GENAI, LOOP, LLAMA, slots=TOGETHER) as engines:
        ours_alone = bench.measurer.in_turns(
            f"{label}: one alone", engines[:1], bench.rounds, bench.lone_requests
        )[OURS]
        found = bench.measurer.in_turns(label, engines, bench.rounds, bench.joint_requests)
    whole, decode = "whole tokens/s", "decode tokens/s"
    lone = Row(
        f"{OURS}, 1 request",
        {
            whole: [answers.whole_rate(some) for some in ours_alone],
            decode: [answers.alone_decode_rate(one) for (one,) in ours_alone],
        },
    )
    rows = {
        name: Row(
            name,
            {
                whole: [answers.whole_rate(some) for some in rounds],
                decode: [answers.joint_decode_rate(some) for some in rounds],
            },
        )
        for name, rounds in found.items()
    }
    prompt_rate = statistics.median(answers.prompt_rate(one) for (one,) in ours_alone)
    ceiling = rows[OURS].median(decode) / prompt_rate
    return Section(
        bench.title(
            f"{TOGETHER} requests at once, prompts {PROMPT}, answers {NEW} tokens", bench.rounds
        ),
        [lone, *rows.values()],
        [
            *_ratios(rows[OURS], lone, at_least=2.2),
            *_ratios(rows[OURS], rows[GENAI], at_least=1.2),
            *_ratios(rows[OURS], rows[LOOP]),
            *(_ratios(rows[OURS], rows[LLAMA]) if LLAMA in rows else ()),
            Figure(f"decode: {OURS} / its own prompt rate ({prompt_rate:.0f} tokens/s)", ceiling),
        ],
        [
            "whole: answer tokens from sending to the last token, reading the prompts included",
            f"decode: while all {TOGETHER} answers are under way and every prompt is read",
        ],
    )


def mixed(bench: Bench) -> Section:
    """A stream of requests of many lengths."""
    rounds = max(1, bench.rounds // 2)
    with bench.engines(OURS, GENAI) as engines:
        found = bench.measurer.in_turns(
            f"{bench.model.name}, mixed", engines, rounds, bench.mixed_requests
        )
    rows = {
        name: Row(
            name,
            {
                "whole tokens/s": [answers.whole_rate(some) for some in rounds],
                "median wait, s": [
                    statistics.median(answers.first_s(one) for one in some) for some in rounds
                ],
            },
        )
        for name, rounds in found.items()
    }
    low, high = MIXED_LENGTHS
    return Section(
        bench.title(
            f"{MIXED_REQUESTS} requests in a Poisson stream of {MIXED_RATE:g}/s, "
            f"prompts and answers {low} to {high} tokens",
            rounds,
        ),
        list(rows.values()),
        _ratios(rows[OURS], rows[GENAI], columns=["whole tokens/s"], at_least=1.5),
        [
            "whole: answer tokens from the first arrival to the last token; wait: until the first",
            f"{GENAI} takes up to {TOGETHER} that have arrived, and the next when those have ended",
        ],
    )


def newcomer(bench: Bench) -> Section:
    """A request that comes while seven answers are under way."""
    samples: dict[str, list[float]] = {"newcomer, ms": [], "alone, ms": [], "step of 7, ms": []}
    label = f"{bench.model.name}, newcomer"
    with bench.engines(OURS) as (ours,), progress(label, bench.rounds) as advance:
        for number in range(bench.rounds):

            def work(seed: str) -> tuple[float, float, float]:
                prompts = [bench.prompts.make(f"{seed} {n}", PROMPT, 512) for n in range(9)]
                brief = [{**prompt, "new_tokens": 8} for prompt in prompts[:2]]
                (lone,) = ours.call("run", requests=brief[:1])
                joined = ours.call("join", newcomer=brief[1], running=prompts[2:], after=32)
                return (
                    1000 * answers.first_s(joined["newcomer"]),
                    1000 * answers.first_s(lone),
                    1000 * _step_s(joined["running"], joined["sent"]),
                )

            found = bench.measurer.measure(ours, f"{label} {number}", work)
            for column, value in zip(samples, found, strict=True):
                samples[column].append(value)
            advance()
    row = Row(OURS, samples)
    newcomer_ms, alone_ms, step_ms = (row.median(column) for column in samples)
    return Section(
        bench.title(f"first token of a newcomer (prompt {PROMPT}) to 7 answers", bench.rounds),
        [row],
        [
            Figure(
                "newcomer / (3 steps + alone)", newcomer_ms / (3 * step_ms + alone_ms), at_most=1.0
            )
        ],
    )


def prefix(bench: Bench) -> Section:
    """Two requests, one after the other, whose prompts begin the same."""
    tokens = PREFIX + 32
    samples: dict[str, list[float]] = {"first, ms": [], "second, ms": []}
    label = f"{bench.model.name}, prefix"
    with bench.engines(OURS) as (ours,), progress(label, bench.rounds) as advance:
        for number in range(bench.rounds):

            def work(seed: str) -> list[float]:
                pair = bench.prompts.make_pair(seed, PREFIX, tokens, 8)
                replies = [ours.call("run", requests=[request]) for request in pair]
                return [1000 * answers.first_s(one) for (one,) in replies]

            found = bench.measurer.measure(ours, f"{label} {number}", work)
            for column, value in zip(samples, found, strict=True):
                samples[column].append(value)
            advance()
    row = Row(OURS, samples)
    first_ms, second_ms = (row.median(column) for column in samples)
    return Section(
        bench.title(f"first token of prompts of {tokens} tokens that share {PREFIX}", bench.rounds),
        [row],
        [Figure("second / first", second_ms / first_ms, at_most=0.2)],
    )


def profile(bench: Bench) -> Section:
    """Where the time of `session.run` goes in a decoding step, by kind of operator."""
    rows, figures = [], []
    for rows_at_once in (1, TOGETHER):
        with bench.engines(LOOP, profiled=True) as (loop,):

            def work(
                seed: str, loop: EngineProcess = loop, size: int = rows_at_once
            ) -> dict[str, float]:
                loop.call("run", requests=bench.joint_requests(seed)[:size])
                times: dict[str, float] = loop.call("operator_times", last_runs=NEW - 1)
                return times

            times = bench.measurer.measure(loop, f"{bench.model.name}, profile", work, once=True)
        whole_s = times.pop("whole")
        for kind, seconds in sorted(times.items(), key=lambda item: -item[1])[:8]:
            share = {"% of step": [100 * seconds / whole_s]}
            rows.append(Row(f"{kind}, batch of {rows_at_once}", share))
        between = 1 - sum(times.values()) / whole_s
        figures.append(Figure(f"share of no operator, batch of {rows_at_once}", between))
    return Section(
        f"{bench.model.title}: session.run in a decoding step, by operator",
        rows,
        figures,
        ["taken with ONNX Runtime's profiler on, which costs most where operators are short"],
    )


CASES: Final[dict[str, Callable[[Bench], Section]]] = {
    case.__name__: case for case in (alone, together, mixed, newcomer, prefix, profile)
}


def _ratios(
    row: Row, other: Row, *, columns: Sequence[str] = (), at_least: float | None = None
) -> list[Figure]:
    return [
        Figure(
            f"{column.split()[0]}: {row.label} / {other.label}",
            row.median(column) / other.median(column),
            at_least=at_least,
        )
        for column in columns or row.samples
    ]


def _step_s(running: Sequence[Sequence[float]], sent: float) -> float:
    """The median time between two tokens while all were under way, before the newcomer."""
    began = max(pieces[0] for pieces in running)
    return statistics.median(
        later - earlier
        for pieces in running
        for earlier, later in pairwise(pieces)
        if began <= earlier and later < sent
    )
