"""A loaded model: everything between chat messages and the engine's steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

from attrs import evolve, frozen

from iaop_core import GenerationParams, Message
from iaop_core.chat_template import ChatTemplate, ChatTemplateError
from iaop_core.errors import (
    CapabilityNotSupportedError,
    ContextLengthExceededError,
    InvalidRequestError,
    ModelLoadError,
)
from iaop_onnx_local.constraint import Constraint, ConstraintFactory
from iaop_onnx_local.decoder import Decoder, UnknownInputError
from iaop_onnx_local.engine import Engine, EngineLoad, Job
from iaop_onnx_local.growing_cache import GrowingCache
from iaop_onnx_local.kv_cache import ROUNDING, TOLERABLE, KvCache
from iaop_onnx_local.memory import usable_memory_bytes
from iaop_onnx_local.model_folder import ModelFolder, find_model_folder
from iaop_onnx_local.sampling import SamplingParams
from iaop_onnx_local.session import open_session
from iaop_onnx_local.settings import OnnxLocalSettings
from iaop_onnx_local.shared_cache import SharedCache
from iaop_onnx_local.tokenizer import TextTokenizer

__all__ = ["LocalModel", "Request"]

_log = logging.getLogger(__name__)


@frozen(slots=True)
class Request:
    """What the engine has to do for one answer."""

    prompt_ids: list[int]
    max_tokens: int
    """Already no more than the context has room for."""
    stops: tuple[str, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None


class LocalModel:
    """A model folder, loaded, and the engine that runs it. `load` makes one.

    The engine's thread ends with `close`, or when nothing holds on to the model any more.
    """

    def __init__(
        self,
        model_id: str,
        *,
        decoder: Decoder,
        engine: Engine,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        end_token_ids: frozenset[int],
        context_length: int,
        defaults: SamplingParams,
        max_tokens: int,
    ) -> None:
        self.model_id = model_id
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        self.context_length = context_length
        self._engine = engine
        self._template = template
        self._constraints = ConstraintFactory(tokenizer, end_token_ids)
        self._defaults = defaults
        self._max_tokens = max_tokens
        self.process_id = os.getpid()
        """The process that has the engine's threads; a forked one has not."""
        finalize(self, engine.close)

    @classmethod
    def load(cls, model_id: str, settings: OnnxLocalSettings) -> LocalModel:
        """Loads a model by its id. Touches no network.

        Raises:
            ModelLoadError: it can't be found or can't be run; the message says why.
        """
        folder = find_model_folder(model_id)
        path = folder.find_model_file(settings.model_file)
        end_token_ids = folder.end_token_ids
        tokenizer_file = folder.path / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise folder.fail("there is no tokenizer.json")
        try:
            tokenizer = TextTokenizer(tokenizer_file)
            template = _load_template(folder, settings.chat_template)
            opened = open_session(
                path,
                device=settings.device,
                threads=settings.threads,
                provider_options=settings.provider_options,
                provider_library=settings.provider_library,
            )
            decoder = Decoder(
                opened,
                path,
                head_size=folder.head_size,
                kv_heads=folder.kv_heads,
                vocabulary=folder.vocabulary,
            )
        except ModelLoadError as error:
            error.model = model_id
            raise
        except (OSError, UnknownInputError, ValueError) as error:
            raise folder.fail(str(error)) from error
        cache = _make_cache(decoder, folder, settings)
        engine = Engine(
            cache,
            prompt_part=settings.prompt_part,
            max_waiting=settings.max_waiting,
            lends_answers=not settings.batch_invariant,
            name=f"iaop-onnx-{folder.path.name}",
        )
        _log.info(
            "loaded %r from %s on %s with %d threads; %d answers at a time%s; their cache takes "
            "%d bytes per token, %d MB at most",
            model_id,
            path,
            decoder.device,
            decoder.threads,
            cache.rows,
            "" if cache.joins_rows else " in turns",
            decoder.cache_bytes_per_token,
            cache.max_bytes / 1e6,
        )
        return cls(
            model_id,
            decoder=decoder,
            engine=engine,
            tokenizer=tokenizer,
            template=template,
            end_token_ids=end_token_ids,
            context_length=cache.capacity,
            defaults=_default_sampling(folder),
            max_tokens=settings.max_tokens,
        )

    def prepare(self, messages: Sequence[Message], params: GenerationParams) -> Request:
        """Encodes the prompt and settles the limits.

        `max_tokens` beyond what the context has room for means that room. A prompt is never cut.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for an answer.
            InvalidRequestError: the chat template refuses the messages or leaves nothing, or a
                `logit_bias` names a token that the model doesn't have.
            CapabilityNotSupportedError: the model has no chat template, and this is a chat.
        """
        prompt_ids = self._encode(messages)
        if not prompt_ids:
            raise InvalidRequestError(
                f"the prompt has no tokens, as the chat template of model {self.model_id!r} or its "
                "tokenizer has it",
                param="messages",
            )
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceededError(
                f"the prompt has {len(prompt_ids)} tokens, and the context of model "
                f"{self.model_id!r} has {self.context_length} for prompt and answer together; "
                "shorten the prompt",
                prompt_tokens=len(prompt_ids),
                context_tokens=self.context_length,
            )
        return Request(
            prompt_ids=prompt_ids,
            max_tokens=min(params.max_tokens or self._max_tokens, room),
            stops=params.stop,
            sampling=self._sampling(params),
            constraint=self._constraints.open(params),
        )

    def submit(self, job: Job) -> Callable[[], None]:
        """Hands a job to the engine; see `Engine.submit`."""
        return self._engine.submit(job)

    @property
    def load_now(self) -> EngineLoad:
        """What the engine is doing; never waits for it."""
        return self._engine.load

    def close(self, *, finish: bool = False) -> None:
        """Ends the answers under way with an error, or (`finish`) lets them end."""
        self._engine.close(finish=finish)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        texts, marks = self.tokenizer.guard([message.content for message in messages])
        if self._template is not None:
            turns = [
                {"role": message.role, "content": text}
                for message, text in zip(messages, texts, strict=True)
            ]
            try:
                text = self._template.render(turns)
            except ChatTemplateError as error:
                raise InvalidRequestError(
                    f"model {self.model_id!r}: {error}", param="messages"
                ) from error
        elif len(messages) == 1 and messages[0].role == "user":
            text = texts[0]
        else:
            raise CapabilityNotSupportedError(
                f"model {self.model_id!r} has no chat template, so it continues one text and holds "
                "no chat; set chat_template to a Jinja file to give it one",
                capability="chat",
            )
        return self.tokenizer.encode_prompt(text, marks)

    def _sampling(self, params: GenerationParams) -> SamplingParams:
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_k", "top_p", "min_p", "seed")
            if (value := getattr(params, name)) is not None
        }
        defaults = self._defaults
        if given and "temperature" not in given and defaults.temperature == 0:
            given["temperature"] = 1.0  # who narrows the choice, or seeds it, wants to choose
        if params.logprobs:
            given["top_logprobs"] = params.top_logprobs or 0
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
            if (value := getattr(params, name)) is not None:
                given[name] = value
        unknown = [t for t in given.get("logit_bias", ()) if t >= self.decoder.vocabulary]
        if unknown:
            raise InvalidRequestError(
                f"logit_bias names token {unknown[0]}, and the model has "
                f"{self.decoder.vocabulary} tokens",
                param="logit_bias",
            )
        return evolve(defaults, **given)


def _make_cache(decoder: Decoder, folder: ModelFolder, settings: OnnxLocalSettings) -> KvCache:
    rows, capacity = settings.max_concurrency, folder.context_length(settings.context_length)
    needed, usable = rows * capacity * decoder.cache_bytes_per_token, usable_memory_bytes()
    if decoder.memory == "cpu" and usable is not None and needed > usable:
        raise folder.fail(
            f"{rows} answers of {capacity} tokens can take {needed / 1e6:.0f} MB of cache, and "
            f"there are {usable / 1e6:.0f} MB of memory; lower max_concurrency or context_length"
        )
    try:
        cache: KvCache
        if decoder.shares_buffer:
            cache = SharedCache(
                decoder, rows=rows, capacity=capacity, pairs=settings.batch_invariant
            )
        else:
            cache = GrowingCache(decoder, rows=rows, capacity=capacity)
        difference = cache.difference()
    except Exception as error:  # ONNX Runtime's have no common base
        raise folder.fail(f"its first step failed: {error}") from error
    if difference > TOLERABLE:
        cache.joins_rows = False
        _log.warning(
            "model %r does not compute answers of different lengths together as it does one by "
            "one, so they are made in turns",
            folder.model_id,
        )
    elif settings.batch_invariant and difference > ROUNDING:
        raise folder.fail(
            "batch_invariant is set, but its kernels round otherwise in a batch than alone"
        )
    return cache


def _load_template(folder: ModelFolder, chosen: str) -> ChatTemplate | None:
    source = folder.find_chat_template(chosen)
    if source is None:
        return None
    try:
        return ChatTemplate(source, folder.special_tokens)
    except ChatTemplateError as error:
        raise folder.fail(str(error)) from error


def _default_sampling(folder: ModelFolder) -> SamplingParams:
    """What `generation_config.json` recommends; greedy unless it says to sample."""
    config = folder.generation_config
    given: dict[str, Any] = {"temperature": 1.0} if config.get("do_sample") else {}
    names = ["repetition_penalty"]
    if given:
        names += ["temperature", "top_k", "top_p", "min_p"]
    given |= {name: config[name] for name in names if config.get(name) is not None}
    if given.get("top_k") == 0:
        del given["top_k"]  # all tokens, as transformers has it
    try:
        GenerationParams(**given)
    except InvalidRequestError as error:
        raise folder.fail(f"its generation_config.json can't be followed: {error}") from error
    return SamplingParams(**given)
