"""One backend of the site: its plugin's instance, its model, its slots and its health."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

from iaop_core import bridge
from iaop_core.backend import InferenceBackend
from iaop_core.capabilities import BackendHealth
from iaop_core.errors import IaopError, ModelLoadError, PluginLoadError
from iaop_core.hookspecs import ModelRef
from iaop_core.plugins import PluginRegistry
from iaop_core.slots import Slots
from iaop_core.values import Values

__all__ = ["SiteBackend"]

_log = logging.getLogger(__name__)


class SiteBackend:
    """A backend as the values name it.

    Making one imports the plugin's light module and checks its settings; the SDK is imported when
    the instance is first needed. Raises `ValuesError` and what `PluginRegistry.get_spec` raises.
    """

    def __init__(self, name: str, values: Values, registry: PluginRegistry) -> None:
        self.name = name
        self._settings = values.backends[name]
        self._values = values
        self._registry = registry
        self._spec = registry.get_spec(
            self._settings.plugin,
            allow_offline=values.gateway.allow_offline,
            wanted_by=f"backends.{name}.plugin",
        )
        self._plugin_settings = values.plugin_settings(name, self._spec.settings_class)
        self._instance: InferenceBackend | None = None
        self._lock = threading.Lock()
        self._probe_lock = threading.Lock()  # the other one is held while an SDK is imported
        self._probe: Future[BackendHealth] | None = None
        self._last_health: BackendHealth | None = None
        self._load_failure = ""
        self.slots = Slots(1)

    @property
    def plugin(self) -> str:
        return self._settings.plugin

    @property
    def model(self) -> ModelRef:
        return ModelRef(backend=self.name, plugin=self.plugin, model_id=self._settings.model)

    def find_instance(self) -> InferenceBackend | None:
        """The plugin's backend when it has been made."""
        return self._instance

    def instance(self) -> InferenceBackend:
        """The plugin's backend, made on first use. Raises `PluginLoadError`, `ValuesError`."""
        if self._instance is None:
            with self._lock:
                if self._instance is None:
                    self._instance = self._make()
        return self._instance

    def _make(self) -> InferenceBackend:
        try:
            backend = self._spec.factory(self._plugin_settings)
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
            health = BackendHealth(healthy=False, detail="loaded=False")
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
