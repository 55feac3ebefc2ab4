"""What a backend can do, and how it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen, validators

__all__ = ["BackendCapabilities", "BackendHealth"]


# mypy can't infer a field's type from the classes themselves as converters: they are generic.
def _as_tuple(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(names)


def _as_frozenset(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@frozen(kw_only=True)
class BackendCapabilities:
    """What a backend declares about itself, without touching a device or the network."""

    streaming: bool
    """Deltas arrive while the engine works (otherwise a stream is one delta and the end)."""
    max_concurrency: int = field(validator=validators.ge(1))
    """How many calls the backend takes at a time; the gateway keeps the others waiting."""
    on_premises: bool
    """Prompts and answers never leave the site."""
    modalities: tuple[str, ...] = field(default=("text",), converter=_as_tuple)
    params: frozenset[str] = field(
        default=frozenset({"max_tokens"}),
        converter=_as_frozenset,
        validator=validators.deep_iterable(validators.instance_of(str)),
    )
    """Names of the `GenerationParams` fields that the backend honours; any other is refused."""
    device: str = ""
    """What the model runs on, such as `"cpu"` or `"cuda"`; `""` when the backend can't know."""
    offline_mode: bool = False
    """The backend takes `offline=True` and then answers from the `OfflineKernel`."""


@frozen
class BackendHealth:
    """An answer of `health_check`; true when healthy."""

    healthy: bool
    detail: str = ""
    """Facts such as `"server_live=True, model_ready=True, loaded=True"`, or `"probe_error: …"`."""
    facts: Mapping[str, Any] = field(factory=dict, eq=False, repr=False)
    """What a program may want to know besides, in JSON's types: times, counts, the engine's own
    statistics. They change from one check to the next, and do not make two answers unequal."""

    def __bool__(self) -> bool:
        return self.healthy
