"""Rules of loading, failing closed, and unloading."""

from __future__ import annotations

import asyncio

import pytest

from iaop_core.backend import InferenceBackend
from iaop_core.contract.subject import ContractRules, ContractSubject
from iaop_core.errors import IaopError, ModelNotLoadedError

__all__ = ["LifecycleContract"]


class LifecycleContract(ContractRules):
    leaves_loaded = False

    @pytest.mark.usefixtures("strict")
    def test_infer_before_load_fails_closed(
        self, subject: ContractSubject, unloaded: InferenceBackend
    ) -> None:
        with pytest.raises(ModelNotLoadedError) as caught:
            unloaded.infer(subject.prompt)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.backend == unloaded.name
        assert unloaded.name in str(caught.value), "the error names the backend"

    @pytest.mark.usefixtures("strict")
    def test_every_face_before_load_fails_closed(
        self, subject: ContractSubject, unloaded: InferenceBackend
    ) -> None:
        async def drain() -> None:
            async for _ in unloaded.astream(subject.prompt):
                pass

        with pytest.raises(ModelNotLoadedError):
            list(unloaded.stream(subject.prompt))
        with pytest.raises(ModelNotLoadedError):
            asyncio.run(_await(unloaded, subject.prompt))
        with pytest.raises(ModelNotLoadedError):
            asyncio.run(drain())
        with pytest.raises(ModelNotLoadedError):
            unloaded.generate(subject.prompt)

    def test_load_again_changes_nothing(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        params = subject.params_for(loaded)
        before = loaded.infer(subject.prompt, params=params)
        loaded.load_model(subject.model_id)
        after = loaded.infer(subject.prompt, params=params)
        assert after.model_id == before.model_id
        assert after.text == before.text

    def test_empty_id_loads_the_default(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        loaded.load_model("")
        assert loaded.infer(subject.prompt, params=subject.params_for(loaded)).model_id

    def test_loading_another_model_replaces_the_first(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        if subject.other_model_id is None:
            pytest.skip("the subject names no other model")
        params = subject.params_for(loaded)
        first = loaded.infer(subject.prompt, params=params).model_id
        loaded.load_model(subject.other_model_id)
        assert loaded.infer(subject.prompt, params=params).model_id != first
        assert loaded.health_check().healthy

    def test_failed_load_keeps_the_loaded_model(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        if subject.missing_model_id is None:
            pytest.skip("the subject names no model that can't be loaded")
        with pytest.raises(IaopError) as caught:
            loaded.load_model(subject.missing_model_id)
        assert subject.missing_model_id in str(caught.value), "the error names the model"
        assert loaded.infer(subject.prompt, params=subject.params_for(loaded)).model_id

    @pytest.mark.usefixtures("strict")
    def test_infer_after_unload_fails_closed(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        loaded.unload()
        with pytest.raises(ModelNotLoadedError):
            loaded.infer(subject.prompt)

    def test_unload_is_idempotent(self, unloaded: InferenceBackend) -> None:
        unloaded.unload()
        unloaded.unload()

    def test_load_after_unload_works(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        loaded.unload()
        loaded.load_model(subject.model_id)
        assert loaded.infer(subject.prompt, params=subject.params_for(loaded)).model_id

    @pytest.mark.usefixtures("strict")
    def test_close_is_idempotent_and_fails_closed(self, subject: ContractSubject) -> None:
        with subject.make() as backend:
            backend.load_model(subject.model_id)
        backend.close()
        with pytest.raises(ModelNotLoadedError):
            backend.infer(subject.prompt)


async def _await(backend: InferenceBackend, prompt: str) -> None:
    await backend.ainfer(prompt)
