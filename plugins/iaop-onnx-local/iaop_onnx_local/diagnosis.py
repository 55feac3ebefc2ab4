"""What `iaop doctor` shows of this backend: the runtime, its providers, threads, memory, models."""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from iaop_core import Diagnosis
from iaop_onnx_local.cache import models_folder
from iaop_onnx_local.cuda import built_for_cuda
from iaop_onnx_local.installation import find_runtime_packages
from iaop_onnx_local.memory import usable_memory_bytes
from iaop_onnx_local.providers import CUDA, offered_providers
from iaop_onnx_local.session import ProviderUnusableError, start_session
from iaop_onnx_local.threads import usable_cpus

__all__ = ["diagnose"]

# y = MatMul(x, x) of float [2, 2]: an ONNX model (IR version 10, operators of version 21).
_TRIAL_MODEL: Final = bytes.fromhex(
    "080a3a440a110a01780a017812017922064d61744d756c1205747269616c5a130a0178120e0a0c08"
    "0112080a0208020a02080262130a0179120e0a0c080112080a0208020a02080242040a001015"
)


def diagnose() -> Diagnosis:
    """Starts every provider that is offered, on a model of one operator."""
    facts, findings = {"runtime": str(find_runtime_packages())}, []
    if version := built_for_cuda():
        facts["built for CUDA"] = version
    for provider in offered_providers():
        problem = _try(provider)
        facts[provider] = f"does not start: {problem}" if problem else "starts"
        # A runtime that was made for CUDA is there for it; others offer much that nobody wants.
        if problem and provider == CUDA:
            findings.append(f"{provider} does not start: {problem}")
    facts["threads"] = f"{usable_cpus()} (the machine has {os.cpu_count()} CPUs)"
    memory = usable_memory_bytes()
    facts["memory"] = "unknown" if memory is None else f"{memory / 1e6:.0f} MB usable"
    there = sorted(path.name for path in models_folder().glob("[!.]*") if path.is_dir())
    facts["models"] = f"{', '.join(there) or 'none'} in {models_folder()}"
    return Diagnosis(facts, findings)


def _try(provider: str) -> str:
    """Why the provider can't be used, or `""`."""
    try:
        session = start_session(_TRIAL_MODEL, provider, threads=1)
        session.run(None, {"x": np.eye(2, dtype=np.float32)})
    except ProviderUnusableError as error:
        return str(error)
    except Exception as error:  # ONNX Runtime's have no common base
        return f"{type(error).__name__}: {error}"
    return ""
