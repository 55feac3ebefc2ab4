"""What the backend needs of a Triton server, whatever the protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from iaop_gpu_triton.tensors import ModelMetadata, ModelState, Response, Tensor


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
        """The model's tensors."""
        ...

    async def repository_index(self, *, timeout_s: float) -> list[ModelState]:
        """Every version of every model that the server's repository holds."""
        ...

    async def load(self, model: str, *, timeout_s: float) -> None:
        """Load the model through the repository API and wait until it is there."""
        ...

    async def unload(self, model: str, *, timeout_s: float) -> None: ...

    def generate(
        self, model: str, version: str, tensors: Sequence[Tensor]
    ) -> AsyncGenerator[Response, None]:
        """The model's responses. Ends when the server has stated the end, else it raises.

        Closing it, or cancelling the task, cancels the work on the server. It keeps no time: the
        caller does.
        """
        ...

    def is_connected(self) -> bool:
        """Whether there is, or may be, a connection to the server."""
        ...

    def reconnect(self) -> None:
        """Make new connections for later calls; those under way keep theirs."""
        ...

    async def close(self) -> None: ...
