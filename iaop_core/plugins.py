"""Finds the installed backends and imports just the one that is asked for.

pluggy's own entry-point loader stops at the first plugin that fails and silently drops a second
distribution of the same name. Here each entry point becomes a record with a state and a reason, and
a plugin that fails is an error only when it is the one selected.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import importlib_metadata
import pluggy
from attrs import asdict, evolve, frozen

from iaop_core import hookspecs
from iaop_core.capabilities import BackendCapabilities
from iaop_core.errors import (
    DuplicateBackendError,
    PluginLoadError,
    RequestVetoedError,
    UnknownBackendError,
)
from iaop_core.hookspecs import API_VERSION, PROJECT_NAME, BackendSpec

__all__ = [
    "ADDONS_GROUP",
    "BACKENDS_GROUP",
    "BackendRecord",
    "PluginRegistry",
    "State",
]

BACKENDS_GROUP = "iaop.backends"
ADDONS_GROUP = "iaop.addons"

_REFUSING_HOOKS = ("iaop_model_loading", "iaop_infer_started")
"""Those that are told before the fact."""

State: TypeAlias = Literal["available", "disabled", "incompatible", "broken", "duplicate"]

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class BackendRecord:
    """What is known of one entry point. `reason` says why it can't be used, or is `""`."""

    name: str
    state: State
    distribution: str
    version: str
    api_version: str = ""
    capabilities: BackendCapabilities | None = None
    reason: str = ""
    summary: str = ""

    def as_json(self) -> dict[str, Any]:
        """The record in JSON's types."""
        record = asdict(self, filter=lambda attribute, _: attribute.name != "summary")
        if self.capabilities:
            record["capabilities"]["params"] = sorted(self.capabilities.params)
        return record


@frozen
class _Entry:
    """An entry point as its distribution's metadata has it, nothing imported."""

    name: str
    group: str
    value: str
    distribution: str
    version: str
    hidden_by: str = ""

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    def load(self) -> Any:
        return importlib_metadata.EntryPoint(self.name, self.value, self.group).load()


class PluginRegistry:
    """The backends and add-ons that are installed.

    Metadata is read once per process and `sys.path`. `allow` and `deny` are distribution names in
    any spelling; they default to the environment variables `IAOP_PLUGINS` (empty: all) and
    `IAOP_DISABLE_PLUGINS`, comma-separated. What is not allowed is never imported. Names of
    backends compare exactly. core's own backend needs no place on the allow list.
    """

    def __init__(
        self, *, allow: Iterable[str] | None = None, deny: Iterable[str] | None = None
    ) -> None:
        self._allow = _names("IAOP_PLUGINS", allow)
        self._deny = _names("IAOP_DISABLE_PLUGINS", deny)
        self._manager = _new_manager()
        self._inspected: dict[_Entry, BackendRecord] = {}
        self._specs: dict[_Entry, BackendSpec] = {}
        self._plugins: dict[_Entry, Any] = {}

    # -- looking ---------------------------------------------------------------------------------

    @cached_property
    def _entries(self) -> tuple[_Entry, ...]:
        return _scan(tuple(sys.path))

    def names(self) -> list[str]:
        """Every backend name that is offered, usable or not; imports nothing."""
        return sorted({entry.name for entry in self._entries if entry.group == BACKENDS_GROUP})

    def broken_metadata(self) -> list[str]:
        """Metadata folders without metadata, as an uninstall that was broken off leaves them."""
        return _broken_metadata(tuple(sys.path))

    def records(self) -> list[BackendRecord]:
        """A record for each entry point, by name; imports every plugin's light module."""
        entries = [entry for entry in self._entries if entry.group == BACKENDS_GROUP]
        return [
            self._inspect(entry)
            for entry in sorted(entries, key=lambda e: (e.name, e.distribution))
        ]

    def _inspect(self, entry: _Entry) -> BackendRecord:
        if entry not in self._inspected:
            self._inspected[entry] = self._look_at(entry)
        return self._inspected[entry]

    def _look_at(self, entry: _Entry) -> BackendRecord:
        record = BackendRecord(
            name=entry.name,
            state="broken",
            distribution=entry.distribution,
            version=entry.version,
        )
        if reason := self._disabled_by(entry):
            return evolve(record, state="disabled", reason=reason)
        rivals = self._rivals(entry)
        if len(rivals) > 1:
            return evolve(record, state="duplicate", reason=_say_duplicate(rivals))
        if entry.hidden_by:
            return evolve(record, reason=_say_hidden(entry))
        try:
            spec = self._load_spec(entry)
        except PluginLoadError as error:
            return evolve(record, reason=str(error))
        record = evolve(
            record,
            api_version=spec.api_version,
            capabilities=spec.capabilities,
            summary=spec.summary,
        )
        if reason := _incompatibility(spec, entry):
            return evolve(record, state="incompatible", reason=reason)
        try:
            probe = spec.probe()
            usable, reason = bool(probe.usable), str(probe.reason)
        except (Exception, SystemExit) as error:
            return evolve(record, reason=f"its probe failed: {_say(error)}")
        self._specs[entry] = spec
        return evolve(record, state="available" if usable else "broken", reason=reason)

    def _disabled_by(self, entry: _Entry) -> str:
        name = _normalised(entry.distribution)
        if name in self._deny:
            return f"{entry.distribution} is on the list of disabled plugins (IAOP_DISABLE_PLUGINS)"
        if self._allow and name not in self._allow and name != "iaop-core":
            return f"{entry.distribution} is not on the list of allowed plugins (IAOP_PLUGINS)"
        return ""

    def _rivals(self, entry: _Entry) -> list[_Entry]:
        return [
            other
            for other in self._entries
            if (other.group, other.name) == (entry.group, entry.name)
            and not self._disabled_by(other)
        ]

    # -- selecting -------------------------------------------------------------------------------

    def get_spec(
        self, name: str, *, allow_offline: bool = False, wanted_by: str = ""
    ) -> BackendSpec:
        """The backend of that name; imports its plugin's light module and no other.

        With `allow_offline` a backend whose SDK is missing may be had when it has an offline mode.
        `wanted_by` names the setting that asks, for the error. Raises `UnknownBackendError`,
        `DuplicateBackendError` or `PluginLoadError` with the reason; never offers another instead.
        """
        prefix = f"{wanted_by}: " if wanted_by else ""
        entries = [e for e in self._entries if (e.group, e.name) == (BACKENDS_GROUP, name)]
        if not entries:
            raise UnknownBackendError(
                prefix + self._say_unknown(name), backend=name, known=tuple(self.names())
            )
        records = {entry: self._inspect(entry) for entry in entries}
        entry = next((e for e, r in records.items() if r.state != "disabled"), entries[0])
        record = records[entry]
        if record.state == "duplicate":
            rivals = self._rivals(entry)
            raise DuplicateBackendError(
                f"{prefix}backend {name!r} is refused: {record.reason}",
                backend=name,
                distributions=tuple(sorted(rival.owner for rival in rivals)),
            )
        spec = self._specs.get(entry)
        offline = allow_offline and spec is not None and spec.capabilities.offline_mode
        if spec is None or (record.state != "available" and not offline):
            raise PluginLoadError(
                f"{prefix}backend {name!r} of {entry.owner} can't be used ({record.state}): "
                f"{record.reason}",
                backend=name,
                distribution=entry.owner,
            )
        plugin = self._plugins[entry]
        if not self._manager.is_registered(plugin):
            self._manager.register(plugin, name=f"{entry.owner} {entry.name}")
        return spec

    def _say_unknown(self, name: str) -> str:
        known = self.names()
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        broken = self.broken_metadata()
        return (
            f"no installed distribution offers a backend {name!r}; {hint}"
            f"found: {', '.join(known) or 'none'}; install its plugin with pip"
            + (f"; these metadata folders are broken: {', '.join(broken)}" if broken else "")
        )

    # -- importing -------------------------------------------------------------------------------

    def _load_spec(self, entry: _Entry) -> BackendSpec:
        plugin = _import(entry)
        try:
            trial = _new_manager()
            trial.register(plugin)
            offers = [spec for specs in trial.hook.iaop_backends() for spec in specs]
            mine = [s for s in offers if isinstance(s, BackendSpec) and s.name == entry.name]
            # A plugin for a newer API may well have hooks that this core does not know.
            if not (mine and _incompatibility(mine[0], entry)):
                _check_hooks(trial)
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{entry.value} has wrong hooks: {_say(error)}", distribution=entry.owner
            ) from error
        if mine:
            self._plugins[entry] = plugin
            return mine[0]
        raise PluginLoadError(
            f"the hook iaop_backends of {entry.value} gives no BackendSpec named {entry.name!r}",
            distribution=entry.owner,
        )

    def load_addons(self) -> list[str]:
        """Import and register every allowed add-on; returns who provides them.

        Raises `PluginLoadError` when one is broken: an add-on may be the site's policy, so to go on
        without it would be to go on with less than the site asked for.
        """
        loaded = []
        for entry in self._entries:
            if entry.group != ADDONS_GROUP or self._disabled_by(entry):
                continue
            try:
                plugin = _import(entry)
                if not self._manager.is_registered(plugin):
                    self.register(plugin, name=f"{entry.owner} {entry.name}")
            except (Exception, SystemExit) as error:
                raise PluginLoadError(
                    f"add-on {entry.name!r} of {entry.owner} can't be used: {_say(error)}; mend or "
                    f"uninstall it, or name {entry.distribution} in IAOP_DISABLE_PLUGINS",
                    distribution=entry.owner,
                ) from error
            loaded.append(entry.owner)
        return loaded

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin object by hand, such as an application's own watcher of the lifecycle.

        Raises `pluggy.PluginValidationError`, having added nothing, when its hooks are wrong.
        """
        trial = _new_manager()
        trial.register(plugin)
        _check_hooks(trial)
        self._manager.register(plugin, name)

    # -- telling ---------------------------------------------------------------------------------

    def notify(self, hook: str, **facts: Any) -> None:
        """Tell every implementation of the hook, whatever the others do.

        A `RequestVetoedError` of a hook that may refuse goes to the caller, after all were told;
        anything else that an implementation raises is logged with its name.
        """
        veto: RequestVetoedError | None = None
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            try:
                implementation.function(*(facts[name] for name in implementation.argnames))
            except (Exception, SystemExit) as error:
                if isinstance(error, RequestVetoedError) and hook in _REFUSING_HOOKS:
                    veto = veto or error
                    continue
                _log.error(
                    "hook %s of %s failed: %s",
                    hook,
                    implementation.plugin_name,
                    type(error).__name__,
                    exc_info=_log.isEnabledFor(logging.DEBUG),
                )
        if veto is not None:
            raise veto


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    return manager


def _check_hooks(manager: pluggy.PluginManager) -> None:
    manager.check_pending()
    for plugin in manager.get_plugins():
        for caller in manager.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls():
                if implementation.wrapper or implementation.hookwrapper:
                    raise pluggy.PluginValidationError(
                        plugin, f"{caller.name} is told, not wrapped: write a plain hookimpl"
                    )


def _import(entry: _Entry) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"importing {entry.value} failed: {_say(error)}; mend it, or uninstall it with "
            f"'pip uninstall {entry.distribution}'",
            distribution=entry.owner,
        ) from error


def _say(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


def _say_duplicate(rivals: list[_Entry]) -> str:
    owners = " and ".join(sorted(rival.owner for rival in rivals))
    return (
        f"{owners} both offer it; uninstall one, or name one distribution in IAOP_DISABLE_PLUGINS"
    )


def _say_hidden(entry: _Entry) -> str:
    return (
        f"{entry.hidden_by} comes first on sys.path and is a broken or stale metadata folder of "
        f"the same distribution, which lacks this entry point; remove that folder"
    )


def _incompatibility(spec: BackendSpec, entry: _Entry) -> str:
    """Why the API version does not fit, or `""`."""
    match = re.fullmatch(r"(\d+)\.(\d+)", spec.api_version)
    if match is None:
        return f"its API version {spec.api_version!r} is not of the form MAJOR.MINOR"
    major, minor = int(match[1]), int(match[2])
    core_major, core_minor = (int(part) for part in API_VERSION.split("."))
    if (major, minor) > (core_major, core_minor):
        return (
            f"it is written for plugin API {spec.api_version}, and this iaop-core offers "
            f"{API_VERSION}; upgrade iaop-core"
        )
    if major < core_major:
        return (
            f"it is written for plugin API {spec.api_version}, and this iaop-core offers "
            f"{API_VERSION}; upgrade {entry.distribution}"
        )
    return ""


def _names(variable: str, given: Iterable[str] | None) -> frozenset[str]:
    names = os.environ.get(variable, "").split(",") if given is None else given
    return frozenset(_normalised(name) for name in names if name.strip())


def _normalised(name: str) -> str:
    """The name in the form in which distribution names compare (PyPA's names specification)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# -- metadata -----------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[_Entry, ...]:
    """Every entry point of our groups on the path.

    Of a distribution that is on the path twice the first is the installed one, as for imports. What
    only a later one offers is kept, marked with the folder that hides it.
    """
    entries: list[_Entry] = []
    first_seen: dict[str, str] = {}
    folders: set[str] = set()
    for distribution in importlib_metadata.distributions(path=list(path)):
        name, folder = _identify(distribution)
        if not name or folder in folders:
            continue
        folders.add(folder)
        hidden_by = first_seen.setdefault(_normalised(name), folder)
        known = {(e.group, e.name, _normalised(e.distribution)) for e in entries}
        for entry_point in _entry_points(distribution):
            key = (entry_point.group, entry_point.name, _normalised(name))
            if entry_point.group in (BACKENDS_GROUP, ADDONS_GROUP) and key not in known:
                entries.append(
                    _Entry(
                        name=entry_point.name,
                        group=entry_point.group,
                        value=entry_point.value,
                        distribution=name,
                        version=_metadata(distribution).get("Version", ""),
                        hidden_by="" if hidden_by == folder else hidden_by,
                    )
                )
    return tuple(entries)


def _entry_points(distribution: Any) -> Iterable[Any]:
    """Its entry points when some may be ours; none when they are unreadable, which is logged."""
    try:
        text = distribution.read_text("entry_points.txt") or ""
        return distribution.entry_points if PROJECT_NAME in text else ()
    except Exception as error:
        _log.warning("entry points of %s are unreadable: %s", _identify(distribution)[1], error)
        return ()


def _identify(distribution: Any) -> tuple[str, str]:
    """A distribution's name and its metadata folder.

    The folder's name holds the name, which spares reading the metadata of hundreds of others.
    """
    path = getattr(distribution, "_path", None)
    stem, _, suffix = str(getattr(path, "name", "")).rpartition(".")
    if suffix in ("dist-info", "egg-info") and stem:
        # NAME-VERSION, and of an egg perhaps -pyX.Y-PLATFORM; an old tool left dashes in the name.
        match = re.fullmatch(r"(.+?)(?:-v?\d[^-]*(?:-py\d.*)?)?", stem)
        return (match[1] if match else stem).replace("_", "-"), str(path)
    name = _metadata(distribution).get("Name", "")
    return name, str(path or name)


def _metadata(distribution: Any) -> Mapping[str, str]:
    try:
        return dict(distribution.metadata or {})
    except Exception:  # its METADATA is missing or unreadable; importlib_metadata's releases differ
        return {}


def _broken_metadata(path: tuple[str, ...]) -> list[str]:
    return [
        _identify(distribution)[1]
        for distribution in importlib_metadata.distributions(path=list(path))
        if not (_metadata(distribution).get("Name") and _has_readable_entry_points(distribution))
    ]


def _has_readable_entry_points(distribution: Any) -> bool:
    try:
        return all(entry_point.group for entry_point in distribution.entry_points)
    except Exception:
        return False
