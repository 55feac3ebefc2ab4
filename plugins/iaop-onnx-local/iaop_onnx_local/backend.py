"""The `onnx-local` backend: a language model on ONNX Runtime in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from attrs import evolve

from iaop_core import (
    BackendCapabilities,
    BackendHealth,
    GenerationParams,
    InferChunk,
    InferenceBackend,
    InferResult,
    OfflineKernel,
    as_messages,
    with_context,
)
from iaop_core.backend import Context
from iaop_core.errors import BackendUnavailableError, ModelNotLoadedError
from iaop_core.messages import Params, Prompt
from iaop_onnx_local.installation import find_runtime_packages
from iaop_onnx_local.memory import give_memory_back
from iaop_onnx_local.settings import NAME, OnnxLocalSettings

if TYPE_CHECKING:
    from iaop_onnx_local.model import LocalModel
    from iaop_onnx_local.streams import Call

__all__ = ["OnnxLocalBackend"]

_log = logging.getLogger(__name__)

_BEYOND_THE_KERNEL: Final = frozenset(("logprobs", "top_logprobs", "response_format", "grammar"))
"""Parameters that a model's answer can honour, and the stand-in's can't."""


class OnnxLocalBackend(InferenceBackend):
    """Runs decoder-only language models with ONNX Runtime, in process.

    Up to `max_concurrency` answers are made at a time, in one batch that they join and leave at
    each step.

    Args:
        settings: see `OnnxLocalSettings`; the defaults where left out.
        changes: fields of the settings by name, such as `device="cuda"` or `offline=True`.
    """

    name = NAME

    def __init__(self, settings: OnnxLocalSettings | None = None, **changes: Any) -> None:
        self._settings = evolve(settings or OnnxLocalSettings(), **changes)
        self._lifecycle = threading.Lock()
        self._model: LocalModel | None = None
        self._replaced: WeakSet[LocalModel] = WeakSet()
        """Models whose last answers are perhaps under way."""
        self._kernel = self._find_kernel()

    def __repr__(self) -> str:
        model = self._model
        loaded = f"{model.model_id!r} on {model.decoder.device}" if model else "no model"
        return f"<OnnxLocalBackend {'offline' if self._kernel else loaded}>"

    @property
    def capabilities(self) -> BackendCapabilities:
        capabilities, model = self._settings.capabilities, self._model
        if self._kernel is not None:
            return evolve(capabilities, params=capabilities.params - _BEYOND_THE_KERNEL)
        return evolve(capabilities, device=model.decoder.device if model else "")

    @property
    def offline(self) -> bool:
        """Whether the offline kernel answers in the place of a model."""
        return self._kernel is not None

    def load_model(self, model_id: str = "") -> None:
        """Loads a model folder: a path, or a name in the cache folder. Touches no network.

        An empty id means the setting `model`. When another model is loaded, the new one is ready
        before the old one goes, and answers under way end on the old one. A model whose engine has
        ended, or stayed in the process that was forked, is loaded anew.

        Raises:
            ModelLoadError: the model, its files, or the device asked for can't be had.
        """
        wanted = model_id or self._settings.model
        with self._lifecycle:
            if self._kernel is not None:
                self._kernel.load(wanted)
            elif (
                self._model is None or self._model.model_id != wanted or self._model.load_now.ended
            ):
                from iaop_onnx_local.model import LocalModel

                old, self._model = self._model, LocalModel.load(wanted, self._settings)
                if old is not None:
                    self._replaced.add(old)
                    old.close(finish=True)

    def infer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        """One answer.

        A `max_tokens` beyond what the context has room for means that room. Without a `temperature`
        the model's own recommendation holds, else the choice is greedy, unless another parameter
        asks to sample.

        Raises:
            ModelNotLoadedError: before `load_model`.
            InvalidRequestError: the messages or the parameters.
            ContextLengthExceededError: the prompt leaves no room for an answer.
            BackendUnavailableError: too many wait already, or the engine failed.
        """
        call = self._take(prompt, context, params)
        if isinstance(call, InferResult):
            return call
        from iaop_onnx_local.streams import whole_answer

        return whole_answer(call)

    async def ainfer(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> InferResult:
        """As `infer`, without a thread of its own."""
        call = self._take(prompt, context, params)
        if isinstance(call, InferResult):
            return call
        from iaop_onnx_local.streams import await_answer

        return await await_answer(call)

    def stream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> Iterator[InferChunk]:
        """As `infer`, in deltas as they are made.

        Text that could begin a stop text is held back for as long as it could.
        """
        call = self._take(prompt, context, params)
        if isinstance(call, InferResult):
            return (chunk for chunk in (InferChunk(call.text), InferChunk("", call)))
        from iaop_onnx_local.streams import AnswerStream

        return AnswerStream(call)

    async def astream(
        self, prompt: Prompt, context: Context = None, *, params: Params = None
    ) -> AsyncIterator[InferChunk]:
        """As `stream`, without a thread of its own."""
        call = self._take(prompt, context, params)
        if isinstance(call, InferResult):
            yield InferChunk(call.text)
            yield InferChunk("", call)
            return
        from iaop_onnx_local.streams import stream_answer

        async with aclosing(stream_answer(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    def health_check(self) -> BackendHealth:
        """How the loaded model is; never waits for the engine."""
        if self._kernel is not None:
            live, ready = self._kernel.is_server_live(), self._kernel.is_model_ready()
            return BackendHealth(
                ready, f"server_live={live}, model_ready={ready}, loaded={ready}, offline=True"
            )
        problem, model = find_runtime_packages().problem, self._model
        if problem:
            return BackendHealth(False, f"probe_error: {problem}")
        if model is None:
            return BackendHealth(False, "server_live=True, model_ready=False, loaded=False")
        load = model.load_now
        ready = not load.ended and load.still_s < self._settings.stall_timeout_s
        detail = (
            f"server_live=True, model_ready={ready}, loaded=True, device={model.decoder.device}, "
            f"threads={model.decoder.threads}, running={load.running}, waiting={load.waiting}"
        )
        if load.ended:
            detail += ", the engine does not run in this process: load the model anew"
        elif not ready:
            detail += f", stalled: no step of the engine has ended for {load.still_s:.0f} s"
        return BackendHealth(ready, detail)

    def unload(self) -> None:
        """Releases the model; answers under way end with an error."""
        with self._lifecycle:
            if self._kernel is not None:
                self._kernel.unload()
            loaded = [self._model] if self._model is not None else []
            self._model = None
            for model in (*loaded, *self._replaced):
                model.close()
            if loaded:
                loaded.clear()
                del model
                give_memory_back()

    def close(self) -> None:
        self.unload()
        if self._kernel is not None:
            self._kernel.stop_server()

    def _find_kernel(self) -> OfflineKernel | None:
        """The offline kernel, where it was asked for or ONNX Runtime can't be imported."""
        if not self._settings.offline:
            try:
                import_module("onnxruntime").InferenceSession  # noqa: B018
            except (ImportError, AttributeError) as error:
                reason = find_runtime_packages().problem or str(error)
                _log.warning(
                    "ONNX Runtime can't be imported, so backend %r is OFFLINE and answers from a "
                    "stand-in, not from a model: %s",
                    self.name,
                    reason,
                )
            else:
                return None
        return OfflineKernel("onnx", backend_name=self.name)

    def _take(self, prompt: Prompt, context: Context, params: Params) -> InferResult | Call:
        """Checks a call; answers it at once where the offline kernel does."""
        given = GenerationParams.from_input(params)
        given.require_supported(self.capabilities.params, backend=self.name)
        messages = as_messages(prompt)
        if self._kernel is not None:
            return self._kernel.infer(
                prompt, context, max_tokens=given.max_tokens or self._settings.max_tokens
            )
        if self._model is None:
            raise self._not_loaded()
        from iaop_onnx_local.streams import Call

        return Call(self._loaded, with_context(messages, context), given, backend_name=self.name)

    def _loaded(self) -> LocalModel:
        """The model that is loaded now."""
        model = self._model
        if model is None:
            raise self._not_loaded()
        if os.getpid() != model.process_id:
            raise BackendUnavailableError(
                f"backend {self.name!r} loaded its model before this process was forked, and the "
                "engine's threads are not here; load it in each worker process",
                backend=self.name,
            )
        return model

    def _not_loaded(self) -> ModelNotLoadedError:
        return ModelNotLoadedError(
            f"backend {self.name!r} has no model loaded; call load_model() first",
            backend=self.name,
        )
