"""What the backend costs against tritonclient itself, on the same models of one real Triton.

Rounds of the two alternate, and each figure is the median of the rounds' ratios, so that what else
the machine does meanwhile strikes both alike. Prints JSON: for each figure its median and its
quartiles over the rounds, and the medians of both sides. Takes two minutes.

    python bench_triton.py [--rounds 25] [--check]

With ``--check`` it ends with 1 when a figure misses its target: 0.9 of the requests and of the
tokens per second, and 0.3 ms of added median latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import aio as raw  # type: ignore[import-untyped]

from iaop_gpu_triton import GpuTritonBackend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from triton_server import TritonServer

CONCURRENT = 16
REQUESTS = 800  # of a round of plain answers
TOKENS = 200  # of each stream
LATENCIES = 200
PROMPT = "How does a press brake bend a sheet of steel?"
STREAM_PROMPT = "word " * TOKENS
SAMPLING = json.dumps({"max_tokens": 256})
TARGETS = {"requests_ratio": 0.9, "tokens_ratio": 0.9, "added_latency_ms": 0.3}


def inputs_of(prompt: str, *, stream: bool) -> list[Any]:
    """The tensors that the backend sends too."""
    texts = {"text_input": prompt, "sampling_parameters": SAMPLING}
    flags = {
        "stream": stream,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    inputs = []
    for name, text in texts.items():
        tensor = raw.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
        inputs.append(tensor)
    for name, flag in flags.items():
        tensor = raw.InferInput(name, [1], "BOOL")
        tensor.set_data_from_numpy(np.array([flag]))
        inputs.append(tensor)
    return inputs


class Raw:
    """tritonclient's asyncio client, used as its examples do."""

    def __init__(self, url: str) -> None:
        self._client = raw.InferenceServerClient(url)

    async def ask(self) -> str:
        result = await self._client.infer("echo-plain", inputs_of(PROMPT, stream=False))
        text: str = result.as_numpy("text_output")[0].decode()
        return text

    async def count(self) -> int:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "echo", "inputs": inputs_of(STREAM_PROMPT, stream=True)}

        texts = []
        async for result, error in self._client.stream_infer(requests()):
            if error is not None:
                raise error
            texts.append(result.as_numpy("text_output")[0].decode())
        assert "".join(texts) == STREAM_PROMPT
        return len(texts)

    async def close(self) -> None:
        await self._client.close()


class Ours:
    """The backend, called from an event loop that is not its own, as an application does."""

    def __init__(self, url: str) -> None:
        self._plain = GpuTritonBackend(url, "echo-plain")
        self._streaming = GpuTritonBackend(url, "echo")
        self._plain.load_model()
        self._streaming.load_model()

    async def ask(self) -> str:
        return (await self._plain.ainfer(PROMPT)).text

    async def count(self) -> int:
        chunks = self._streaming.astream(STREAM_PROMPT)
        texts = [chunk.delta async for chunk in chunks if chunk.result is None]
        assert "".join(texts) == STREAM_PROMPT
        return len(texts)

    async def close(self) -> None:
        self._plain.close()
        self._streaming.close()


async def requests_per_s(ask: Callable[[], Awaitable[object]]) -> float:
    left = REQUESTS

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONCURRENT)))
    return REQUESTS / (time.perf_counter() - started)


async def tokens_per_s(count: Callable[[], Awaitable[int]]) -> float:
    started = time.perf_counter()
    counts = await asyncio.gather(*(count() for _ in range(CONCURRENT)))
    return sum(counts) / (time.perf_counter() - started)


async def latency_ms(ask: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(LATENCIES):
        started = time.perf_counter()
        await ask()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


async def measure(url: str, rounds: int) -> dict[str, Any]:
    sides = {"raw": Raw(url), "ours": Ours(url)}
    found: dict[str, dict[str, list[float]]] = {
        kind: {"raw": [], "ours": []} for kind in ("requests", "tokens", "latency")
    }
    try:
        for number in range(rounds + 1):
            for name in ("raw", "ours") if number % 2 else ("ours", "raw"):
                side: Any = sides[name]
                figures = {
                    "requests": await requests_per_s(side.ask),
                    "tokens": await tokens_per_s(side.count),
                    "latency": await latency_ms(side.ask),
                }
                if number:  # the first round warms up
                    for kind, figure in figures.items():
                        found[kind][name].append(figure)
    finally:
        for each in sides.values():
            await each.close()  # type: ignore[attr-defined]

    def over_rounds(kind: str, compared: Callable[[float, float], float]) -> dict[str, float]:
        each = map(compared, found[kind]["ours"], found[kind]["raw"])
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}

    return {
        "requests_ratio": over_rounds("requests", lambda ours, raw: ours / raw),
        "tokens_ratio": over_rounds("tokens", lambda ours, raw: ours / raw),
        "added_latency_ms": over_rounds("latency", lambda ours, raw: ours - raw),
        "medians": {
            kind: {name: round(statistics.median(figures), 3) for name, figures in names.items()}
            for kind, names in found.items()
        },
        "rounds": rounds,
        "concurrent": CONCURRENT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="two or more (25)")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    options = parser.parse_args()
    with TritonServer("echo", "echo-plain") as server:
        figures = asyncio.run(measure(server.grpc_url, options.rounds))
    print(json.dumps(figures, indent=2))
    medians = {name: figures[name]["median"] for name in TARGETS}
    missed = medians["added_latency_ms"] > TARGETS["added_latency_ms"] or any(
        medians[name] < TARGETS[name] for name in ("requests_ratio", "tokens_ratio")
    )
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
