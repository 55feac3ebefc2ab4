from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from smollm2_folder import ConverterMissingError, smollm2_folder
from triton_server import TritonServer, cache_dir

from iaop_gpu_triton import GpuTritonBackend

TIMEOUT_MS = 2000
PRELOADED = (
    *("echo", "echo-plain", "echo-minimal", "ensemble", "ensemble-old", "real-ensemble"),
    *("llm-api", "llm-api-decoupled", "odd"),
)


@pytest.fixture(scope="session")
def triton() -> Iterator[TritonServer]:
    """A real server for the whole run; tests leave its loaded models as they found them."""
    with TritonServer(
        *(*PRELOADED, "other-contract", "raw-engine", "broken"),
        preload=PRELOADED,
    ) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2() -> Iterator[TritonServer]:
    """A real server that runs a real, small language model."""
    try:
        smollm2_folder(cache_dir())
    except ConverterMissingError as error:
        pytest.skip(str(error))
    with TritonServer("smollm2") as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, triton: TritonServer) -> str:
    return triton.grpc_url if request.param == "grpc" else triton.http_url


@pytest.fixture
def make(url: str) -> Iterator[Callable[..., GpuTritonBackend]]:
    """Makes backends on the real server, over each protocol in turn, and closes them."""
    made: list[GpuTritonBackend] = []

    def make_backend(model: str = "echo", **settings: Any) -> GpuTritonBackend:
        settings = {"server_url": url, "timeout_ms": TIMEOUT_MS, **settings}
        made.append(GpuTritonBackend(model_name=model, **settings))
        return made[-1]

    yield make_backend
    for backend in made:
        backend.close()


@pytest.fixture
def echo(make: Callable[..., GpuTritonBackend]) -> GpuTritonBackend:
    backend = make("echo")
    backend.load_model()
    return backend
