"""Rules of health checks: they tell, and never raise."""

from __future__ import annotations

import time

from iaop_core.backend import InferenceBackend
from iaop_core.capabilities import BackendHealth
from iaop_core.contract.subject import ContractRules, ContractSubject

__all__ = ["HealthContract"]

_PATIENCE_S = 5.0


class HealthContract(ContractRules):
    def test_health_of_a_loaded_model_is_good(self, loaded: InferenceBackend) -> None:
        health = loaded.health_check()
        assert isinstance(health, BackendHealth)
        assert health.healthy, health.detail
        assert "loaded=True" in health.detail

    def test_health_never_raises_at_any_time(self, subject: ContractSubject) -> None:
        backend = subject.make()
        assert isinstance(backend.health_check(), BackendHealth)
        backend.load_model(subject.model_id)
        backend.unload()
        health = backend.health_check()
        assert isinstance(health, BackendHealth)
        assert "loaded=True" not in health.detail
        backend.close()
        assert isinstance(backend.health_check(), BackendHealth)

    def test_health_answers_soon(self, loaded: InferenceBackend) -> None:
        started = time.monotonic()
        loaded.health_check()
        assert time.monotonic() - started < _PATIENCE_S

    def test_health_says_when_the_backend_is_offline(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        assert loaded.offline == (subject.offline_tag is not None)
        says_offline = "offline=True" in loaded.health_check().detail
        assert says_offline == (subject.offline_tag is not None)
