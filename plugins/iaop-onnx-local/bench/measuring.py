"""Takes measurements: one engine at a time, on a machine that does nothing else, in turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from attrs import define, field
from machine import CpuTime, process_cpu_s, wait_until_idle
from process import EngineProcess
from prompts import Request

__all__ = ["DISTURBED", "Measurer", "progress"]

_T = TypeVar("_T")

DISTURBED = 0.05
"""A measurement counts as disturbed when others had more of the machine than this."""
_TRIES = 3


@define
class Measurer:
    """Takes measurements and keeps account of what disturbed them."""

    warm_up: Request
    """A short request that wakes an engine up before it is measured."""
    patience_s: float
    """How long to wait for the machine to be idle; with 0 nothing is measured a second time."""
    measured: int = field(default=0, init=False)
    disturbed: list[str] = field(factory=list, init=False)
    """What was measured in spite of others."""

    def measure(
        self, engine: EngineProcess, seed: str, work: Callable[[str], _T], *, once: bool = False
    ) -> _T:
        """Measures the work of one engine while the others stand still.

        A disturbed measurement is taken again, three times in all at most, each time with prompts
        of its own (`work` gets a seed for them), and the least disturbed one counts. With `once` it
        is not taken again.
        """
        tries = _TRIES if self.patience_s and not once else 1
        found: list[tuple[float, _T]] = []
        while len(found) < tries and (not found or found[-1][0] > DISTURBED):
            wait_until_idle(DISTURBED, patience_s=self.patience_s)
            engine.resume()
            try:
                engine.call("run", requests=[self.warm_up])
                before, own_s = CpuTime.now(), self._own_s(engine)
                result = work(f"{seed} {len(found)}")
                others = CpuTime.now().busy_share_since(before, own_s=self._own_s(engine) - own_s)
            finally:
                engine.pause()
            found.append((others, result))
        others, result = min(found, key=lambda pair: pair[0])
        self.measured += 1
        if others > DISTURBED:
            self.disturbed.append(f"{engine.name}, {seed}: {others:.0%}")
        return result

    def in_turns(
        self,
        label: str,
        engines: Sequence[EngineProcess],
        rounds: int,
        make: Callable[[str], list[Request]],
    ) -> dict[str, list[list[Any]]]:
        """Has each engine answer the requests of each round, all engines in each round.

        Returns:
            For each engine the answers of each round.
        """
        found: dict[str, list[list[Any]]] = {engine.name: [] for engine in engines}
        with progress(label, rounds * len(engines)) as advance:
            for number in range(rounds):
                for engine in engines:

                    def work(seed: str, engine: EngineProcess = engine) -> list[Any]:
                        requests = make(seed)
                        answers: list[Any] = engine.call("run", requests=requests)
                        _check(engine, requests, answers)
                        return answers

                    found[engine.name].append(self.measure(engine, f"{label} {number}", work))
                    advance()
        return found

    @staticmethod
    def _own_s(engine: EngineProcess) -> float:
        return engine.cpu_s + process_cpu_s(os.getpid())


@contextmanager
def progress(label: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, or a line where that is no terminal."""
    if not sys.stderr.isatty():
        print(f"{label} …", file=sys.stderr, flush=True)
        yield lambda: None
        return
    with click.progressbar(length=steps, label=f"{label:44}", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


def _check(engine: EngineProcess, requests: list[Request], answers: list[Any]) -> None:
    """An engine that did other work than was asked has no figures."""
    for request, answer in zip(requests, answers, strict=True):
        asked = (len(request["ids"]), request["new_tokens"])
        done = (answer["prompt_tokens"], answer["count"])
        if asked != done:
            raise RuntimeError(
                f"{engine.name} read {done[0]} prompt tokens and made {done[1]}, "
                f"where {asked[0]} and {asked[1]} were asked for"
            )
