"""Secrets: known by reference, shown nowhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

from iaop_core.errors import ValuesError

__all__ = ["Secret"]

_REFERENCE = re.compile(r"\$\{(?P<kind>[a-z]*):(?P<name>[^}]*)\}")


class Secret:
    """A text that no repr, log or error shows.

    Made from a reference, `${env:NAME}` or `${file:PATH}`, which may stand inside other text, or
    from the text itself when `literal`. A reference is looked up at each `reveal`, so a rotated
    file is noticed.
    """

    __slots__ = ("_literal", "_template")

    def __init__(self, text: str, *, literal: bool = False) -> None:
        """Raise `ValuesError` unless the text holds a reference, when it is not `literal`."""
        if not literal:
            kinds = [match["kind"] for match in _REFERENCE.finditer(text)]
            if not kinds:
                raise ValuesError(
                    "a secret is given by reference, ${env:NAME} or ${file:PATH}, never as text"
                )
            if unknown := sorted(set(kinds) - {"env", "file"}):
                raise ValuesError(
                    f"unknown secret reference ${{{unknown[0]}:…}}; "
                    "use ${env:NAME} or ${file:PATH}"
                )
        self._template = text
        self._literal = literal

    @property
    def reference(self) -> str:
        """The reference as it was written, with any other text around it masked."""
        if self._literal:
            return "***"
        parts = [match[0] for match in _REFERENCE.finditer(self._template)]
        whole = "".join(parts) == self._template
        return self._template if whole else "***".join(["", *parts, ""])

    def reveal(self) -> str:
        """The secret itself, without a newline at its end.

        Raises `ValuesError`, naming the reference, when it can't be looked up, or is empty or holds
        a line break or other control character.
        """
        text = self._template
        if not self._literal:
            text = _REFERENCE.sub(_look_up, text)
        text = text.rstrip("\r\n")
        if not text or any(ord(character) < 32 or ord(character) == 127 for character in text):
            what = "is empty" if not text else "holds a line break or other control character"
            raise ValuesError(f"the secret {self.reference} {what}")
        return text

    def __repr__(self) -> str:
        return f"Secret({self.reference!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, bool]:
        return self._template, self._literal


def _look_up(reference: re.Match[str]) -> str:
    name = reference["name"]
    if reference["kind"] == "env":
        if name not in os.environ:
            raise ValuesError(f"{reference[0]}: the environment variable {name} is not set")
        return os.environ[name]
    try:
        return Path(name).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValuesError(f"{reference[0]}: the file can't be read: {why}") from None
