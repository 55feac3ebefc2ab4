from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import write_scripted_model

from iaop_onnx_local import OnnxLocalBackend


def _fetch(*options: str) -> Path:
    """Fetches and converts the published model; only the first time takes long."""
    command = [sys.executable, "-m", "iaop_onnx_local.cli", "fetch", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Path(json.loads(done.stdout)["folder"])


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model folder of SmolLM2-135M-Instruct, with the weights as quantized."""
    return _fetch()


@pytest.fixture(scope="session")
def smollm2_fp32() -> Path:
    """The same with all weights dequantized."""
    return _fetch("--dtype", "fp32")


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Iterator[OnnxLocalBackend]:
    """A backend with the real model loaded."""
    with OnnxLocalBackend(device="cpu") as backend:
        backend.load_model(smollm2.name)
        yield backend


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., OnnxLocalBackend]]:
    """Makes backends whose model says the given tokens."""
    made: list[OnnxLocalBackend] = []

    def make(
        script: list[bytes], settings: dict[str, Any] | None = None, **model: Any
    ) -> OnnxLocalBackend:
        folder = write_scripted_model(tmp_path / f"scripted-{len(made)}", script, **model)
        made.append(OnnxLocalBackend(device="cpu", **(settings or {})))
        made[-1].load_model(str(folder))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
