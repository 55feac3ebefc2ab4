"""Which ONNX Runtime package is installed. Reads metadata, imports nothing of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from attrs import frozen

__all__ = ["RuntimePackages", "find_runtime_packages"]

_PACKAGES: Final = (
    "onnxruntime",
    "onnxruntime-gpu",
    *(f"onnxruntime-{name}" for name in ("openvino", "directml", "qnn", "rocm", "migraphx")),
)
"""Distributions that provide the module `onnxruntime`."""
_INSTALL: Final = (
    "pip install 'iaop-onnx-local[gpu]' on a machine with an NVIDIA GPU, "
    "pip install 'iaop-onnx-local[cpu]' elsewhere"
)


@frozen(slots=True)
class RuntimePackages:
    """The installed distributions that provide `onnxruntime`."""

    versions: dict[str, str]
    """By name."""
    is_importable: bool
    """Whether the module is there, from whatever distribution."""

    @property
    def problem(self) -> str:
        """Why the installation can't be used and what to do about it, or `""`."""
        if len(self.versions) > 1:
            return (
                f"several packages of ONNX Runtime are installed ({self}); they share one folder "
                "and overwrite each other, so which one runs is chance. Keep one: pip uninstall -y "
                f"{' '.join(self.versions)}, then {_INSTALL}"
            )
        if self.is_importable:
            return ""
        if self.versions:
            return (
                f"{self} is installed, but its files are gone, as after uninstalling another "
                "package that shares its folder: pip install --force-reinstall "
                f"{next(iter(self.versions))}"
            )
        return f"no ONNX Runtime (such as onnxruntime or onnxruntime-gpu) is installed: {_INSTALL}"

    def __str__(self) -> str:
        named = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return named or "an ONNX Runtime of unknown origin"


def find_runtime_packages() -> RuntimePackages:
    """Looks the packages up in the metadata of the environment."""
    versions = {name: number for name in _PACKAGES if (number := _version(name))}
    spec = find_spec("onnxruntime")
    # What an uninstall leaves behind is a folder without a module: a namespace without an origin.
    return RuntimePackages(versions, is_importable=spec is not None and spec.origin is not None)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
