"""Loading, replacing and unloading models of a real server, and its health."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from triton_server import TritonServer

from iaop_core.errors import (
    BackendUnavailableError,
    ModelLoadError,
    ModelNotLoadedError,
)
from iaop_gpu_triton import GpuTritonBackend

Make = Callable[..., GpuTritonBackend]


@pytest.fixture(scope="module")
def bare() -> Iterator[TritonServer]:
    """A server with nothing loaded, whose clients may load."""
    with TritonServer("echo", "echo-plain", "echo-minimal", preload=()) as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def bare_backend(request: pytest.FixtureRequest, bare: TritonServer) -> Iterator[GpuTritonBackend]:
    url = bare.grpc_url if request.param == "grpc" else bare.http_url
    with closing(GpuTritonBackend(url, "echo", timeout_ms=5000)) as backend:
        yield backend


def ready_models(server: TritonServer) -> set[str]:
    request = urllib.request.Request(f"{server.http_url}/v2/repository/index", method="POST")
    with urllib.request.urlopen(request, data=b"", timeout=5) as answer:
        return {m["name"] for m in json.load(answer) if m.get("state") == "READY"}


def test_model_that_is_not_ready_is_loaded_and_unloaded_again(
    bare: TritonServer, bare_backend: GpuTritonBackend
) -> None:
    bare_backend.load_model()
    assert ready_models(bare) == {"echo"}
    assert bare_backend.infer("loaded").text == "loaded"
    bare_backend.unload()
    assert ready_models(bare) == set()
    with pytest.raises(ModelNotLoadedError, match="gpu-triton"):
        bare_backend.infer("a")


def test_other_model_replaces_the_first(bare: TritonServer, bare_backend: GpuTritonBackend) -> None:
    bare_backend.load_model()
    bare_backend.load_model("echo-plain")
    assert ready_models(bare) == {"echo-plain"}
    assert bare_backend.infer("a").model_id == "echo-plain"


def test_model_that_cannot_be_loaded_leaves_the_loaded_one(
    bare: TritonServer, bare_backend: GpuTritonBackend
) -> None:
    bare_backend.load_model()
    with pytest.raises(ModelLoadError, match=r"no-such-model.*repository has: echo,"):
        bare_backend.load_model("no-such-model")
    assert ready_models(bare) == {"echo"}
    assert bare_backend.infer("still").text == "still"


def test_loading_again_repairs_a_model_that_the_server_has_lost(
    bare: TritonServer, bare_backend: GpuTritonBackend
) -> None:
    bare_backend.load_model()
    unload = f"{bare.http_url}/v2/repository/models/echo/unload"
    urllib.request.urlopen(unload, data=b"{}", timeout=5).close()
    assert not bare_backend.health_check().healthy
    bare_backend.load_model()
    assert bare_backend.infer("again").text == "again"


def test_model_that_was_ready_is_left_on_the_server(triton: TritonServer, make: Make) -> None:
    backend = make("echo")
    backend.load_model()
    backend.load_model("echo-plain")
    backend.unload()
    assert {"echo", "echo-plain"} <= ready_models(triton)


def test_model_that_fails_to_load_says_why(make: Make) -> None:
    with pytest.raises(ModelLoadError, match="the engine file is missing") as caught:
        make("broken").load_model()
    assert caught.value.model == "broken"
    assert caught.value.backend == "gpu-triton"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("other-contract", r"no known kind.*LANGUAGE \(INT32\).*REPLY \(BYTES\)"),
        ("raw-engine", r"raw engine.*in front.*input_ids \(INT32\)"),
    ],
)
def test_model_of_another_contract_is_refused_and_unloaded(
    triton: TritonServer, make: Make, model: str, reason: str
) -> None:
    backend = make(model)
    with pytest.raises(ModelLoadError, match=reason):
        backend.load_model()
    assert model not in ready_models(triton)
    assert not backend.health_check().healthy


# -- health --------------------------------------------------------------------------------------


def test_health_tells_server_model_and_load(make: Make) -> None:
    backend = make("echo")
    before = backend.health_check()
    assert not before.healthy
    assert before.detail == "server_live=True, model_ready=False, loaded=False"
    backend.load_model()
    health = backend.health_check()
    assert health.healthy
    assert health.detail == "server_live=True, model_ready=True, loaded=True"
    backend.unload()
    assert "loaded=False" in backend.health_check().detail


def test_health_is_about_the_model_that_is_loaded(make: Make) -> None:
    backend = make("no-such-model")
    backend.load_model("echo")
    assert backend.health_check().healthy


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_server_that_is_down_is_unavailable_and_unhealthy(protocol: str) -> None:
    with GpuTritonBackend(f"{protocol}://127.0.0.1:9", timeout_ms=3000) as backend:
        health = backend.health_check()
        assert not health.healthy
        assert health.detail.startswith("probe_error: the Triton server at 127.0.0.1:9 can't be")
        with pytest.raises(BackendUnavailableError, match=r"127\.0\.0\.1:9") as caught:
            backend.load_model()
        assert caught.value.may_fail_over


@pytest.mark.parametrize("scheme", ["grpc", "grpcs", "http", "https"])
@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
def test_address_of_another_protocol_is_told_and_nothing_has_run(
    triton: TritonServer, scheme: str, port: str
) -> None:
    """The ports are easily confused, and so is whether they want TLS."""
    if port == f"{scheme}_port":
        return
    url = f"{scheme}://127.0.0.1:{getattr(triton, port)}"
    with GpuTritonBackend(url, "echo", timeout_ms=3000) as backend:
        assert not backend.health_check().healthy
        with pytest.raises(
            BackendUnavailableError, match=r"check server_url, its scheme"
        ) as caught:
            backend.load_model()
        assert not caught.value.may_have_run
        assert "no message" not in str(caught.value)


def test_repr_shows_name_server_and_whether_loaded(make: Make, url: str) -> None:
    backend = make("echo")
    assert "'gpu-triton'" in repr(backend)
    assert url.removeprefix("http://") in repr(backend)
    assert "loaded=False" in repr(backend)
    backend.load_model()
    assert "loaded=True" in repr(backend)


# -- the process ---------------------------------------------------------------------------------


def test_process_that_closes_nothing_ends_without_a_word(url: str) -> None:
    code = (
        "from iaop_gpu_triton import GpuTritonBackend\n"
        f"backend = GpuTritonBackend({url!r}, 'echo'); backend.load_model()\n"
        "print(backend.infer('well').text)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("well\n", "", 0)


FORK = """
import os, sys
from iaop_core.errors import BackendUnavailableError
from iaop_gpu_triton import GpuTritonBackend

url = sys.argv[1]
is_http = url.startswith("http")
backend = GpuTritonBackend(url, "echo", timeout_ms=3000)
backend.load_model()
if is_http:  # gRPC itself may crash in a fork while a call is under way
    stream = iter(backend.stream("one two three"))
    assert next(stream).delta == "one "
for number in range(3):
    if not (child := os.fork()):
        asks = (backend.load_model, lambda: backend.infer("x"), lambda: next(backend.stream("x")))
        for ask in asks:
            try:
                ask()
            except BackendUnavailableError as error:
                assert "before this process was forked" in str(error), error
            else:
                sys.exit("no error")
        health = backend.health_check()
        assert not health.healthy and "forked" in health.detail, health
        backend.close()
        with GpuTritonBackend(url, "echo", timeout_ms=3000) as other:
            if is_http:
                other.load_model()
                assert other.infer("child").text == "child"
            else:
                assert "forked" in other.health_check().detail
        sys.exit() if is_http else os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert backend.infer("parent").text == "parent"
if is_http:
    assert "".join(chunk.delta for chunk in stream) == "two three"
print("well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_forked_process_refuses_and_harms_nothing_of_its_parent(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, url], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("well\n", 0), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_backend_that_was_made_and_not_used_before_a_fork_works_after_it(url: str) -> None:
    code = (
        "import os, sys\n"
        "from iaop_gpu_triton import GpuTritonBackend\n"
        f"backend = GpuTritonBackend({url!r}, 'echo')\n"
        "for _ in range(2):\n"
        "    if not (child := os.fork()):\n"
        "        backend.load_model(); assert backend.infer('a').text == 'a'; sys.exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
