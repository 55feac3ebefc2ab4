"""An engine in a process of its own, which stands still while another one is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from machine import process_cpu_s

__all__ = ["EngineProcess"]


class EngineProcess:
    """Starts an engine of `engines/`, loads its model and stops it with SIGSTOP.

    Args:
        name: how the tables call it.
        python: of its environment.
        script: its file in `engines/`.
        settings: what its `load` takes.
    """

    def __init__(self, name: str, python: Path, script: str, **settings: Any) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, see close
        self._process = subprocess.Popen(
            [python, Path(__file__).parent / "engines" / script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        self.versions: dict[str, str] = self.call("load", **settings)
        self.pause()

    def call(self, command: str, **arguments: Any) -> Any:
        """Carries out one command.

        Raises:
            RuntimeError: the engine's process has ended; the message has its last lines.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            self._log.seek(0)
            lines = self._log.read().splitlines()[-20:]
            raise RuntimeError(f"{self.name} has ended:\n" + "\n".join(lines))
        return json.loads(reply)

    @property
    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return process_cpu_s(self._process.pid)

    def pause(self) -> None:
        """Stops all its threads, those that wait in a loop for work too."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the process and frees its memory."""
        self.resume()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
