"""One backend of the site: its plugin's instance, its model, its slots and its health."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from iaop_core import bridge
from iaop_core.backend import InferenceBackend
from iaop_core.capabilities import BackendHealth
from iaop_core.errors import (
    DuplicateBackendError,
    IaopError,
    ModelLoadError,
    PluginLoadError,
    UnknownBackendError,
)
from iaop_core.hookspecs import BackendSpec, ModelRef
from iaop_core.plugins import PluginRegistry
from iaop_core.slots import Slots
from iaop_core.values import Values

__all__ = ["SiteBackend"]

_log = logging.getLogger(__name__)


class SiteBackend:
    """A backend as the values name it.

    Making one imports the plugin's light module and checks its settings; the SDK is imported when
    the instance is first needed. Raises `ValuesError` for wrong settings. A plugin that can't be
    used is an error only when the backend is: see `require_plugin`.
    """

    def __init__(self, name: str, values: Values, registry: PluginRegistry) -> None:
        self.name = name
        self._settings = values.backends[name]
        self._values = values
        self._registry = registry
        self._spec: BackendSpec | None = None
        self._plugin_settings: Any = None
        with suppress(UnknownBackendError, DuplicateBackendError, PluginLoadError):
            self.require_plugin()
        self._instance: InferenceBackend | None = None
        self._lock = threading.Lock()
        self._probe_lock = threading.Lock()  # the other one is held while an SDK is imported
        self._probe: Future[BackendHealth] | None = None
        self._last_health: BackendHealth | None = None
        self._load_failure = ""
        self._told: set[str] = set()
        self.slots = Slots(1)

    @property
    def plugin(self) -> str:
        return self._settings.plugin

    @property
    def model(self) -> ModelRef:
        return ModelRef(backend=self.name, plugin=self.plugin, model_id=self._settings.model)

    def require_plugin(self) -> BackendSpec:
        """What the plugin offers. Raises `ValuesError` and as `PluginRegistry.get_spec`."""
        if self._spec is None:
            spec = self._registry.get_spec(
                self.plugin,
                allow_offline=self._values.gateway.allow_offline,
                wanted_by=f"backends.{self.name}.plugin",
            )
            self._plugin_settings = self._values.plugin_settings(self.name, spec.settings_class)
            self._spec = spec
        return self._spec

    def is_news(self, trouble: str) -> bool:
        """Whether that trouble has not been told since the backend last answered a call."""
        known = trouble in self._told
        self._told.add(trouble)
        return not known

    def has_answered(self) -> None:
        """Take note that the backend answers calls: a trouble after that is news again."""
        if self._told:
            self._told.clear()
            _log.info("backend %s answers calls again", self.name)

    def find_instance(self) -> InferenceBackend | None:
        """The plugin's backend when it has been made."""
        return self._instance

    def instance(self) -> InferenceBackend:
        """The plugin's backend, made on first use. Raises as `require_plugin`."""
        if self._instance is None:
            with self._lock:
                if self._instance is None:
                    self._instance = self._make()
        return self._instance

    def _make(self) -> InferenceBackend:
        try:
            backend = self.require_plugin().factory(self._plugin_settings)
            if not isinstance(backend, InferenceBackend):
                raise TypeError(f"it made a {type(backend).__name__}, not an InferenceBackend")
            limit = backend.capabilities.max_concurrency
        except IaopError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"backend {self.name!r}: plugin {self.plugin!r} can't make its backend: "
                f"{type(error).__name__}: {error}",
                backend=self.name,
            ) from error
        if backend.offline and not self._values.gateway.allow_offline:
            backend.close()
            raise self._values.error(
                ("gateway", "allow_offline"),
                f"backend {self.name!r} runs in offline mode, whose answers come from no model; "
                "set allow_offline: true to serve it all the same",
            )
        if self._settings.max_concurrency is not None:
            limit = min(limit, self._settings.max_concurrency)
        self.slots = Slots(limit)
        return backend

    def load(self) -> None:
        """Load the model of the values, telling the lifecycle's hooks."""
        started = time.perf_counter()
        try:
            backend = self.instance()
            self._registry.notify("iaop_model_loading", model=self.model)
            backend.load_model(self._settings.model)
        except IaopError as error:
            self._load_failure = f"{error.kind}: {error}"
            raise
        except (Exception, SystemExit) as error:
            self._load_failure = f"{type(error).__name__}: {error}"
            raise ModelLoadError(
                f"backend {self.name!r}: loading model {self._settings.model!r} failed: "
                f"{type(error).__name__}: {error}",
                backend=self.name,
                model=self._settings.model,
            ) from error
        self._load_failure = ""
        self._registry.notify(
            "iaop_model_loaded", model=self.model, seconds=time.perf_counter() - started
        )

    def health(self) -> Future[BackendHealth]:
        """A health check under way: callers at the same time share one."""
        with self._probe_lock:
            if self._probe is None or self._probe.done():
                self._probe = bridge.in_thread(self._check)
            return self._probe

    def _check(self) -> BackendHealth:
        backend = self._instance
        if self._load_failure:
            health = BackendHealth(healthy=False, detail=f"load_error: {self._load_failure}")
        elif backend is None:
            health = BackendHealth(healthy=False, detail=self._why_not_made())
        else:
            try:
                health = backend.health_check()
                if not isinstance(health, BackendHealth):
                    raise TypeError(f"it answered a {type(health).__name__}")
            except (
                Exception,
                SystemExit,
            ) as error:  # a breach of the contract, which must not hide the others
                health = BackendHealth(
                    healthy=False, detail=f"probe_error: {type(error).__name__}: {error}"
                )
        if health != self._last_health:
            self._last_health = health
            self._registry.notify("iaop_health_changed", backend=self.name, health=health)
        return health

    def _why_not_made(self) -> str:
        try:
            self.require_plugin()
        except IaopError as error:
            return f"load_error: {error.kind}: {error}"
        return "loaded=False"

    def close(self) -> None:
        """Release the instance; what goes wrong is logged, so that the others are closed too."""
        with self._lock:
            backend, self._instance = self._instance, None
        if backend is None:
            return
        try:
            backend.close()
        except (Exception, SystemExit) as error:
            _log.error("closing backend %s failed: %s: %s", self.name, type(error).__name__, error)
        self._registry.notify("iaop_model_unloaded", model=self.model)
