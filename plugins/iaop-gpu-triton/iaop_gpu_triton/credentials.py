"""What a client shows a server: headers, tokens and certificates."""

from __future__ import annotations

import base64
import ssl
import time
from pathlib import Path

from iaop_core import Secret
from iaop_core.errors import ValuesError
from iaop_gpu_triton.settings import GpuTritonSettings

_KEEP_S = 30.0  # how long a secret is used before its reference is looked up again


class Credentials:
    """Headers and TLS files of the settings. Secrets are looked up when they are first needed.

    A rotated secret is used within 30 s. Raises `ValuesError` for a reference or a file that can't
    be read; no message shows a secret.
    """

    def __init__(self, settings: GpuTritonSettings) -> None:
        self._settings = settings
        self._headers: dict[str, str] = {}
        self._looked_up_at = -_KEEP_S

    def headers(self) -> dict[str, str]:
        """The headers of a request, their names in lower case."""
        if (now := time.monotonic()) - self._looked_up_at >= _KEEP_S:
            self._headers = self._look_up()
            self._looked_up_at = now
        return self._headers

    def _look_up(self) -> dict[str, str]:
        settings = self._settings
        headers = {
            name: value.reveal() if isinstance(value, Secret) else value
            for name, value in settings.headers.items()
        }
        if settings.bearer_token is not None:
            headers["authorization"] = f"Bearer {settings.bearer_token.reveal()}"
        if settings.password is not None:
            pair = f"{settings.username}:{settings.password.reveal()}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise ValuesError(
                    f"the header {name} can't be sent: its value holds a character that is not "
                    "printable ASCII",
                    path="headers",
                )
        return headers

    def pem(self, setting: str) -> bytes | None:
        """The content of the file that the setting names; None where it names none."""
        path = getattr(self._settings, setting)
        if not path:
            return None
        try:
            return Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValuesError(
                f"{setting} can't be read: {error.strerror or type(error).__name__}", path=setting
            ) from error

    def ssl_context(self) -> ssl.SSLContext:
        """For HTTP."""
        context = ssl.create_default_context()
        authorities = self.pem("ca_file")
        setting = "ca_file"
        try:
            if authorities is not None:
                context = ssl.create_default_context(cadata=authorities.decode("ascii", "replace"))
            setting = "client_cert_file"
            if self.pem(setting) is not None:
                context.load_cert_chain(
                    Path(self._settings.client_cert_file).expanduser(),
                    Path(self._settings.client_key_file).expanduser(),
                )
        except (ssl.SSLError, OSError) as error:
            raise ValuesError(
                f"{setting} holds no certificate that can be used", path=setting
            ) from error
        return context
