"""Prompts of exactly so many tokens, as chat messages and as the ids that these become."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from iaop_core.chat_template import ChatTemplate

__all__ = ["PromptMaker", "Request"]

Request: TypeAlias = dict[str, Any]
"""See `engines/protocol.py`."""

_COMMON = 8000
"""A tokenizer's first ids are its commonest words."""


class PromptMaker:
    """Makes prompts of random words for one model folder.

    The words begin with the first message, so that no two prompts share more than the template's
    first few tokens: what an engine remembers of one is of no use to the next.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = ChatTemplate(
            (folder / "chat_template.jinja").read_text("utf-8"), special_tokens={}
        )
        config = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
        ends = config["eos_token_id"]
        self.end_ids: list[int] = [ends] if isinstance(ends, int) else ends
        vocabulary = self._tokenizer.get_vocab()
        self._words = sorted(
            token[1:]
            for token, number in vocabulary.items()
            if number < _COMMON and re.fullmatch("Ġ[a-z]{3,}", token)
        )

    def make(self, seed: str, tokens: int, new_tokens: int, *, arrives_s: float = 0.0) -> Request:
        """A system message of one word, and a user's turn."""
        chance = random.Random(seed)
        messages = [self._turn("system", chance), self._turn("user", chance)]
        return self._fill(messages, tokens, new_tokens, chance, arrives_s)

    def make_pair(self, seed: str, shared: int, tokens: int, new_tokens: int) -> list[Request]:
        """Two prompts whose system message is the same; it ends with the token `shared`."""
        chance = random.Random(seed)
        system = self._turn("system", chance)
        self._lengthen(system, shared - len(self._encode([system], answer=False)), chance)
        return [
            self._fill([system, self._turn("user", chance)], tokens, new_tokens, chance, 0.0)
            for _ in range(2)
        ]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _fill(
        self,
        messages: list[dict[str, str]],
        tokens: int,
        new_tokens: int,
        chance: random.Random,
        arrives_s: float,
    ) -> Request:
        self._lengthen(messages[-1], tokens - len(self._encode(messages)), chance)
        ids = self._encode(messages)
        if len(ids) != tokens:
            raise ValueError(f"a prompt of {tokens} tokens came out with {len(ids)}")
        return {
            "messages": messages,
            "ids": ids,
            "new_tokens": new_tokens,
            "arrives_s": arrives_s,
        }

    def _turn(self, role: str, chance: random.Random) -> dict[str, str]:
        return {"role": role, "content": chance.choice(self._words)}

    def _lengthen(self, message: dict[str, str], tokens: int, chance: random.Random) -> None:
        message["content"] += "".join(f" {word}" for word in chance.choices(self._words, k=tokens))

    def _encode(self, messages: list[dict[str, str]], *, answer: bool = True) -> list[int]:
        text = self._template.render(messages)
        if not answer:  # the turns alone, without the beginning of an answer
            text = text[: text.rindex(messages[-1]["content"])] + messages[-1]["content"]
        return self._tokenizer.encode(text, add_special_tokens=False).ids
