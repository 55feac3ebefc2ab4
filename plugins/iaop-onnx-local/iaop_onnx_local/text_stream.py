"""From tokens to text as they come: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["StopMatcher", "Utf8Stream"]


class Utf8Stream:
    """Decodes bytes in pieces. The first bytes of a character wait for the rest of it.

    Bytes that can't be UTF-8 become U+FFFD, once it is sure that they can't. A character that is
    still incomplete at the end is left out.
    """

    def __init__(self, *, drop_first_space: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_first_space = drop_first_space

    def feed(self, data: bytes) -> str:
        if self._drop_first_space and data:
            self._drop_first_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)


class StopMatcher:
    """Finds the first stop text in a stream of text, and holds back what may begin one.

    The match that is complete first wins; of those complete at the same character, the one that
    begins first. So where the text ends doesn't depend on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False
        """Whether a stop text was found; the text has ended then."""

    def feed(self, piece: str) -> str:
        """Takes new text; returns what can be shown now."""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.matched, self._held = True, ""
            return text[: min(ends)[1]]
        held = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns what was held back: the text ended before it became a stop text."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many of the last characters of the text begin the stop text."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
