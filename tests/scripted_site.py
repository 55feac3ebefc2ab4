"""A gateway over scripted backends, with its audit database at hand."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripted_plugin import SCRIPTS, Script

from iaop_core import LLMGateway
from iaop_core.plugins import PluginRegistry


class ScriptedSite:
    """Makes gateways; a route `r` over the backends in the order of their scripts by default."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gateways: list[LLMGateway] = []

    def gateway(
        self,
        *scripts: Script,
        routes: Mapping[str, Any] | None = None,
        gateway: Mapping[str, Any] | None = None,
        tenants: Mapping[str, Any] | None = None,
        backends: Mapping[str, Mapping[str, Any]] | None = None,
        require: Mapping[str, Any] | None = None,
        url: str | None = None,
        registry: PluginRegistry | None = None,
        load: bool = True,
    ) -> LLMGateway:
        SCRIPTS.update({script.name: script for script in scripts})
        names = [script.name for script in scripts]
        first = {"targets": [{"backend": names[0]}], "fallback": names[1:]}
        made = LLMGateway.from_values(
            {
                "gateway": {"retries": 0, **(gateway or {})},
                "backends": {
                    name: {
                        "plugin": "scripted",
                        "model": "script",
                        "settings": {"script": name},
                        **(backends or {}).get(name, {}),
                    }
                    for name in names
                },
                "routes": routes or {"r": {**first, "require": require or {}}},
                "tenants": tenants or {},
                "audit": {"url": url or f"sqlite:///{self.folder / 'audit.db'}"},
            },
            registry=registry,
        )
        self.gateways.append(made)
        if load:
            made.load()
        return made

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.close()

    def rows(self) -> list[dict[str, Any]]:
        """What the audit database holds; of calls that were abandoned, soon."""
        connection = sqlite3.connect(self.folder / "audit.db")
        connection.row_factory = sqlite3.Row
        try:
            found = connection.execute("select * from iaop_calls order by id").fetchall()
        finally:
            connection.close()
        return [dict(row) for row in found]

    def row(self) -> dict[str, Any]:
        """The only row."""
        assert eventually(lambda: len(self.rows()) > 0)
        (row,) = self.rows()
        return row


def slots_in_use(gateway: LLMGateway, backend: str) -> int:
    return gateway._site.backends[backend].slots.in_use


def eventually(condition: Callable[[], bool], patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return met
