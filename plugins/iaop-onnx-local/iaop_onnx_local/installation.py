"""Which ONNX Runtime package is installed. Reads metadata, imports nothing of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from attrs import frozen

__all__ = ["RuntimePackages", "find_runtime_packages"]

_INSTALL: Final = (
    "pip install 'iaop-onnx-local[gpu]' on a machine with an NVIDIA GPU, "
    "pip install 'iaop-onnx-local[cpu]' elsewhere"
)


@frozen(slots=True)
class RuntimePackages:
    """The versions of the two packages that provide `onnxruntime`; `""` where not installed."""

    cpu: str
    """Of `onnxruntime`."""
    gpu: str
    """Of `onnxruntime-gpu`."""

    @property
    def problem(self) -> str:
        """Why the installation can't be used and what to do about it, or `""`."""
        if self.cpu and self.gpu:
            return (
                f"both onnxruntime {self.cpu} and onnxruntime-gpu {self.gpu} are installed; they "
                "share one folder and overwrite each other, so which one runs is chance. Keep one: "
                "pip uninstall -y onnxruntime onnxruntime-gpu, then " + _INSTALL
            )
        if not self.cpu and not self.gpu:
            return "neither onnxruntime nor onnxruntime-gpu is installed: " + _INSTALL
        return ""

    def __str__(self) -> str:
        names = {"onnxruntime": self.cpu, "onnxruntime-gpu": self.gpu}
        return ", ".join(f"{name} {number}" for name, number in names.items() if number)


def find_runtime_packages() -> RuntimePackages:
    """Looks both packages up in the metadata of the environment."""
    return RuntimePackages(cpu=_version("onnxruntime"), gpu=_version("onnxruntime-gpu"))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
