"""The plugin's hook. Light: the client libraries are imported when the backend is made."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from iaop_core import BackendSpec, Probe, hookimpl
from iaop_gpu_triton.settings import NAME, GpuTritonSettings

if TYPE_CHECKING:
    from iaop_gpu_triton.backend import GpuTritonBackend


def _make(settings: GpuTritonSettings) -> GpuTritonBackend:
    from iaop_gpu_triton.backend import GpuTritonBackend

    return GpuTritonBackend.from_settings(settings)


def _probe() -> Probe:
    missing = [name for name in ("tritonclient", "grpc", "aiohttp") if find_spec(name) is None]
    if missing:
        return Probe(
            usable=False,
            reason=f"not installed: {', '.join(missing)}; pip install 'tritonclient[grpc]' aiohttp",
        )
    return Probe(usable=True)


@hookimpl
def iaop_backends() -> Sequence[BackendSpec]:
    return [
        BackendSpec(
            name=NAME,
            summary="Language models on NVIDIA Triton Inference Server",
            api_version="1.0",
            capabilities=GpuTritonSettings().capabilities,
            settings_class=GpuTritonSettings,
            factory=_make,
            probe=_probe,
        )
    ]
