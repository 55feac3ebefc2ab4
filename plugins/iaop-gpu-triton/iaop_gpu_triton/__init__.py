"""iaop-core backend for language models served by NVIDIA Triton Inference Server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iaop_gpu_triton.backend import GpuTritonBackend
    from iaop_gpu_triton.settings import GpuTritonSettings

__all__ = ["GpuTritonBackend", "GpuTritonSettings"]


def __getattr__(name: str) -> Any:
    # The backend's modules are imported when somebody wants one, not with the package.
    if name == "GpuTritonBackend":
        from iaop_gpu_triton.backend import GpuTritonBackend

        return GpuTritonBackend
    if name == "GpuTritonSettings":
        from iaop_gpu_triton.settings import GpuTritonSettings

        return GpuTritonSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
