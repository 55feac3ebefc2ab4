"""Offers the `onnx-local` backend to iaop-core. Imports neither ONNX Runtime nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from iaop_core import BackendSpec, Diagnosis, Probe, hookimpl
from iaop_onnx_local.installation import find_runtime_packages
from iaop_onnx_local.settings import NAME, OnnxLocalSettings

if TYPE_CHECKING:
    from iaop_onnx_local.backend import OnnxLocalBackend

__all__ = ["iaop_backends"]


def _make(settings: OnnxLocalSettings) -> OnnxLocalBackend:
    from iaop_onnx_local.backend import OnnxLocalBackend

    return OnnxLocalBackend(settings)


def _probe() -> Probe:
    problem = find_runtime_packages().problem
    return Probe(usable=not problem, reason=problem)


def _diagnose() -> Diagnosis:
    from iaop_onnx_local.diagnosis import diagnose

    return diagnose()


@hookimpl
def iaop_backends() -> Sequence[BackendSpec]:
    return [
        BackendSpec(
            name=NAME,
            summary="Language models on ONNX Runtime in this process, on CUDA or the CPU",
            api_version="1.0",
            capabilities=OnnxLocalSettings().capabilities,
            settings_class=OnnxLocalSettings,
            factory=_make,
            probe=_probe,
            diagnose=_diagnose,
        )
    ]
