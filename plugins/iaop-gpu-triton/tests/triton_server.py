"""A real Triton Inference Server on loopback, without containers and without a GPU.

The wheel of ``nvidia-pytriton`` carries the server binary with its Python backend. It is fetched
once into the cache folder (55 MB, 145 MB unpacked) and used for its binary only: nothing of it is
installed. ``TritonServer`` starts it over the models beside this file; by hand::

    python triton_server.py --model echo --model smollm2

prints one JSON line with the addresses as soon as the models are ready, and serves until Ctrl-C.

Needs x86-64 Linux, glibc 2.35 or newer, and a shared libpython 3.9 to 3.12 (Debian and Ubuntu:
``libpython3.11``, ``libpython3.10``, …), which the Python backend's helper process links.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS_DIR = HERE / "triton_models"
MODEL_LIB_DIR = HERE / "triton_model_lib"
WHEEL = "nvidia-pytriton==0.7.0"  # Triton 2.51.0
MIN_GLIBC = (2, 35)
# Stubs of the wheel for which a numpy 1 wheel exists; numpy 2 kills the stub at the first text.
STUB_PYTHONS = ("3.11", "3.12", "3.10", "3.9")
STUB_PACKAGES = ("numpy==1.26.4",)
LLM_PACKAGES = (*STUB_PACKAGES, "onnxruntime>=1.20,<2", "tokenizers>=0.21,<1")
LLM_MODELS = frozenset({"smollm2"})
START_TIMEOUT_S = 90.0
EXIT_TIMEOUT_S = 3  # the server's own wait for its models when it is told to stop


class TritonUnavailableError(RuntimeError):
    """The real server can't run on this machine; the message says what is missing."""


def cache_dir() -> Path:
    """Where downloads are kept: ``IAOP_CACHE_DIR``, else ``iaop`` in the user's cache folder."""
    if own := os.environ.get("IAOP_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iaop"


@functools.cache
def stub_python() -> str:
    """The Python version for the models' helper process, such as ``3.11``."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise TritonUnavailableError(
            f"the Triton server binary runs on x86-64 Linux only, this is {sys.platform} on "
            f"{platform.machine()}"
        )
    libc, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "unknown libc").partition(" ")
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < MIN_GLIBC:
        raise TritonUnavailableError(
            f"the Triton server binary needs glibc {'.'.join(map(str, MIN_GLIBC))} or newer "
            f"(Debian 12, Ubuntu 22.04), this machine has {libc} {version}"
        )
    for candidate in STUB_PYTHONS:
        if ctypes.util.find_library(f"python{candidate}"):
            return candidate
    raise TritonUnavailableError(
        "Triton's Python backend needs a shared libpython, and none of "
        f"{', '.join(f'libpython{v}.so.1.0' for v in STUB_PYTHONS)} is installed; "
        "on Debian 12: apt-get install libpython3.11"
    )


def server_home() -> Path:
    """The folder of the unpacked server, fetched on the first call."""
    python = stub_python()

    def unpack(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as download:
            pip("download", "--no-deps", "--only-binary=:all:", "--dest", download, WHEEL)
            (wheel,) = Path(download).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                # The binaries find nvidia_pytriton.libs by relative path: keep both side by side.
                archive.extractall(target)
        home = target / "pytriton" / "tritonserver"
        stub = home / "backends" / "python" / "triton_python_backend_stub"
        shutil.copy(home / "python_backend_stubs" / python / stub.name, stub)
        for program in (stub, home / "bin" / "tritonserver"):
            program.chmod(0o755)

    name = f"{WHEEL.replace('==', '-')}-py{python}"
    return once(cache_dir() / "triton" / name, unpack) / "pytriton" / "tritonserver"


def package_dir(requirements: Sequence[str]) -> Path:
    """A folder with these packages for the stub's Python, which is not the tests' own."""
    python = stub_python()

    def install(target: Path) -> None:
        platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "2014")]
        pip(
            *("install", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp"),
            *(f"--python-version={python}", *platforms, "--target", str(target), *requirements),
        )

    key = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    return once(cache_dir() / "triton" / f"packages-{key}-py{python}", install)


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder under a lock and move it in place whole: nobody ever sees half of one."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            partial = target.with_name(f"{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was aborted
            partial.mkdir()
            make(partial)
            partial.rename(target)
    return target


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise TritonUnavailableError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


class TritonServer:
    """A server process over some of the models beside this file; a context manager.

    ``models`` are put into its repository; ``preload`` (default: all of them) are loaded at the
    start. ``control_mode`` is Triton's own: with ``none`` and ``poll`` everything in the repository
    is loaded and the repository API's load and unload are refused. ``options`` go on the command
    line. Stopped and started again, the server keeps its ports, its repository and its log.
    """

    def __init__(
        self,
        *models: str,
        preload: Sequence[str] | None = None,
        control_mode: str = "explicit",
        grpc_port: int = 0,
        http_port: int = 0,
        options: Sequence[str] = (),
    ) -> None:
        self.options = tuple(options)
        self.models = models
        self.preload = models if preload is None else tuple(preload)
        self.control_mode = control_mode
        self.grpc_port = grpc_port or free_port()
        self.http_port = http_port or free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="iaop-triton-")
        self.repository = Path(self._folder.name) / "models"
        self.log_path = Path(self._folder.name) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        for model in models:
            shutil.copytree(MODELS_DIR / model, self.repository / model)

    @property
    def _shm_prefix(self) -> str:
        return f"iaop-triton-{self.grpc_port}-"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process else None

    def __enter__(self) -> TritonServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and wait until it is ready with its preloaded models."""
        home = server_home()
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                self._command(home),
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers_ready():
            if self._process.poll() is not None:
                raise TritonUnavailableError(f"the server ended at once:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TritonUnavailableError(
                    f"the server is not ready after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}"
                )
            time.sleep(0.05)

    def _command(self, home: Path) -> list[str]:
        command = [
            # Ends the server when the process that started it dies without stopping it.
            *("setpriv", "--pdeathsig", "SIGTERM", "--"),
            str(home / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={home / 'backends'}",
            f"--model-control-mode={self.control_mode}",
            "--disable-auto-complete-config",
            "--allow-metrics=false",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--http-address=127.0.0.1",
            f"--http-port={self.http_port}",
            *self.options,
        ]
        if self.control_mode == "explicit":
            command += [f"--load-model={model}" for model in self.preload]
        return command

    def _environment(self) -> dict[str, str]:
        # The path reaches the models by a variable of its own: the stub ignores PYTHONPATH.
        real = LLM_MODELS.intersection(self.models)
        packages = package_dir(LLM_PACKAGES if real else STUB_PACKAGES)
        path = os.pathsep.join(map(str, (MODEL_LIB_DIR, packages)))
        environment = {**os.environ, "IAOP_TRITON_MODEL_PATH": path}
        if real:
            from smollm2_folder import smollm2_folder

            environment["IAOP_TRITON_SMOLLM2"] = str(smollm2_folder(cache_dir()))
        return environment

    def _answers_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def add_version(self, model: str, version: int) -> None:
        """Put a further version of the model into the repository, and have all of them served."""
        folder = self.repository / model
        shutil.copytree(folder / "1", folder / str(version))
        config = folder / "config.pbtxt"
        if "version_policy" not in (text := config.read_text()):
            config.write_text(f"{text}version_policy {{ all {{}} }}\n")

    def stop(self, *, timeout_s: float = 15.0) -> None:
        """End the process in order: SIGTERM, and SIGKILL when that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the process and its models' helper processes at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
            region.unlink(missing_ok=True)  # a killed server leaves its shared memory
        self._process = None

    def close(self) -> None:
        """Stop the server and remove its repository and log."""
        self.stop()
        self._folder.cleanup()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM into the KeyboardInterrupt that Ctrl-C gives."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve some test models with a real Triton.")
    known = sorted(path.name for path in MODELS_DIR.iterdir())
    parser.add_argument("--model", action="append", choices=known, required=True)
    parser.add_argument("--grpc-port", type=int, default=0, help="default: a free one")
    parser.add_argument("--http-port", type=int, default=0, help="default: a free one")
    options = parser.parse_args()
    with (
        ended_by_signals(),
        TritonServer(
            *options.model, grpc_port=options.grpc_port, http_port=options.http_port
        ) as server,
    ):
        addresses = {
            "grpc_url": server.grpc_url,
            "http_url": server.http_url,
            "grpc_port": server.grpc_port,
            "http_port": server.http_port,
            "models": options.model,
            "pid": server.pid,
            "log": str(server.log_path),
        }
        print(json.dumps(addresses), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
