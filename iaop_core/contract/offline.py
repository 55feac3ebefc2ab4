"""Rules of the offline mode: the kernel's answers to the letter, marked as such."""

from __future__ import annotations

import pytest

from iaop_core.backend import InferenceBackend
from iaop_core.contract.subject import ContractRules, ContractSubject
from iaop_core.messages import estimate_tokens

__all__ = ["OfflineContract"]


class OfflineContract(ContractRules):
    @pytest.fixture(autouse=True)
    def _only_offline(self, subject: ContractSubject) -> None:
        if subject.offline_tag is None:
            pytest.skip("the subject is not in offline mode")

    def test_answer_is_tag_model_and_prompt(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        result = loaded.infer("How are you?")
        assert result.text == f"[{subject.offline_tag}:{result.model_id}] How are you?"

    def test_first_three_sources_are_named(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        result = loaded.infer("你好", ["甲", "乙", "丙", "丁"])
        assert result.text == (
            f"[{subject.offline_tag}:{result.model_id}] 你好\n[来源: 甲]\n[来源: 乙]\n[来源: 丙]"
        )

    def test_prompt_is_cut_to_max_tokens_characters(
        self, subject: ContractSubject, loaded: InferenceBackend
    ) -> None:
        result = loaded.infer("abcdefgh", params={"max_tokens": 3})
        assert result.text == f"[{subject.offline_tag}:{result.model_id}] abc"

    def test_tokens_are_estimated_by_the_stated_rule(self, loaded: InferenceBackend) -> None:
        result = loaded.infer("abcdefgh")
        assert result.prompt_tokens == 2
        assert result.completion_tokens == estimate_tokens(result.text)
        assert result.usage_estimated

    def test_offline_is_never_quiet(self, loaded: InferenceBackend) -> None:
        assert loaded.infer("a").offline
        assert loaded.capabilities.offline_mode
