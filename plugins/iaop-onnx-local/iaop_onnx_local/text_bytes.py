"""What each token of a vocabulary stands for, in bytes.

A character may be spread over several tokens, so text can only be put together from bytes. Two
kinds of vocabulary cover the language models in use: byte-level BPE, which writes each byte as a
printable character, and SentencePiece with byte fallback, which writes spaces as `▁` and single
bytes as `<0xE4>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["ByteReader", "byte_reader"]

ByteReader = Callable[[str], bytes]
"""From a token's text in the vocabulary to its bytes."""

_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")


def byte_reader(decoder: Mapping[str, Any] | None) -> tuple[ByteReader, bool]:
    """Chooses the reader for the `decoder` part of a `tokenizer.json`.

    Returns:
        The reader, and whether the first space of a text is dropped.

    Raises:
        ValueError: another kind of decoder; the message names it.
    """
    parts = [decoder or {"type": None}]
    if parts[0]["type"] == "Sequence":
        parts = parts[0]["decoders"]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _read_byte_level, False
    if "Metaspace" in kinds or {"Replace", "ByteFallback"} <= set(kinds):
        metaspace = next((part for part in parts if part["type"] == "Metaspace"), None)
        if metaspace is not None:
            drops = metaspace.get("prepend_scheme", "always") != "never"
        else:
            drops = "Strip" in kinds
        return _read_sentencepiece, drops
    raise ValueError(f"its decoder {kinds} is neither byte-level nor SentencePiece's")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin-1 stands for itself, the rest is moved up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET: Final = _byte_alphabet()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # an added token stands as plain text
        return token.encode("utf-8")


def _read_sentencepiece(token: str) -> bytes:
    if match := _FALLBACK.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode("utf-8")
