"""The plugin: light to import, and found by its entry point."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import iaop_cloud_api
from iaop_cloud_api import plugin, settings
from iaop_cloud_api.backend import CloudApiBackend

LIGHT = """
import sys
import iaop_cloud_api.plugin
(spec,) = iaop_cloud_api.plugin.iaop_backends()
spec.probe(), spec.capabilities, spec.settings_class(base_url="https://api.example.com/v1")
print(sorted({"aiohttp", "yarl", "numpy", "sqlalchemy", "pytest"} & sys.modules.keys()))
"""


def test_plugin_is_read_without_importing_the_client() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plugin_is_found_by_its_entry_point() -> None:
    (point,) = entry_points(group="iaop.backends", name="cloud-api")
    assert point.load() is plugin


def test_plugin_offers_the_backend() -> None:
    (spec,) = plugin.iaop_backends()
    assert spec.name == CloudApiBackend.name == "cloud-api"
    assert spec.probe().usable
    backend = spec.factory(spec.settings_class(base_url="https://api.example.com/v1"))
    assert isinstance(backend, CloudApiBackend)
    assert backend.capabilities == spec.capabilities


def test_package_exports_what_it_says() -> None:
    assert {name: getattr(iaop_cloud_api, name) for name in iaop_cloud_api.__all__} == {
        "CloudApiBackend": CloudApiBackend,
        "CloudApiSettings": settings.CloudApiSettings,
    }
