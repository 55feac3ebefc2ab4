"""The text of an answer from its bytes: whole characters, without the prompt and stop texts."""

from __future__ import annotations

import codecs

from iaop_core.errors import BackendProtocolError
from iaop_gpu_triton.settings import NAME


class AnswerText:
    """Takes an answer's bytes as they come and gives back what may be shown of them.

    `prompt` is taken off the beginning, when the answer begins with all of it. At the first of the
    `stops` the text ends, whatever comes after it. What could be the beginning of either is held
    until that is known; any other text is not delayed.
    """

    def __init__(self, *, prompt: str = "", stops: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._prompt = prompt
        self._stops = stops
        self._held = ""
        self.stopped = False
        """Whether a stop text was found."""

    def add(self, data: bytes) -> str:
        """The new text, perhaps none. Raises `BackendProtocolError` for what is not UTF-8."""
        try:
            text = self._decoder.decode(data)
        except UnicodeDecodeError as error:
            raise BackendProtocolError(
                "the answer of the model on the Triton server is not UTF-8", backend=NAME
            ) from error
        if not text or self.stopped:
            return ""
        if self._prompt:
            text = self._without_prompt(text)
        return self._before_stop(text) if self._stops else text

    def end(self) -> str:
        """What was held, at the end of the answer; half a character is left out."""
        held, self._held, self._prompt = self._held, "", ""
        return "" if self.stopped else held

    def _without_prompt(self, text: str) -> str:
        text = self._held + text
        if self._prompt.startswith(text) and text != self._prompt:
            self._held = text
            return ""
        self._held, prompt, self._prompt = "", self._prompt, ""
        return text.removeprefix(prompt)

    def _before_stop(self, text: str) -> str:
        if self._prompt:
            return ""  # all of it is held
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        self._held = ""
        return text
