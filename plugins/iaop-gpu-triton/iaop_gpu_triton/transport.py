"""What the backend needs of a Triton server, whatever the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from iaop_gpu_triton.response_stream import ResponseStream
from iaop_gpu_triton.tensors import ModelMetadata, ModelState, Tensor


class Transport(Protocol):
    """A client of one server, used on core's event loop only.

    An empty `version` is the server's choice. Everything raises core's errors:
    `BackendUnavailableError`, `BackendTimeoutError`, `BackendProtocolError`,
    `CredentialsRefusedError`; `ModelLoadError` where a model is unknown or can't be loaded.
    """

    cancels_at_once: bool
    """Whether the server notices at once that a call was left, or when it next sends something."""

    async def server_live(self, *, timeout_s: float) -> bool: ...

    async def model_ready(self, model: str, version: str, *, timeout_s: float) -> bool: ...

    async def model_metadata(self, model: str, version: str, *, timeout_s: float) -> ModelMetadata:
        """The model's tensors, and what its configuration says of its answers."""
        ...

    async def model_statistics(
        self, model: str, version: str, *, timeout_s: float
    ) -> list[Mapping[str, Any]]:
        """Triton's statistics of each loaded version, as its HTTP endpoint names them."""
        ...

    async def repository_index(self, *, timeout_s: float) -> list[ModelState]:
        """Every version of every model that the server's repository holds."""
        ...

    async def load(
        self, model: str, *, config: str, files: Mapping[str, bytes], timeout_s: float
    ) -> None:
        """Load the model through the repository API and wait until it is there.

        `config` (JSON, empty: its own) and `files` take the place of those in the repository.
        """
        ...

    async def unload(self, model: str, *, timeout_s: float) -> None: ...

    async def generate(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        *,
        prompt: str,
        single: bool,
    ) -> ResponseStream:
        """Send a request, having connected where need be; its responses come by the stream.

        `single`: the model gives exactly one response. `prompt` is kept out of errors.
        """
        ...

    def reconnect(self) -> None:
        """Make new connections for later calls; those under way keep theirs."""
        ...

    async def close(self) -> None: ...
