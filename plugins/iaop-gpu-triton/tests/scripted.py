"""Asking the scripted model of `triton_model_lib/scripted_llm.py`."""

from __future__ import annotations

import json
import time
from typing import Any

from iaop_core import InferChunk, InferResult
from iaop_gpu_triton import GpuTritonBackend


def script(**fields: Any) -> str:
    """A prompt that tells the model what to answer; the fields are those of its `Script`."""
    return f"[[{json.dumps(fields)}]]"


def record(backend: GpuTritonBackend, tag: str) -> dict[str, Any]:
    """What the model tells of the request with that tag."""
    found: dict[str, Any] = json.loads(backend.infer(script(report=tag)).text)
    return found


def outcome_within(backend: GpuTritonBackend, tag: str, seconds: float) -> str:
    """The request's outcome as soon as it is no longer running, or `running`."""
    until = time.monotonic() + seconds
    while (outcome := str(record(backend, tag)["outcome"])) == "running":
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return outcome


def ended(chunks: list[InferChunk]) -> InferResult:
    """The result of a whole stream, having checked that its deltas are that result's text."""
    *deltas, end = chunks
    assert end.result is not None
    assert "".join(chunk.delta for chunk in deltas) == end.result.text
    return end.result
