"""One call: the server that takes it, and the answer as it comes."""

from __future__ import annotations

import math
import time

from attrs import frozen

from iaop_core import GenerationParams, InferResult
from iaop_core.errors import CredentialsRefusedError, IaopError, ServiceError
from iaop_gpu_triton.answer import Answer
from iaop_gpu_triton.answer_text import AnswerText
from iaop_gpu_triton.progress import Progress
from iaop_gpu_triton.replica import Replica, not_loaded
from iaop_gpu_triton.replicas import Replicas
from iaop_gpu_triton.response_stream import ResponseStream, TimeLimits
from iaop_gpu_triton.settings import NAME, GpuTritonSettings
from iaop_gpu_triton.tensors import Response


@frozen
class Question:
    """What is asked."""

    prompt: str
    params: GenerationParams
    max_tokens: int
    streamed: bool


class Call:
    """Asks a question; `next_delta` until it is None, then `result`. `leave` whatever the end."""

    def __init__(
        self,
        question: Question,
        replicas: Replicas,
        progress: Progress,
        limits: TimeLimits,
        *,
        strips_prompt: bool,
    ) -> None:
        self._question = question
        self._replicas = replicas
        self._progress = progress
        self._limits = limits
        self._strips_prompt = strips_prompt
        self._started = time.perf_counter()
        self._replica: Replica | None = None
        self._stream: ResponseStream | None = None
        self._first: Response | None = None
        self._answer: Answer | None = None
        self._ended = False
        progress.in_flight += 1

    async def next_delta(self) -> str | None:
        """The next text; empty for a response without any; None after the end."""
        try:
            return await self._next_delta()
        except IaopError as error:
            if isinstance(error, ServiceError | CredentialsRefusedError):
                self._progress.failed(error.kind)
            raise

    async def _next_delta(self) -> str | None:
        if self._answer is None:
            self._answer = await self._begin()
            response, self._first = self._first, None
        elif self._ended or self._stream is None:
            return None
        else:
            response = await self._stream.next()
        if response is None:
            self._ended = True
            return self._answer.end() or None
        return self._answer.add(self._contract.read(response))

    async def _begin(self) -> Answer:
        failure: IaopError | None = None
        for replica in self._replicas.in_order():
            try:
                return await self._ask(replica)
            except IaopError as error:
                self._let_go()
                if not error.may_fail_over:
                    raise
                failure = failure or error
        raise failure or not_loaded()

    async def _ask(self, replica: Replica) -> Answer:
        self._replica = replica
        replica.in_flight += 1
        try:
            self._first = await self._first_response(replica)
        except IaopError as error:
            if not await replica.recover(error, self._limits.first_s):
                raise
            self._first = await self._first_response(replica)
        question, contract = self._question, self._contract
        strips = contract.repeats_prompt and self._strips_prompt
        text = AnswerText(
            prompt=question.prompt if strips else "",
            stops=question.params.stop if contract.keeps_stop else (),
        )
        return Answer(
            text,
            model=self._model,
            prompt=question.prompt,
            max_tokens=question.max_tokens if "max_tokens" in contract.params else None,
            needs_reason=contract.tells_finish_reason,
            started=self._started,
        )

    async def _first_response(self, replica: Replica) -> Response | None:
        question, loaded = self._question, replica.loaded
        if loaded is None:
            raise not_loaded()
        self._contract, self._model = loaded.contract, loaded.name
        question.params.require_supported(self._contract.params, backend=NAME)
        self._finish_stream()
        self._stream = await replica.start(
            question.prompt,
            question.params,
            max_tokens=question.max_tokens,
            streamed=question.streamed,
            limits=self._limits,
        )
        return await self._stream.next()

    def result(self) -> InferResult:
        """The whole answer. Raises `StreamInterruptedError` when its end is no regular one."""
        assert self._answer is not None, "the answer has been read to its end"
        try:
            result = self._answer.result(streamed=self._question.streamed)
        except IaopError as error:
            self._progress.failed(error.kind)
            raise
        self._progress.succeeded()
        return result

    def leave(self) -> None:
        """Release everything; what is still under way on the server is cancelled."""
        self._let_go()
        self._progress.in_flight -= 1

    def _let_go(self) -> None:
        self._finish_stream()
        if self._replica is not None:
            self._replica.in_flight -= 1
            self._replica = None

    def _finish_stream(self) -> None:
        if self._stream is not None and self._replica is not None:
            self._replica.finish(self._stream)
            self._stream = None


def time_limits(settings: GpuTritonSettings, *, streamed: bool) -> TimeLimits:
    """The settings' limits for one call, in seconds."""

    def seconds(limit_ms: int | None, default: float) -> float:
        return default if limit_ms is None else limit_ms / 1000

    silence_s = settings.timeout_ms / 1000
    if not streamed:
        total_s = seconds(settings.total_timeout_ms, silence_s)
        return TimeLimits(first_s=total_s, silence_s=math.inf, total_s=total_s)
    return TimeLimits(
        first_s=seconds(settings.first_token_timeout_ms, silence_s),
        silence_s=seconds(settings.token_timeout_ms, silence_s),
        total_s=seconds(settings.total_timeout_ms, math.inf),
    )
