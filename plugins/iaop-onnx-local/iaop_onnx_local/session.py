"""Opens ONNX Runtime sessions, on the device that was asked for or not at all.

Asked for a provider that can't start, ONNX Runtime takes the CPU and says so on standard error
alone; and a provider that did start may leave every operator to the CPU. So each session is asked
afterwards what it runs on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime  # type: ignore[import-untyped]
from attrs import field, frozen

from iaop_core.errors import ModelLoadError
from iaop_onnx_local._errors import is_fault_of_file, load_error
from iaop_onnx_local.cuda import find_cuda_problem, load_cuda_libraries
from iaop_onnx_local.installation import find_runtime_packages
from iaop_onnx_local.providers import CPU, CUDA, devices_of, offered_providers, register_library
from iaop_onnx_local.threads import usable_cpus

__all__ = ["OpenSession", "ProviderUnusableError", "open_session", "start_session"]

_log = logging.getLogger(__name__)


class ProviderUnusableError(Exception):
    """An execution provider can't be used; the message says why."""


@frozen(slots=True)
class OpenSession:
    """A session, and what it says about itself."""

    session: onnxruntime.InferenceSession = field(repr=False)
    device: str
    """Where the session itself says that it runs: `cpu`, `cuda`, or of another provider its name
    in short, such as `openvino`."""
    memory: str
    """Where tensors can be bound without being moved: `cuda`, else `cpu`."""
    threads: int
    """CPU threads of one step."""


def open_session(
    path: Path,
    *,
    device: str = "auto",
    threads: int = 0,
    provider_options: Mapping[str, Any] | None = None,
    provider_library: str = "",
) -> OpenSession:
    """Loads a model file.

    Args:
        path: the ONNX file.
        device: `cuda`, or a provider's full name, fails where it can't be had; `auto` takes CUDA if
            the installed runtime offers it, else the CPU, and says in the log why CUDA failed.
        threads: CPU threads; 0 means as many as the process may use.
        provider_options: what the provider of the device is told.
        provider_library: a vendor's plugin library that offers the device.

    Raises:
        ModelLoadError: the file or the device can't be had; the message says why.
    """
    packages = find_runtime_packages()
    if packages.problem:
        raise ModelLoadError(packages.problem)
    threads = threads or usable_cpus()
    if provider_library:
        register_library(device, provider_library)
    offered = offered_providers()
    if device == "auto":
        provider = CUDA if CUDA in offered else CPU
    else:
        provider = {"cuda": CUDA, "cpu": CPU}.get(device, device)
    if provider not in offered:
        raise ModelLoadError(
            f"device {device!r} was asked for, but {packages} has no {provider} (it offers "
            f"{', '.join(offered)})"
            + (
                ". For CUDA: pip uninstall -y onnxruntime, then pip install "
                "'iaop-onnx-local[gpu]'; or set device to cpu or auto"
                if provider == CUDA
                else "; a vendor's plugin library is given by provider_library"
            )
        )
    try:
        session = start_session(str(path), provider, threads, provider_options)
    except ProviderUnusableError as error:
        if device != "auto":
            raise ModelLoadError(
                f"device {device!r} was asked for, and {packages} could not start {provider}: "
                f"{error}"
            ) from error
        _log.warning("%s could not start %s, so the CPU is used: %s", packages, provider, error)
        return open_session(path, device="cpu", threads=threads)
    except Exception as error:  # ONNX Runtime's have no common base
        raise load_error(error, path) from error
    name = provider.removesuffix("ExecutionProvider").lower()
    # Plugin libraries have memory of their own kinds.
    compiled_in = provider in onnxruntime.get_available_providers()
    return OpenSession(session, name, name if name == "cuda" and compiled_in else "cpu", threads)


def start_session(
    model: str | bytes, provider: str, threads: int, options: Mapping[str, Any] | None = None
) -> onnxruntime.InferenceSession:
    """Makes a session on one provider, with the CPU for operators that it doesn't take.

    Args:
        model: a file's path, or the model itself.
        provider: the full name of one that is offered.
        threads: CPU threads.
        options: what the provider is told.

    Raises:
        ProviderUnusableError: it doesn't start, or takes nothing of the model.
        Exception: what ONNX Runtime raises on the model itself.
    """
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    told = {name: str(value) for name, value in (options or {}).items()}
    names: list[Any] | None = None
    try:
        if provider in onnxruntime.get_available_providers():
            names = [(provider, told)] if provider == CPU else [(provider, told), CPU]
            if provider == CUDA:
                load_cuda_libraries()
        else:
            settings.add_provider_for_devices(devices_of(provider)[:1], told)
        session = onnxruntime.InferenceSession(model, settings, names, enable_fallback=0)
    except Exception as error:
        if provider == CPU or is_fault_of_file(error):
            raise
        raise ProviderUnusableError(_explain(provider, str(error))) from error
    if provider not in session.get_providers():
        raise ProviderUnusableError(_explain(provider, "the session came up without it"))
    _check_placement(session, provider)
    return session


def _explain(provider: str, told: str) -> str:
    problem = find_cuda_problem() if provider == CUDA else ""
    told = " ".join(told.split())
    return problem or f"{told}; what ONNX Runtime wrote on standard error may tell more"


def _check_placement(session: onnxruntime.InferenceSession, provider: str) -> None:
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    total = counts.total()
    if total and not counts[provider]:
        raise ProviderUnusableError(
            f"it takes no operator of the model, so all ({total}) would run on the CPU"
        )
    if elsewhere := total - counts[provider]:
        # Sizes and indices are often computed on the CPU; most of a model should not be.
        level = logging.WARNING if elsewhere > total / 2 else logging.INFO
        _log.log(
            level, "%d of %d operators do not run on %s, but on the CPU", elsewhere, total, provider
        )
