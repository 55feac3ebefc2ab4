"""The model's tokenizer: prompts to ids, ids to bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from iaop_core.errors import InvalidRequestError
from iaop_onnx_local.text_bytes import byte_reader
from iaop_onnx_local.text_stream import Utf8Stream

__all__ = ["TextTokenizer"]

_PRIVATE_USE: Final = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class TextTokenizer:
    """A `tokenizer.json`.

    Raises:
        ValueError: the file can't be read as a tokenizer, or its tokens can't be told in bytes.
    """

    def __init__(self, path: Path) -> None:
        text = path.read_text("utf-8")
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} can't be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            self._read_bytes, self._drops_space = byte_reader(json.loads(text).get("decoder"))
        except ValueError as error:
            raise ValueError(f"{path} can't be used: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        controls = {number: token.content for number, token in added.items() if token.special}
        longest_first = sorted(controls.values(), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first))) if controls else None
        self._bytes: dict[int, bytes] = dict.fromkeys(controls, b"")
        self._bos = self._find_bos()
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        """One more than the highest token id; a model may have more logits."""
        self.control_ids = frozenset(controls)
        """Tokens that add nothing to the text."""

    def guard(self, texts: Sequence[str]) -> tuple[list[str], str]:
        """Marks the texts of control tokens inside messages, so that they stay plain text.

        Returns:
            The messages' texts, and the two characters that mark: pass them to `encode_prompt`.
            Where nothing had to be marked they are `""`.

        Raises:
            InvalidRequestError: the messages hold every private-use character.
        """
        if self._controls is None or not any(self._controls.search(text) for text in texts):
            return list(texts), ""
        used = set().union(*texts)
        unused = (chr(n) for n in chain(*_PRIVATE_USE) if chr(n) not in used)
        marks = "".join(islice(unused, 2))
        if len(marks) < 2:
            raise InvalidRequestError(
                "the prompt holds a control token's text and every private-use character, none of "
                "which is left to mark it with",
                param="messages",
            )
        return [
            self._controls.sub(lambda found: f"{marks[0]}{found[0]}{marks[1]}", text)
            for text in texts
        ], marks

    def encode_prompt(self, text: str, marks: str = "") -> list[int]:
        """Encodes a whole prompt. It begins with exactly one BOS where the model wants one.

        Args:
            text: the rendered template, or plain text.
            marks: what `guard` returned.
        """
        if marks:
            ids = []
            for place, part in enumerate(re.split(f"{marks[0]}(.*?){marks[1]}", text, flags=re.S)):
                tokenizer = self._plain_tokenizer if place % 2 else self._tokenizer
                # A template that cuts messages up can leave a mark without its other half.
                whole = part.translate(dict.fromkeys(map(ord, marks)))
                ids += tokenizer.encode(whole, add_special_tokens=False).ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def token_text(self, token_id: int) -> str:
        """The token to show by itself: a control token's name, U+FFFD for a part of a character."""
        if token_id in self.control_ids:
            return self._tokenizer.id_to_token(token_id) or ""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; none for a control token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = b"" if token is None else self._read_bytes(token)
            self._bytes[token_id] = found
        return found

    @property
    def drops_first_space(self) -> bool:
        """Whether a space that begins a text is no part of it."""
        return self._drops_space

    def open_text(self) -> Utf8Stream:
        """The decoder for the bytes of one answer."""
        return Utf8Stream(drop_first_space=self._drops_space)

    def find_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """Reads the texts of control tokens as the plain text that they are in a message."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _find_bos(self) -> int | None:
        """The token that the tokenizer itself puts before a text, or None."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        dressed = self._tokenizer.encode("a", add_special_tokens=True).ids
        puts_one = len(dressed) > len(bare) and dressed[1 : 1 + len(bare)] == bare
        return dressed[0] if puts_one else None
