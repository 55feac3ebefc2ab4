"""The `onnx-local` backend of iaop-core: language models on ONNX Runtime, in process."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from iaop_onnx_local.settings import OnnxLocalSettings

if TYPE_CHECKING:
    from iaop_onnx_local.backend import OnnxLocalBackend

__all__ = ["OnnxLocalBackend", "OnnxLocalSettings"]

# ONNX Runtime's own packages, from 1.29 on, tell Microsoft what they run unless told not to before
# they are imported. Besides, the thread for that keeps forked processes from ending. Who wants to
# take part sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
if os.environ["ORT_DISABLE_TELEMETRY"] != "0":
    # Imported already, perhaps; and a broken installation leaves an empty module.
    _stop = getattr(sys.modules.get("onnxruntime"), "disable_telemetry_events", None)
    if _stop is not None:
        _stop()


def __getattr__(name: str) -> Any:
    # Reading the settings or the plugin's hooks must not load numpy and ONNX Runtime.
    if name == "OnnxLocalBackend":
        from iaop_onnx_local.backend import OnnxLocalBackend

        return OnnxLocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
