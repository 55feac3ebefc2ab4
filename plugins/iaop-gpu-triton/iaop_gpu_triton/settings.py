"""What a site can set on the backend, and what the backend can do. Imports no SDK."""

from __future__ import annotations

from attrs import field, frozen, validators

from iaop_core import BackendCapabilities

NAME = "gpu-triton"

PARAMS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    }
)
"""The generation parameters that the vLLM contract carries."""


@frozen(kw_only=True)
class GpuTritonSettings:
    """Settings of `GpuTritonBackend`, under `settings` of a backend in the values."""

    server_url: str = field(default="triton:8001", validator=validators.min_len(1))
    """`host:port`, `grpc://host:port` or `http://host:port`; ports 8001 and 8000 by default."""
    model_name: str = field(default="llm-70b-onnx", validator=validators.min_len(1))
    """The model that is loaded when `load_model` is given no other."""
    model_version: str = ""
    """A version to pin, such as `"2"`; empty: the server's choice, by its version policy."""
    prefer_grpc: bool = True
    """What a bare `host:port` speaks: gRPC, or HTTP when false."""
    max_concurrency: int = field(default=16, validator=validators.ge(1))
    """Calls at a time; the gateway keeps the others waiting."""
    timeout_ms: int = field(default=30_000, validator=validators.ge(1))
    """Longest silence in milliseconds: a plain answer must be whole within it, of a stream it is
    the wait for the first response and between two responses, however long the whole takes."""
    max_tokens: int = field(default=256, validator=validators.ge(1))
    """Tokens of an answer when the call does not say."""
    offline: bool = False
    """Answer from the offline kernel; no server is contacted."""

    @property
    def capabilities(self) -> BackendCapabilities:
        """What a backend with these settings can do."""
        return BackendCapabilities(
            streaming=True,
            max_concurrency=self.max_concurrency,
            on_premises=True,
            params=PARAMS,
            offline_mode=True,
        )
