"""The execution providers of the installed runtime, and of vendors' plugin libraries."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import onnxruntime  # type: ignore[import-untyped]

from iaop_core.errors import ModelLoadError

__all__ = ["CPU", "CUDA", "devices_of", "offered_providers", "register_library"]

CUDA: Final = "CUDAExecutionProvider"
CPU: Final = "CPUExecutionProvider"

_registered: dict[str, Path] = {}
_lock = threading.Lock()


def offered_providers() -> list[str]:
    """The names of those that can be asked for: compiled in, or of a library, best ones first.

    That one is offered does not mean that it starts: its device or libraries may be missing.
    """
    names = [
        *onnxruntime.get_available_providers(),
        *(d.ep_name for d in onnxruntime.get_ep_devices()),
    ]
    return list(dict.fromkeys(names))


def devices_of(provider: str) -> list[Any]:
    """The devices (`OrtEpDevice`) that a plugin library offers for a provider."""
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]


def register_library(provider: str, library: str) -> None:
    """Registers a vendor's plugin library under the provider's name, once for the process.

    Raises:
        ModelLoadError: the file isn't there, is no such library, or offers no device of that
            provider on this machine; the message tells what it does offer.
    """
    path = Path(library).expanduser().resolve()
    with _lock:
        if _registered.get(provider) != path:
            if not path.is_file():
                raise ModelLoadError(f"provider_library names {path}, and there is no such file")
            try:
                onnxruntime.register_execution_provider_library(provider, str(path))
            except Exception as error:  # ONNX Runtime's have no common base
                raise ModelLoadError(
                    f"{path} can't be used as a provider_library for {provider!r}: {error}"
                ) from error
            _registered[provider] = path
    if not devices_of(provider):
        others = {device.ep_name for device in onnxruntime.get_ep_devices()} - {CPU}
        raise ModelLoadError(
            f"{path} offers no device of {provider!r} on this machine; plugin libraries offer "
            + (", ".join(sorted(others)) or "none here")
        )
