"""What a plugin may implement. Import `hookimpl` from `iaop_core` and mark functions with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import field, fields, frozen, validators

from iaop_core.capabilities import BackendCapabilities

if TYPE_CHECKING:
    from iaop_core.backend import InferenceBackend
    from iaop_core.capabilities import BackendHealth
    from iaop_core.messages import InferResult

__all__ = [
    "API_VERSION",
    "PROJECT_NAME",
    "BackendSpec",
    "Diagnosis",
    "InferCall",
    "ModelRef",
    "Probe",
    "hookimpl",
    "hookspec",
]

PROJECT_NAME = "iaop"
API_VERSION = "1.0"
"""Of the contract between core and plugins, as MAJOR.MINOR; docs/versions.md says what changes it.

A plugin works with a core of the same MAJOR whose MINOR is not lower than its own.
"""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)

_is_text = validators.instance_of(str)


@frozen
class Probe:
    """Whether a backend can be used on this machine and, when not, why and what to do."""

    usable: bool
    reason: str = ""


@frozen
class Diagnosis:
    """What a backend finds out about itself on this machine, for `iaop doctor`."""

    facts: Mapping[str, str]
    """Such as versions, devices, limits; in the order in which they are shown."""
    findings: Sequence[str] = ()
    """What is wrong, and what to do about it."""


@frozen(kw_only=True)
class BackendSpec:
    """One backend that a plugin offers; making it must stay cheap: it imports no SDK."""

    name: str = field(validator=_is_text)
    """Equal to the entry point's name."""
    summary: str = field(validator=_is_text)
    api_version: str = field(validator=_is_text)
    """The `API_VERSION` that the plugin was written for, as a literal."""
    capabilities: BackendCapabilities = field(validator=validators.instance_of(BackendCapabilities))
    """With default settings; the backend itself tells those of its own settings."""
    settings_class: type[Any] = field(validator=lambda _self, _attribute, value: fields(value))
    """An attrs class; the `settings` of the values are checked against its fields and types."""
    factory: Callable[[Any], InferenceBackend] = field(validator=validators.is_callable())
    """Makes the backend from an instance of `settings_class`. May import the SDK."""
    probe: Callable[[], Probe] = field(
        default=lambda: Probe(usable=True), validator=validators.is_callable()
    )
    """Says whether the backend is usable here, without touching a device and without the SDK's
    import where its metadata is enough."""
    diagnose: Callable[[], Diagnosis] | None = field(
        default=None, validator=validators.optional(validators.is_callable())
    )
    """Tells what is installed and what of it works. `iaop doctor` alone calls it, in a process of
    its own with a minute's time, so it may import the SDK, start devices, and even crash."""


@frozen(kw_only=True)
class ModelRef:
    """A model of a backend, as lifecycle hooks see it."""

    backend: str
    """The backend's name in the values."""
    plugin: str
    model_id: str


@frozen(kw_only=True)
class InferCall:
    """One call, as lifecycle hooks see it. It holds no prompt."""

    request_id: str
    tenant: str
    route: str
    backend: str
    """The backend's name in the values."""
    plugin: str
    model_id: str
    on_premises: bool
    streamed: bool
    attempt: int
    """1 for the first backend that is tried, 2 after a failover, and so on."""


@hookspec
def iaop_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Offer backends. The module that holds this hook imports no SDK.

    Example, `my_plugin/plugin.py`, registered in pyproject.toml as
    `[project.entry-points."iaop.backends"]` `my-npu = "my_plugin.plugin"`::

        from iaop_core import BackendCapabilities, BackendSpec, hookimpl
        from my_plugin.settings import MyNpuSettings

        def _make(settings):
            from my_plugin.backend import MyNpuBackend  # imports the SDK
            return MyNpuBackend(settings)

        @hookimpl
        def iaop_backends():
            return [
                BackendSpec(
                    name="my-npu",
                    summary="Models on my NPU",
                    api_version="1.0",
                    capabilities=BackendCapabilities(
                        streaming=True, max_concurrency=4, on_premises=True
                    ),
                    settings_class=MyNpuSettings,
                    factory=_make,
                )
            ]
    """


@hookspec
def iaop_model_loading(model: ModelRef) -> None:
    """A model is about to be loaded. Raise `RequestVetoedError` to refuse it.

    Example, a site that runs approved models only::

        @hookimpl
        def iaop_model_loading(model):
            if model.model_id not in APPROVED:
                raise RequestVetoedError(f"model {model.model_id!r} is not approved on this site")
    """


@hookspec
def iaop_model_loaded(model: ModelRef, seconds: float) -> None:
    """A model has been loaded; `seconds` is how long it took.

    Example::

        @hookimpl
        def iaop_model_loaded(model, seconds):
            log.info("%s is ready on %s after %.1f s", model.model_id, model.backend, seconds)
    """


@hookspec
def iaop_infer_started(call: InferCall) -> None:
    """A backend is about to be called. Raise `RequestVetoedError` to refuse it.

    Called for each attempt, in the caller's thread or event loop: be quick.

    Example, a site policy::

        @hookimpl
        def iaop_infer_started(call):
            if call.tenant == "line-3" and not call.on_premises:
                raise RequestVetoedError("line-3 may not use backends outside of the site")
    """


@hookspec
def iaop_infer_finished(
    call: InferCall, result: InferResult | None, error: BaseException | None
) -> None:
    """An attempt has ended: with its result, with an error, or with neither when the caller left.

    Example, a counter::

        @hookimpl
        def iaop_infer_finished(call, result, error):
            FINISHED.labels(call.backend, "ok" if result else "failed").inc()
    """


@hookspec
def iaop_health_changed(backend: str, health: BackendHealth) -> None:
    """A health check answered otherwise than the one before; `backend` is its name in the values.

    Example::

        @hookimpl
        def iaop_health_changed(backend, health):
            if not health:
                pager.notify(f"{backend} is unhealthy: {health.detail}")
    """


@hookspec
def iaop_model_unloaded(model: ModelRef) -> None:
    """A model has been released.

    Example::

        @hookimpl
        def iaop_model_unloaded(model):
            log.info("%s has left %s", model.model_id, model.backend)
    """
