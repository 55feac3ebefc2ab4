"""The shared contract, in offline mode and against the real server over both protocols."""

from __future__ import annotations

import pytest
from triton_server import TritonServer

from iaop_core.contract import (
    CapabilitiesContract,
    ContractSubject,
    HealthContract,
    InferContract,
    LifecycleContract,
    OfflineContract,
    StreamContract,
)
from iaop_gpu_triton import GpuTritonBackend


@pytest.fixture(params=["offline", "grpc", "http", "real language model"])
def subject(request: pytest.FixtureRequest) -> ContractSubject:
    if request.param == "offline":
        return ContractSubject(
            make=lambda: GpuTritonBackend(offline=True),
            other_model_id="another-model",
            offline_tag="gpu",
        )
    if request.param == "real language model":
        real: TritonServer = request.getfixturevalue("smollm2")
        return ContractSubject(
            make=lambda: GpuTritonBackend(real.grpc_url, "smollm2"),
            missing_model_id="no-such-model",
        )
    server: TritonServer = request.getfixturevalue("triton")
    url = server.grpc_url if request.param == "grpc" else server.http_url
    return ContractSubject(
        make=lambda: GpuTritonBackend(url, "echo", timeout_ms=5000),
        other_model_id="echo-minimal",
        missing_model_id="no-such-model",
    )


class TestLifecycle(LifecycleContract): ...


class TestCapabilities(CapabilitiesContract): ...


class TestInfer(InferContract): ...


class TestStream(StreamContract): ...


class TestHealth(HealthContract): ...


class TestOffline(OfflineContract): ...
