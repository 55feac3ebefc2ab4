"""Whether a route may use a backend at all."""

from __future__ import annotations

from iaop_core.errors import CapabilityNotSupportedError
from iaop_core.sitebackend import SiteBackend
from iaop_core.values import RouteSettings

__all__ = ["check_policy"]


def check_policy(route_name: str, route: RouteSettings, backend: SiteBackend) -> None:
    """Raise `CapabilityNotSupportedError` unless the backend has what the route requires.

    A backend off site is allowed when the route says `require.on_premises: false`, or says nothing
    of it and names the backend among its targets: failing over never leaves the site unasked.
    """
    capabilities, require = backend.instance().capabilities, route.require
    may_leave = require.on_premises is False or (
        require.on_premises is None
        and any(target.backend == backend.name for target in route.targets)
    )
    if not (capabilities.on_premises or may_leave):
        raise CapabilityNotSupportedError(
            f"route {route_name!r} may not use backend {backend.name!r}: it is off site "
            "(on_premises=False), and calls of this route never leave the site; if they may, say "
            f"routes.{route_name}.require.on_premises: false",
            backend=backend.name,
            capability="on_premises",
        )
    if require.streaming and not capabilities.streaming:
        raise CapabilityNotSupportedError(
            f"route {route_name!r} requires streaming, which backend {backend.name!r} lacks",
            backend=backend.name,
            capability="streaming",
        )
