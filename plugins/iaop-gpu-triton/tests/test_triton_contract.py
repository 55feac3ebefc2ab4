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

MODELS = {"vllm": "echo", "ensemble": "ensemble", "llm-api": "llm-api-decoupled"}
OTHERS = {"vllm": "echo-plain", "ensemble": "real-ensemble", "llm-api": "llm-api"}
SERVED = [f"{contract} {protocol}" for contract in MODELS for protocol in ("grpc", "http")]


@pytest.fixture(params=["offline", *SERVED, "real language model"])
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
    contract, protocol = request.param.split()
    url = server.grpc_url if protocol == "grpc" else server.http_url
    return ContractSubject(
        make=lambda: GpuTritonBackend(url, MODELS[contract], timeout_ms=5000),
        other_model_id=OTHERS[contract],
        missing_model_id="no-such-model",
    )


class TestLifecycle(LifecycleContract): ...


class TestCapabilities(CapabilitiesContract): ...


class TestInfer(InferContract): ...


class TestStream(StreamContract): ...


class TestHealth(HealthContract): ...


class TestOffline(OfflineContract): ...
