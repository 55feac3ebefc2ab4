"""One gateway in front of pluggable LLM inference backends, chosen by a values file.

An application uses `LLMGateway`; the author of a backend uses `InferenceBackend`, `BackendSpec` and
`hookimpl`. Importing this package imports no SDK, no web framework and no database library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iaop_core import errors
from iaop_core.backend import InferenceBackend
from iaop_core.capabilities import BackendCapabilities, BackendHealth
from iaop_core.hookspecs import (
    API_VERSION,
    BackendSpec,
    Diagnosis,
    InferCall,
    ModelRef,
    Probe,
    hookimpl,
)
from iaop_core.messages import (
    DEFAULT_MAX_TOKENS,
    GenerationParams,
    InferChunk,
    InferResult,
    JsonSchema,
    Message,
    ResponseFormat,
    TokenLogprob,
    as_messages,
    estimate_tokens,
    with_context,
)
from iaop_core.offline import OfflineKernel
from iaop_core.secret import Secret

if TYPE_CHECKING:
    from iaop_core.gateway import LLMGateway

__all__ = [
    "API_VERSION",
    "DEFAULT_MAX_TOKENS",
    "BackendCapabilities",
    "BackendHealth",
    "BackendSpec",
    "Diagnosis",
    "GenerationParams",
    "InferCall",
    "InferChunk",
    "InferResult",
    "InferenceBackend",
    "JsonSchema",
    "LLMGateway",
    "Message",
    "ModelRef",
    "OfflineKernel",
    "Probe",
    "ResponseFormat",
    "Secret",
    "TokenLogprob",
    "as_messages",
    "errors",
    "estimate_tokens",
    "hookimpl",
    "with_context",
]


def __getattr__(name: str) -> Any:
    # A plugin's import of this package need not pay for the gateway.
    if name == "LLMGateway":
        from iaop_core.gateway import LLMGateway

        return LLMGateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
