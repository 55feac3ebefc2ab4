"""The shared contract, in offline mode and on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_model import write_scripted_model

from iaop_core.contract import (
    CapabilitiesContract,
    ContractSubject,
    HealthContract,
    InferContract,
    LifecycleContract,
    OfflineContract,
    StreamContract,
)
from iaop_onnx_local import OnnxLocalBackend


@pytest.fixture(params=["offline", "real"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> ContractSubject:
    if request.param == "offline":
        return ContractSubject(
            make=lambda: OnnxLocalBackend(offline=True),
            other_model_id="another-model",
            offline_tag="onnx",
        )
    smollm2: Path = request.getfixturevalue("smollm2")
    tokens = "youaretrsfHl.Sncbi  "
    other = write_scripted_model(tmp_path / "other", [b"a"], prompt_tokens=tuple(tokens))
    return ContractSubject(
        # The contract asks for the same text alone and beside others, of quantized weights, too.
        make=lambda: OnnxLocalBackend(device="cpu", batch_invariant=True),
        model_id=smollm2.name,
        other_model_id=str(other),
        missing_model_id="no-such-model",
        shared_as="real",
    )


class TestLifecycle(LifecycleContract): ...


class TestCapabilities(CapabilitiesContract): ...


class TestInfer(InferContract): ...


class TestStream(StreamContract): ...


class TestHealth(HealthContract): ...


class TestOffline(OfflineContract): ...
