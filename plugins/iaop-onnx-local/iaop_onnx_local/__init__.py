"""The `onnx-local` backend of iaop-core: language models on ONNX Runtime, in process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iaop_onnx_local.settings import OnnxLocalSettings

if TYPE_CHECKING:
    from iaop_onnx_local.backend import OnnxLocalBackend

__all__ = ["OnnxLocalBackend", "OnnxLocalSettings"]


def __getattr__(name: str) -> Any:
    # Reading the settings or the plugin's hooks must not load numpy and ONNX Runtime.
    if name == "OnnxLocalBackend":
        from iaop_onnx_local.backend import OnnxLocalBackend

        return OnnxLocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
