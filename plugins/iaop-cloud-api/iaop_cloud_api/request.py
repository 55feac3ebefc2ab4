"""The body of a chat-completions request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from iaop_core import GenerationParams, Message
from iaop_core.errors import InvalidRequestError

__all__ = ["request_body"]


def request_body(
    model: str,
    messages: Sequence[Message],
    params: GenerationParams,
    *,
    max_tokens: int,
    max_tokens_field: str,
    stream: bool,
    stream_usage: bool,
) -> bytes:
    """The request as JSON. Only the parameters that the caller has set are in it.

    `max_tokens` holds where `params` has none, so a limit is always sent; `max_tokens_field` is the
    name that the endpoint reads it by. `top_logprobs` of 0 is left out: some endpoints then tell no
    log probabilities at all. Raises `InvalidRequestError` for text that is no Unicode.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": turn.role, "content": turn.content} for turn in messages],
        **params.given,
    }
    if params.response_format is not None:
        body["response_format"] = params.response_format.as_mapping
    if params.top_logprobs == 0:
        del body["top_logprobs"]
    body[max_tokens_field] = body.pop("max_tokens", max_tokens)
    if stream:
        body["stream"] = True
        if stream_usage:
            body["stream_options"] = {"include_usage": True}
    with suppress(UnicodeEncodeError):  # that error holds the prompt: no context of ours
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    raise InvalidRequestError(
        "the prompt, a source or a stop text holds half a surrogate pair, which is no text; "
        "decode it rightly where it comes from",
        param="messages",
    )
