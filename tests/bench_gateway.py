"""What the gateway's path and its start cost, beside the same work without them.

    python tests/bench_gateway.py [--json]

All in one run, medians of several rounds; the ratios matter, the times are of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from iaop_core import LLMGateway
from iaop_core.echo import EchoBackend

ROUNDS = 7
CALLS = 200
WORDS = "word " * 200


def median_us(function: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of one call, the median over the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        rounds.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(rounds)


def started_ms(*code: str) -> float:
    """Milliseconds of a whole Python process that runs the code."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *code], check=True, stdout=subprocess.DEVNULL)
        rounds.append((time.perf_counter() - started) * 1000)
    return statistics.median(rounds)


def measure() -> dict[str, float]:
    backend = EchoBackend()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "backends": {"echo": {"plugin": "echo"}},
            "audit": {"url": f"sqlite:///{Path(folder) / 'audit.db'}"},
        }
        with LLMGateway.from_values(values) as gateway:
            figures["backend.infer, us"] = median_us(lambda: backend.infer("hello"))
            figures["gateway.ask, us"] = median_us(lambda: gateway.ask("hello"))

            async def aask(parallel: int) -> None:
                for _ in range(CALLS // parallel):
                    await asyncio.gather(*(gateway.aask("hello") for _ in range(parallel)))

            for parallel in (1, 32):
                figures[f"gateway.aask, {parallel} at a time, us"] = (
                    median_us(lambda parallel=parallel: asyncio.run(aask(parallel)), 1) / CALLS
                )
            figures["backend.stream, us per delta"] = (
                median_us(lambda: list(backend.stream(WORDS)), 10) / 200
            )
            figures["gateway.stream, us per delta"] = (
                median_us(lambda: list(gateway.stream(WORDS)), 10) / 200
            )
    figures["python, ms"] = started_ms("-c", "pass")
    figures["import iaop_core, ms"] = started_ms("-c", "import iaop_core")
    figures["iaop backends, ms"] = started_ms("-m", "iaop_core.cli", "backends")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    figures = measure()
    if parser.parse_args().json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:40} {value:10.1f}")
