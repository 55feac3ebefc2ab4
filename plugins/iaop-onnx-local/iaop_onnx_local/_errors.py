"""ONNX Runtime's exceptions as core's, the most specific rule first."""

from __future__ import annotations

from pathlib import Path

from iaop_core.errors import BackendUnavailableError, IaopError, ModelLoadError

__all__ = ["is_fault_of_file", "load_error", "step_error"]

# ONNX Runtime raises classes of its own without a common base, and puts the fact into the text.
_MEMORY = ("failed to allocate memory", "bad_alloc", "out of memory", "cudaerrormemoryallocation")


_DAMAGED = ("InvalidProtobuf", "InvalidGraph", "NoModel")


def is_fault_of_file(error: Exception) -> bool:
    """Whether a session can't be created on any device."""
    return type(error).__name__ in ("NoSuchFile", *_DAMAGED)


def load_error(error: Exception, path: Path) -> ModelLoadError:
    """What to raise when a session can't be created."""
    kind = type(error).__name__
    if kind == "NoSuchFile":
        why = "the file, or a weights file that it names, is missing"
    elif kind in _DAMAGED:
        why = f"it is damaged or no ONNX model: {error}"
    elif kind == "NotImplemented":
        why = f"it uses an operator that the installed ONNX Runtime lacks: {error}"
    elif _is_memory(error):
        why = f"there is not enough memory: {error}"
    else:
        why = f"{kind}: {error}"
    return ModelLoadError(f"ONNX Runtime can't load {path}: {why}")


def step_error(error: Exception, backend: str) -> IaopError:
    """What to raise when a step of a loaded model fails. ONNX Runtime's text holds no prompt."""
    if _is_memory(error):
        return BackendUnavailableError(
            "the engine ran out of memory for this request; lower max_concurrency, "
            f"context_length or the length of the prompt ({error})",
            backend=backend,
        )
    return BackendUnavailableError(
        f"a step of the engine failed with {type(error).__name__}: {error}",
        backend=backend,
        may_have_run=True,
    )


def _is_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY)
