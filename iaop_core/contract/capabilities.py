"""Rules of what a backend declares, and that it keeps to it."""

from __future__ import annotations

from typing import Any

import pytest

from iaop_core.backend import InferenceBackend
from iaop_core.capabilities import BackendCapabilities
from iaop_core.contract.subject import ContractRules, ContractSubject
from iaop_core.errors import CapabilityNotSupportedError
from iaop_core.messages import PARAM_NAMES

__all__ = ["CapabilitiesContract"]

_SAMPLES: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "stop": ["\n\n\n"],
    "seed": 7,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {5: -1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_object"},
    "grammar": 'start: "yes" | "no"',
}
_NEEDED: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
"""What a parameter can't be given without."""


class CapabilitiesContract(ContractRules):
    def test_capabilities_are_declared_before_load(self, unloaded: InferenceBackend) -> None:
        capabilities = unloaded.capabilities
        assert isinstance(capabilities, BackendCapabilities)
        assert capabilities.max_concurrency >= 1
        assert "text" in capabilities.modalities

    def test_name_is_that_of_the_results(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        result = loaded.infer(subject.prompt, params=subject.params_for(loaded))
        assert result.backend_name == loaded.name

    def test_declared_parameters_are_known_ones(self, unloaded: InferenceBackend) -> None:
        assert unloaded.capabilities.params <= PARAM_NAMES
        assert "max_tokens" in unloaded.capabilities.params

    def test_samples_cover_every_parameter(self) -> None:
        assert _SAMPLES.keys() == PARAM_NAMES

    def test_parameter_is_honoured_or_refused_by_name(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        declared = loaded.capabilities.params
        for name in sorted(PARAM_NAMES):
            needed = _NEEDED.get(name, {})
            params = {**subject.params_for(loaded), **needed, name: _SAMPLES[name]}
            if name in declared:
                assert loaded.infer(subject.prompt, params=params).model_id
                continue
            refused = _refused_capability(loaded, subject.prompt, params)
            assert refused in (name, *(needed.keys() - declared)), (
                f"not declared, not refused: {name}"
            )

    def test_modality_that_is_not_declared_is_refused(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        if "image" in loaded.capabilities.modalities:
            pytest.skip("the backend takes images")
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        with pytest.raises(CapabilityNotSupportedError):
            loaded.infer([{"role": "user", "content": [image]}])


def _refused_capability(backend: InferenceBackend, prompt: str, params: dict[str, Any]) -> str:
    try:
        backend.infer(prompt, params=params)
    except CapabilityNotSupportedError as error:
        return error.capability if error.capability in str(error) else ""
    return ""
