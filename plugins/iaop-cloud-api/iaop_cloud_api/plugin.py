"""The entry point: what core learns of the backend without importing the HTTP client."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from iaop_cloud_api.settings import CloudApiSettings, capabilities_of
from iaop_core import BackendSpec, InferenceBackend, Probe, hookimpl


def _make(settings: CloudApiSettings) -> InferenceBackend:
    from iaop_cloud_api.backend import CloudApiBackend

    return CloudApiBackend(settings)


def _probe() -> Probe:
    if find_spec("aiohttp") is None:
        return Probe(
            usable=False, reason="aiohttp is not installed: pip install 'aiohttp>=3.12,<4'"
        )
    return Probe(usable=True)


@hookimpl
def iaop_backends() -> Sequence[BackendSpec]:
    return [
        BackendSpec(
            name="cloud-api",
            summary="Any OpenAI-compatible chat-completions endpoint",
            api_version="1.0",
            capabilities=capabilities_of(CloudApiSettings(offline=True), offline=False),
            settings_class=CloudApiSettings,
            factory=_make,
            probe=_probe,
        )
    ]
