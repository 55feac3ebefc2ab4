"""Why CUDA can't be used here, in words, from the libraries themselves.

ONNX Runtime writes the missing library on standard error and goes on without CUDA; so they are
opened here, as it opens them, and the system says what it misses.
"""

from __future__ import annotations

import ctypes
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import onnxruntime  # type: ignore[import-untyped]

__all__ = ["built_for_cuda", "find_cuda_problem", "load_cuda_libraries"]

_WINDOWS: Final = sys.platform == "win32"
_DRIVER: Final = "nvcuda.dll" if _WINDOWS else "libcuda.so.1"
_CUDNN: Final = "cudnn64_9.dll" if _WINDOWS else "libcudnn.so.9"
_NEEDS: Final = (
    "pip install 'iaop-onnx-local[gpu]' brings CUDA and cuDNN of the right versions; the driver "
    "comes with the system"
)


def built_for_cuda() -> str:
    """The CUDA version that the installed runtime was built for; empty where for none."""
    return str(getattr(onnxruntime, "cuda_version", "") or "")


def load_cuda_libraries() -> None:
    """Loads the CUDA libraries that pip installed, where there are any.

    So importing torch before or not, or a library path, makes no difference. What it prints on
    missing ones is left out: `find_cuda_problem` tells it when it matters.
    """
    with redirect_stdout(io.StringIO()):
        onnxruntime.preload_dlls()


def find_cuda_problem(capi: Path | None = None) -> str:
    """Returns what is missing and what to do, or `""` where libraries and driver are all there.

    Args:
        capi: the folder of the runtime's own libraries; that of the installed one by default.
    """
    folder = capi or Path(onnxruntime.__file__).parent / "capi"
    problems = "; ".join(filter(None, (_driver_problem(), _library_problem(folder))))
    if not problems:
        return ""
    version = built_for_cuda() or "of its release notes"
    return f"{problems}; it needs an NVIDIA driver, CUDA {version} and cuDNN 9. {_NEEDS}"


def _library_problem(capi: Path) -> str:
    load_cuda_libraries()
    prefix, suffix = ("", ".dll") if _WINDOWS else ("lib", ".so")
    own = [f"{prefix}onnxruntime_providers_{name}{suffix}" for name in ("shared", "cuda")]
    for library in (*(str(capi / name) for name in own), _CUDNN):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return f"a library can't be loaded: {error}"
    return ""


def _driver_problem() -> str:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        return f"there is no NVIDIA driver: {error}"
    code = driver.cuInit(0)
    if code:
        return f"the NVIDIA driver finds no usable GPU: {_error_name(driver, code)}"
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return ""
    major, minor = version.value // 1000, version.value % 1000 // 10
    if built_for_cuda() and int(built_for_cuda().split(".")[0]) > major:
        return (
            f"the NVIDIA driver is for CUDA up to {major}.{minor}, and the runtime was built for "
            f"CUDA {built_for_cuda()}"
        )
    return ""


def _error_name(driver: Any, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'CUDA error').decode()} ({code})"
