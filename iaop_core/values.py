"""The values file: what a site writes to choose backends, routes, tenants and the audit's place.

Read from YAML or TOML, or given as a mapping. Every key is checked, and an error names the file,
the line and the nearest known key. docs/values.md is the reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs import field, frozen, validators

from iaop_core.errors import ValuesError
from iaop_core.secret import Secret
from iaop_core.structure import structure
from iaop_core.valuesfile import KeyPath, Lines, as_one, read_values

__all__ = [
    "AuditSettings",
    "BackendSettings",
    "GatewaySettings",
    "RequirementSettings",
    "RouteSettings",
    "TargetSettings",
    "TenantSettings",
    "Values",
]

T = TypeVar("T")

_PASSWORD = re.compile(r"://[^/?#@:]*:[^/?#]+@|[?&]password=")

_finite: Any = validators.lt(math.inf)
_positive: Any = validators.and_(validators.gt(0), _finite)
_not_negative: Any = validators.and_(validators.ge(0), _finite)
_optional_positive = validators.optional(_positive)


@frozen(kw_only=True)
class GatewaySettings:
    """The gateway as a whole."""

    route: str = ""
    """The route of a call that names none; empty: the only route there is."""
    allow_offline: bool = False
    """Serve a backend in offline mode, whose answers come from no model."""
    timeout_ms: float = field(default=120_000, validator=_positive)
    """One call's whole time, with waiting for a slot and failing over."""
    slot_wait_ms: float = field(default=10_000, validator=_not_negative)
    """How long a call waits for a free slot of a backend."""
    retries: int = field(default=1, validator=validators.ge(0))
    """How often to go again through the backends of the route that could not take the call yet."""


@frozen(kw_only=True)
class BackendSettings:
    """One backend of the site: a plugin with its settings and its model."""

    plugin: str
    """The plugin's name: its entry point in the group `iaop.backends`."""
    model: str = ""
    """The model's id; empty: the plugin's default."""
    max_concurrency: int | None = field(default=None, validator=_optional_positive)
    """Calls at a time; None: what the backend's capabilities say, which is also the limit."""
    settings: Mapping[str, Any] = field(factory=dict, repr=False)
    """The plugin's own settings."""


@frozen(kw_only=True)
class TargetSettings:
    """A backend that serves a route, and its share of the calls."""

    backend: str
    weight: float = field(default=1, validator=_not_negative)


@frozen(kw_only=True)
class RequirementSettings:
    """What every backend that serves the route must have."""

    on_premises: bool | None = None
    """True: a call never leaves the site, whatever fails. False: it may. Not given: it may only
    when a target of the route is off site itself; the fallbacks never widen that."""
    streaming: bool = False
    """Real deltas, not the whole answer in one."""


@frozen(kw_only=True)
class RouteSettings:
    """Which backends serve a kind of call."""

    targets: tuple[TargetSettings, ...] = field()
    fallback: tuple[str, ...] = ()
    """Backends to try, in this order, when a target can't take the call."""
    require: RequirementSettings = RequirementSettings()
    timeout_ms: float | None = field(default=None, validator=_optional_positive)
    """In place of the gateway's."""

    @targets.validator
    def _check_targets(self, _attribute: object, targets: tuple[TargetSettings, ...]) -> None:
        if not any(target.weight > 0 for target in targets):
            raise ValueError("'targets' need one with a weight above 0")


@frozen(kw_only=True)
class TenantSettings:
    """Someone who is billed. None is no limit."""

    api_key: Secret | None = None
    tokens_per_day: int | None = field(default=None, validator=_optional_positive)
    """Prompt and answer tokens in a day of UTC."""
    requests_per_minute: int | None = field(default=None, validator=_optional_positive)


@frozen(kw_only=True)
class AuditSettings:
    """Where the record of every call goes."""

    url: str | Secret = field(default="sqlite:///iaop-audit.db")
    """A database URL as SQLAlchemy has them; a password in it is given by reference."""

    @url.validator
    def _check_url(self, _attribute: object, url: str | Secret) -> None:
        if isinstance(url, str) and _PASSWORD.search(url):
            raise ValueError(
                "'url' holds a password; give it by reference, ${env:NAME} or ${file:PATH}"
            )


@frozen(kw_only=True)
class Values:
    """A site's values, checked."""

    gateway: GatewaySettings = GatewaySettings()
    backends: Mapping[str, BackendSettings]
    routes: Mapping[str, RouteSettings] = field(factory=dict)
    """Without any, `gateway.route` names the one backend to use; if there is only one, that."""
    tenants: Mapping[str, TenantSettings] = field(factory=dict)
    audit: AuditSettings = AuditSettings()
    _lines: Lines = field(init=False, factory=Lines, repr=False, eq=False)

    @classmethod
    def load(cls, values: Values | Mapping[str, Any] | str | Path) -> Values:
        """Values from a file (`.yaml`, `.yml` or `.toml`) or a mapping; checked values as they are.

        Raises one `ValuesError` that tells every problem.
        """
        if isinstance(values, Values):
            return values
        data: object = values
        lines = Lines()
        if isinstance(values, str | Path):
            data, lines = read_values(Path(values))
        checked = structure(data, cls, lines)
        object.__setattr__(checked, "_lines", lines)
        if problems := [lines.error(*problem) for problem in checked._contradictions()]:
            raise as_one(problems)
        return checked

    def __attrs_post_init__(self) -> None:
        only = next(iter(self.backends)) if len(self.backends) == 1 else ""
        name = self.gateway.route or only
        if not self.routes and name in self.backends:
            route = RouteSettings(targets=(TargetSettings(backend=name),))
            object.__setattr__(self, "routes", {name: route})

    def _contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        where: KeyPath
        if not self.backends:
            yield ("backends",), "at least one backend is needed"
        elif not self.routes and not self.gateway.route:
            yield (
                ("gateway", "route"),
                "there are several backends and no routes: name one here, or write routes",
            )
        for name, route in self.routes.items():
            for index, target in enumerate(route.targets):
                if target.backend not in self.backends:
                    where = ("routes", name, "targets", index, "backend")
                    yield where, _say_unknown("backend", target.backend, self.backends)
            for index, fallback in enumerate(route.fallback):
                if fallback not in self.backends:
                    where = ("routes", name, "fallback", index)
                    yield where, _say_unknown("backend", fallback, self.backends)
        if self.gateway.route and self.gateway.route not in self.routes:
            known = self.routes or self.backends
            yield ("gateway", "route"), _say_unknown("route", self.gateway.route, known)

    def default_route(self) -> str:
        """The route of a call that names none. Raises `ValuesError` when it isn't clear."""
        if self.gateway.route:
            return self.gateway.route
        if len(self.routes) == 1:
            return next(iter(self.routes))
        raise self.error(
            ("gateway", "route"),
            f"there are several routes ({', '.join(self.routes)}): name one in gateway.route or in "
            "the call",
        )

    def plugin_settings(self, backend: str, settings_class: type[T]) -> T:
        """The settings of a backend as its plugin's class. Raises `ValuesError`."""
        path = ("backends", backend, "settings")
        return structure(self.backends[backend].settings, settings_class, self._lines, path)

    def error(self, path: KeyPath, message: str) -> ValuesError:
        """An error at a key of these values, with its file and line."""
        return self._lines.error(path, message)

    def as_data(self) -> dict[str, Any]:
        """The values with their defaults, in YAML's types; secrets as their references."""
        return self.plain(self)  # type: ignore[no-any-return]

    @classmethod
    def plain(cls, value: Any) -> Any:
        """Any settings in YAML's types; secrets as their references."""
        if isinstance(value, Secret):
            return value.reference
        if attrs.has(type(value)):
            fields = attrs.fields(type(value))
            return {a.name: cls.plain(getattr(value, a.name)) for a in fields if a.init}
        if isinstance(value, Mapping):
            return {key: cls.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [cls.plain(item) for item in value]
        return value


def _say_unknown(what: str, name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"no {what} is named {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
    )
