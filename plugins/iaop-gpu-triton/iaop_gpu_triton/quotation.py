"""A server's own words for an error, fit to be shown."""

from __future__ import annotations

_READ = 2000
_SHOWN = 300
_LEAST_WHOLE = 4  # bytes; a shorter prompt is in any message by chance
_RUN = 12  # bytes: three words of a letter or two, four Chinese characters
_HIDDEN = b"[prompt]"


def quoted(message: str | None, prompt: str = "") -> str:
    """One line of at most 300 characters, in which nothing of the prompt stands.

    That is: neither the whole prompt nor twelve bytes or more that follow each other in it, line
    breaks and spaces taken as equal. Looking for them takes 0.15 s for each megabyte of the prompt.
    """
    text = " ".join((message or "no message")[:_READ].split())
    if prompt:
        text = _without(text.encode(errors="replace"), " ".join(prompt.split()).encode())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _without(text: bytes, private: bytes) -> str:
    if len(private) >= _LEAST_WHOLE:
        text = text.replace(private, _HIDDEN)
    kept: list[bytes] = []
    at = 0
    while at < len(text) and len(kept) <= _SHOWN:
        end = _end_of_run(text, at, private)
        kept.append(_HIDDEN if end else text[at : at + 1])
        at = end or at + 1
    if at < len(text):
        kept.append("…".encode())
    return b"".join(kept).decode(errors="ignore")  # a run may end within a character


def _end_of_run(text: bytes, start: int, private: bytes) -> int:
    """Where the run of bytes ends that begins at `start` and is in `private`; 0: there is none."""
    end = start + _RUN
    if end > len(text) or text[start:end] not in private:
        return 0
    while end < len(text) and text[start : end + 1] in private:
        end += 1
    return end
