"""Several servers of one model, health with progress, and many streams at once."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scripted import script
from tcp_proxy import TcpProxy
from triton_server import TritonServer, free_port

from iaop_core.errors import BackendUnavailableError, ModelLoadError, ServiceError
from iaop_gpu_triton import GpuTritonBackend

Make = Callable[..., GpuTritonBackend]


@pytest.fixture(scope="module")
def second() -> Iterator[TritonServer]:
    """Another server with the model."""
    with TritonServer("echo") as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def addresses(
    request: pytest.FixtureRequest, triton: TritonServer, second: TritonServer
) -> tuple[str, str]:
    if request.param == "grpc":
        return triton.grpc_url, second.grpc_url
    return triton.http_url, second.http_url


@pytest.fixture
def short_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was dead is tried again soon."""
    monkeypatch.setattr("iaop_gpu_triton.replica._SKIP_S", 0.3)


def pair(addresses: tuple[str, str], **settings: Any) -> GpuTritonBackend:
    first, *others = addresses
    return GpuTritonBackend(first, "echo", replica_urls=others, **{"timeout_ms": 3000, **settings})


def served(backend: GpuTritonBackend) -> list[int]:
    """Inferences that each server tells of."""
    servers = backend.health_check().facts["servers"]
    return [sum(s["inferences"] for s in server["statistics"]) for server in servers]


# -- several servers ---------------------------------------------------------------------------


def test_calls_go_to_the_server_with_the_fewest(addresses: tuple[str, str]) -> None:
    with closing(pair(addresses)) as backend:
        backend.load_model()
        before = served(backend)
        prompt = script(tokens=["a"], first_delay_s=0.3)
        threads = [threading.Thread(target=backend.infer, args=(prompt,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [after - b for after, b in zip(served(backend), before, strict=True)] == [4, 4]
        assert "servers_ready=2/2" in backend.health_check().detail


@pytest.mark.usefixtures("short_skip")
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_dead_server_is_skipped_and_used_again_when_it_is_back(
    triton: TritonServer, protocol: str
) -> None:
    with TritonServer("echo") as server:
        urls = (
            (server.grpc_url, triton.grpc_url)
            if protocol == "grpc"
            else (server.http_url, triton.http_url)
        )
        with closing(pair(urls)) as backend:
            backend.load_model()
            server.kill()
            for number in range(20):
                assert backend.infer(f"call {number}").text == f"call {number}"
            health = backend.health_check()
            assert health.healthy
            assert "servers_ready=1/2" in health.detail
            server.start()
            until = time.monotonic() + 10
            while not served(backend)[0] and time.monotonic() < until:
                backend.infer("again")
                time.sleep(0.05)
            assert served(backend)[0]


@pytest.mark.usefixtures("short_skip")
def test_server_that_is_down_at_load_gets_the_model_when_it_is_up(triton: TritonServer) -> None:
    server = TritonServer("echo", preload=(), grpc_port=free_port())
    with closing(pair((triton.grpc_url, server.grpc_url))) as backend:
        backend.load_model()
        assert backend.infer("one").text == "one"
        with server:
            until = time.monotonic() + 15
            while "servers_ready=2/2" not in backend.health_check().detail:
                assert backend.infer("more").text == "more"
                assert time.monotonic() < until, backend.health_check()
                time.sleep(0.1)


def test_silent_server_costs_one_call_its_time_and_then_is_skipped(triton: TritonServer) -> None:
    with TcpProxy(triton.grpc_port) as proxy:
        with closing(pair((proxy.address, triton.grpc_url), timeout_ms=500)) as backend:
            backend.load_model()
            proxy.mode = "silent"
            failures = 0
            for _ in range(10):
                try:
                    backend.infer("a")
                except ServiceError:
                    failures += 1
            assert failures <= 1


def test_server_that_answers_slowly_leaves_the_others_healthy(triton: TritonServer) -> None:
    with TcpProxy(triton.grpc_port) as proxy:
        with closing(pair((proxy.address, triton.grpc_url), timeout_ms=1000)) as backend:
            backend.load_model()
            proxy.delay_s = 0.4  # each question is answered in time, and all three are not
            health = backend.health_check()
            assert health.healthy, health
            assert "servers_ready=1/2" in health.detail or "servers_ready=2/2" in health.detail
            slow, other = health.facts["servers"]
            assert "within 1000 ms" in slow["error"]
            assert slow["live"]
            assert other["model_ready"]


def test_load_fails_when_no_server_has_the_model(addresses: tuple[str, str]) -> None:
    with closing(pair(addresses)) as backend:
        with pytest.raises(ModelLoadError, match="no-such-model"):
            backend.load_model("no-such-model")


# -- health ------------------------------------------------------------------------------------


def test_health_is_the_same_over_both_protocols(triton: TritonServer) -> None:
    def details(url: str) -> list[tuple[bool, str]]:
        told = []
        with closing(GpuTritonBackend(url, "echo", timeout_ms=2000)) as backend:
            told.append(backend.health_check())  # not loaded
            backend.load_model()
            told.append(backend.health_check())
            with pytest.raises(ModelLoadError):
                backend.load_model("unknown")
            told.append(backend.health_check())
            for _ in range(3):
                with pytest.raises(BackendUnavailableError):
                    backend.infer(script(fail_after=0, error_text="CUDA error"))
            told.append(backend.health_check())
            assert backend.infer("well again").text == "well again"
            told.append(backend.health_check())
        return [(health.healthy, health.detail) for health in told]

    good = "server_live=True, model_ready=True, loaded=True"
    expected = [
        (False, "server_live=True, model_ready=False, loaded=False"),
        (True, good),
        (True, good),
        (False, f"{good}, progressing=False"),
        (True, good),
    ]
    assert details(triton.grpc_url) == details(triton.http_url) == expected


def test_backend_that_failed_is_worth_another_try_after_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make("echo")
    backend.load_model()
    for _ in range(3):
        with pytest.raises(BackendUnavailableError):
            backend.infer(script(fail_after=0))
    assert not backend.health_check().healthy
    monkeypatch.setattr("iaop_gpu_triton.progress._REMEMBERED_S", 0.0)
    assert backend.health_check().healthy


def test_callers_mistakes_are_no_failures(make: Make) -> None:
    backend = make("echo")
    backend.load_model()
    for _ in range(4):
        with pytest.raises(ValueError, match="prompt"):
            backend.infer(None)  # type: ignore[arg-type]
    assert backend.health_check().healthy


def test_health_facts_tell_of_calls_and_of_tritons_statistics(make: Make) -> None:
    backend = make("echo-plain")
    backend.load_model()
    assert backend.health_check().facts["last_success"] is None
    stream: Any = iter(make_open_stream(make))
    backend.infer("a")
    with pytest.raises(BackendUnavailableError):
        backend.infer(script(fail_after=0))
    facts = backend.health_check().facts
    assert facts["last_success"] < facts["last_failure"]
    assert facts["last_failure_kind"] == "backend_unavailable"
    assert (facts["in_flight"], facts["failures_in_a_row"]) == (0, 1)
    (server,) = facts["servers"]
    (statistics,) = server["statistics"]
    assert statistics["version"] == "1"
    assert statistics["success"]["count"] >= 1
    assert statistics["compute_infer"]["ms"] > 0
    assert statistics["queue"]["ms"] >= 0
    json.dumps(facts)
    stream.close()


def make_open_stream(make: Make) -> Any:
    """A stream under way, which its backend's facts count."""
    backend = make("echo")
    backend.load_model()
    stream: Any = backend.stream(script(tokens=["a", "b"], delay_s=5))
    next(stream)
    facts = backend.health_check().facts
    assert facts["in_flight"] == facts["servers"][0]["in_flight"] == 1
    return stream


def test_command_shows_tritons_statistics(triton: TritonServer, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        f"backends: {{gpu: {{plugin: gpu-triton, model: echo, "
        f'settings: {{server_url: "{triton.grpc_url}"}}}}}}\n'
        f'audit: {{url: "sqlite:///{tmp_path}/audit.db"}}\n'
    )
    command = [sys.executable, "-m", "iaop_core.cli", "health", "--values", str(values), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (backend,) = json.loads(done.stdout)["backends"]
    assert backend["facts"]["servers"][0]["statistics"][0]["inferences"] >= 0


# -- many streams ------------------------------------------------------------------------------


def test_64_streams_of_200_tokens_lose_and_mix_nothing_in_flat_memory(
    triton: TritonServer,
) -> None:
    count = 64

    async def read(backend: GpuTritonBackend, number: int, tokens: int) -> bool:
        sent = [f"{number}:{i} " for i in range(tokens)]
        prompt = script(tokens=sent, delay_s=0.001)
        got = [c.delta async for c in backend.astream(prompt) if c.result is None]
        return got == sent

    async def all_of_them(backend: GpuTritonBackend, tokens: int) -> bool:
        reads = (read(backend, number, tokens) for number in range(count))
        return all(await asyncio.gather(*reads))

    with closing(GpuTritonBackend(triton.grpc_url, "echo", max_concurrency=count)) as backend:
        backend.load_model()
        threads = threading.active_count()
        assert asyncio.run(all_of_them(backend, 20))
        assert threading.active_count() <= threads + 2, "no thread for each stream"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert asyncio.run(all_of_them(backend, 200))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 20_000  # KiB
