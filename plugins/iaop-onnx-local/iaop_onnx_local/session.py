"""Opens ONNX Runtime sessions, on the device that was asked for or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import onnxruntime  # type: ignore[import-untyped]
from attrs import field, frozen

from iaop_core.errors import ModelLoadError
from iaop_onnx_local._errors import load_error
from iaop_onnx_local.installation import find_runtime_packages
from iaop_onnx_local.settings import Device
from iaop_onnx_local.threads import usable_cpus

__all__ = ["OpenSession", "open_session"]

_log = logging.getLogger(__name__)

_CUDA: Final = "CUDAExecutionProvider"
_CPU: Final = "CPUExecutionProvider"


@frozen(slots=True)
class OpenSession:
    """A session, and what it says about itself."""

    session: onnxruntime.InferenceSession = field(repr=False)
    device: str
    """`cuda` or `cpu`: where the session itself says that it runs."""
    threads: int
    """CPU threads of one step."""


def open_session(path: Path, *, device: Device, threads: int) -> OpenSession:
    """Loads a model file.

    Args:
        path: the ONNX file.
        device: `cuda` fails where CUDA can't be had; `auto` then takes the CPU, and says so in
            the log if the installed runtime was made for CUDA.
        threads: CPU threads; 0 means as many as the process may use.

    Raises:
        ModelLoadError: the file or the device can't be had; the message says why.
    """
    packages = find_runtime_packages()
    if packages.problem:
        raise ModelLoadError(packages.problem)
    if device == "cuda" and _CUDA not in onnxruntime.get_available_providers():
        raise ModelLoadError(
            f"device 'cuda' was asked for, but {packages} has no {_CUDA} (it offers "
            f"{', '.join(onnxruntime.get_available_providers())}). For CUDA: pip uninstall -y "
            "onnxruntime, then pip install 'iaop-onnx-local[gpu]'; or set device to cpu or auto"
        )
    threads = threads or usable_cpus()
    wants_cuda = device != "cpu" and _CUDA in onnxruntime.get_available_providers()
    reason = ""
    if wants_cuda:
        # Loads the CUDA libraries that pip installed, so that importing torch first or not, or a
        # library path, makes no difference.
        onnxruntime.preload_dlls()
        try:
            session = _create(path, [_CUDA, _CPU], threads)
            if session.get_providers()[0] == _CUDA:
                return OpenSession(session, "cuda", threads)
            reason = "the session came up without it: its libraries or its driver can't be loaded"
        except Exception as error:
            reason = str(error)
        if device == "cuda":
            raise ModelLoadError(
                f"device 'cuda' was asked for, and {packages} could not start {_CUDA}: {reason}. "
                "ONNX Runtime's lines on standard error name the missing library. It needs an "
                "NVIDIA driver, CUDA and cuDNN of the major versions it was built for "
                f"(CUDA {_built_for_cuda()}); pip install 'onnxruntime-gpu[cuda,cudnn]' brings "
                "the libraries"
            )
        _log.warning("%s could not start %s, so the CPU is used: %s", packages, _CUDA, reason)
    try:
        session = _create(path, [_CPU], threads)
    except Exception as error:
        raise load_error(error, path) from error
    return OpenSession(session, "cpu", threads)


def _create(path: Path, providers: list[str], threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    session.disable_fallback()  # a failing step must fail, not move to another device by itself
    return session


def _built_for_cuda() -> str:
    return str(getattr(onnxruntime, "cuda_version", "") or "of its release notes")
