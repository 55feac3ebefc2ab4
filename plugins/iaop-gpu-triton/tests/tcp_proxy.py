"""A TCP proxy on loopback that can go silent or cut its connections, as networks do."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import Literal


class TcpProxy:
    """Forwards to a port of this machine; a context manager.

    `mode` may change at any time: `forward`; `silent` accepts and keeps connections open and drops
    all bytes, a black hole; `refuse` closes new connections at once. What comes waits for `delay_s`
    before it goes on. With `tls` it ends the clients' TLS. `to_server` counts the bytes that came
    from clients.
    """

    def __init__(self, target_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.to_server = 0
        self.delay_s = 0.0
        self._tls = tls
        self.mode: Literal["forward", "silent", "refuse"] = "forward"
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._servers: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.mode == "refuse":
                    client.close()
                    continue
                if self._tls is not None:
                    try:
                        client = self._tls.wrap_socket(client, server_side=True)
                    except OSError:
                        client.close()
                        continue
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += (client, server)
                self._servers.add(server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if sink in self._servers:
                    self.to_server += len(data)
                time.sleep(self.delay_s)
                if self.mode == "forward":
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
