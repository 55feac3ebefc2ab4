"""The contract that every backend keeps, offline and against the real server."""

from __future__ import annotations

import pytest

from iaop_cloud_api import CloudApiBackend
from iaop_core.contract import (
    CapabilitiesContract,
    ContractSubject,
    HealthContract,
    InferContract,
    LifecycleContract,
    OfflineContract,
    StreamContract,
)


@pytest.fixture(params=["offline", "real"])
def subject(request: pytest.FixtureRequest) -> ContractSubject:
    if request.param == "offline":
        return ContractSubject(
            make=lambda: CloudApiBackend(offline=True, model="m"),
            other_model_id="other",
            offline_tag="cloud",
        )
    llama = request.getfixturevalue("llama")
    return ContractSubject(
        make=lambda: CloudApiBackend(
            base_url=llama.base_url, model=llama.model, verify_model=True, max_concurrency=4
        ),
        missing_model_id="no-such-model",
    )


class TestLifecycle(LifecycleContract): ...


class TestCapabilities(CapabilitiesContract): ...


class TestInfer(InferContract): ...


class TestStream(StreamContract): ...


class TestHealth(HealthContract): ...


class TestOffline(OfflineContract): ...
