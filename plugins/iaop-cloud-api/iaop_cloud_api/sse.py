"""Server-sent events, read from bytes by the rules of the WHATWG HTML standard, section 9.2.6."""

from __future__ import annotations

import re

__all__ = ["EventTooLongError", "SseReader"]

# Only these end a line. A text splitter would also split at U+2028 or U+0085, which are content.
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class EventTooLongError(Exception):
    """One event has more bytes than the reader takes."""


class SseReader:
    """Turns the bytes of an event stream, cut anywhere, into the data of its events.

    Comments and the fields `event`, `id` and `retry` are passed over. Lines are decoded whole, so
    no character is ever cut. Bytes that are no UTF-8 become U+FFFD, and an event that the stream's
    end leaves unfinished is dropped, both as the standard says.
    """

    def __init__(self, *, max_event_bytes: int = 8 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._bytes = 0
        self._rest: list[bytes] = []  # the pieces of the line that has not ended yet
        self._data: list[bytes] = []
        self._at_start = True
        self._after_cr = False

    def feed(self, piece: bytes) -> list[str]:
        """The data of each event that `piece` completes. Raises `EventTooLongError`."""
        if not piece:
            return []
        # A CR ends its line at once (waiting for the LF of a CRLF would hold an event back).
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        lines = _LINE_END.split(piece)
        self._rest.append(lines[0])
        events = []
        if len(lines) > 1:
            lines[0] = b"".join(self._rest)
            self._rest = [lines.pop()]
            if self._at_start:
                lines[0] = lines[0].removeprefix(_BOM)
                self._at_start = False
            for line in lines:
                if line:
                    self._take(line)
                elif self._data:
                    events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                    self._data = []
            self._bytes = sum(map(len, self._data))
        self._bytes += len(self._rest[-1])
        if self._bytes > self._max_event_bytes:
            raise EventTooLongError
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
