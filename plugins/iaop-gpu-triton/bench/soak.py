"""Asks a gateway all the time while its Triton is killed, reloads its model, and is left alone.

Workers ask plainly and streamed, over gRPC and over HTTP, and leave streams half read. Every few
seconds the server is killed and started again, or its model is reloaded or unloaded for a moment.
At the end no text may have been wrong, no call may have hung, each slot must be free and the next
call must work. Prints JSON; ends with 1 when anything of that fails.

    python soak.py [--seconds 600] [--workers 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import resource
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

from iaop_core import LLMGateway
from iaop_core.errors import IaopError, ServiceError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from scripted import script
from triton_server import TritonServer

CALL_TIMEOUT_S = 30.0  # longer than any time limit of the values: a call that takes it hangs
PROTOCOLS = ("grpc", "http")


class Soak:
    """The workers, the trouble, and what came of it."""

    def __init__(self, gateway: LLMGateway, server: TritonServer, seconds: float) -> None:
        self._gateway = gateway
        self._server = server
        self._until = time.monotonic() + seconds
        self.outcomes: Counter[str] = Counter()
        self.trouble: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.hung = 0

    async def run(self, workers: int) -> None:
        await asyncio.gather(self._trouble(), *(self._work(number) for number in range(workers)))

    async def _work(self, number: int) -> None:
        draw = random.Random(number)
        turn = 0
        while time.monotonic() < self._until:
            turn += 1
            tokens = [f"{number}-{turn}-{i} " for i in range(draw.randint(1, 30))]
            prompt = script(tokens=tokens, delay_s=draw.choice((0, 0.01, 0.05)))
            kind = draw.choice(("plain", "streamed", "left"))
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._ask(kind, draw.choice(PROTOCOLS), prompt, tokens, draw)
            except TimeoutError as error:
                if isinstance(error, IaopError):
                    self.outcomes[error.kind] += 1
                else:
                    self.hung += 1
            except ServiceError as error:
                self.outcomes[error.kind] += 1
                await asyncio.sleep(0.2)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def _ask(
        self, kind: str, route: str, prompt: str, tokens: list[str], draw: random.Random
    ) -> None:
        if kind == "plain":
            text = (await self._gateway.aask(prompt, route=route)).text
        else:
            leave_after = draw.randint(0, len(tokens)) if kind == "left" else len(tokens) + 1
            got: list[str] = []
            async with aclosing(self._gateway.astream(prompt, route=route)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if chunk.result is None:
                        got.append(chunk.delta)
                    if len(got) > leave_after:
                        break
            text = "".join(got)
        whole = "".join(tokens)
        if text != whole and not (kind == "left" and whole.startswith(text)):
            self.wrong.append(f"{kind} over {route}: {text!r} is not {whole!r}")
        self.outcomes[kind] += 1

    async def _trouble(self) -> None:
        draw = random.Random(1)
        while time.monotonic() < self._until - 5:
            await asyncio.sleep(draw.uniform(1, 4))
            kind = draw.choice(("kill", "reload", "reload", "unload"))
            await asyncio.to_thread(getattr(self, f"_{kind}"))
            self.trouble[kind] += 1

    def _kill(self) -> None:
        self._server.kill()
        time.sleep(0.5)
        self._server.start()

    def _reload(self) -> None:
        self._repository("load")

    def _unload(self) -> None:
        self._repository("unload")
        time.sleep(0.3)
        self._repository("load")

    def _repository(self, action: str) -> None:
        address = f"{self._server.http_url}/v2/repository/models/echo/{action}"
        urllib.request.urlopen(address, data=b"{}", timeout=30).close()


def values_of(server: TritonServer, folder: str, workers: int) -> dict[str, Any]:
    urls = {"grpc": server.grpc_url, "http": server.http_url}
    return {
        "gateway": {"route": "grpc", "timeout_ms": 20_000},
        "backends": {
            name: {
                "plugin": "gpu-triton",
                "model": "echo",
                "settings": {"server_url": url, "timeout_ms": 5000, "max_concurrency": workers},
            }
            for name, url in urls.items()
        },
        "routes": {name: {"targets": [{"backend": name}]} for name in urls},
        "audit": {"url": f"sqlite:///{folder}/audit.db"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=16)
    options = parser.parse_args()
    logging.getLogger("iaop_core").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer("echo") as server,
        LLMGateway.from_values(values_of(server, folder, options.workers)) as gateway,
    ):
        soak = Soak(gateway, server, options.seconds)
        asyncio.run(soak.run(options.workers))
        time.sleep(1)  # what was left just now is still being cancelled
        backends = {name: gateway._site.backends[name] for name in PROTOCOLS}
        taken = {name: backend.slots.in_use for name, backend in backends.items()}
        facts = {name: health.facts for name, health in gateway.health().backends.items()}
        in_flight = {name: fact.get("in_flight") for name, fact in facts.items()}
        last = [gateway.ask("the end", route=name).text for name in PROTOCOLS]
    report = {
        "seconds": options.seconds,
        "outcomes": dict(soak.outcomes),
        "trouble": dict(soak.trouble),
        "wrong": soak.wrong[:10],
        "hung": soak.hung,
        "slots_taken": taken,
        "in_flight": in_flight,
        "last_calls_work": last == ["the end"] * 2,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(report, indent=2))
    failed = soak.wrong or soak.hung or any(taken.values()) or any(in_flight.values())
    return int(bool(failed) or not report["last_calls_work"])


if __name__ == "__main__":
    sys.exit(main())
