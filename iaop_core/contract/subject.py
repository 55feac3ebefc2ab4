"""What a plugin tells the contract suite about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from attrs import field, frozen

from iaop_core.backend import InferenceBackend

__all__ = ["ContractRules", "ContractSubject"]

_SHARED = pytest.StashKey[dict[str, InferenceBackend]]()
"""The backends that the rules of a class share, by name."""


@frozen(kw_only=True)
class ContractSubject:
    """A backend under test and the few facts that the rules need of it."""

    make: Callable[[], InferenceBackend]
    """Makes a new backend, with nothing loaded."""
    model_id: str = ""
    """A model that can be loaded; empty: the configured default."""
    other_model_id: str | None = None
    """Another model that can be loaded, if there is one."""
    missing_model_id: str | None = None
    """A model that can't be loaded, if the backend can tell."""
    offline_tag: str | None = None
    """The offline kernel's tag when `make` makes backends in offline mode; None: they are real."""
    loads_itself_because: str | None = None
    """Why the backend loads itself when asked instead of failing closed; strict backends do not."""
    shared_as: str = ""
    """A name by which the rules of a class share one loaded backend, where none of them unloads it:
    for models that take long to load. Empty: each rule loads its own."""
    prompt: str = "Say one sentence about factories."
    params: Mapping[str, Any] = field(factory=lambda: {"max_tokens": 12, "temperature": 0.0})
    """Parameters that make answers short and repeatable; those not supported are left out."""

    def params_for(self, backend: InferenceBackend) -> dict[str, Any]:
        supported = backend.capabilities.params
        return {name: value for name, value in self.params.items() if name in supported}

    def require_param(self, name: str, backend: InferenceBackend) -> None:
        """Skip the rule for a backend that does not honour the parameter."""
        if name not in backend.capabilities.params:
            pytest.skip(f"the backend does not declare the parameter {name}")


class ContractRules:
    """The fixtures that all rules share."""

    leaves_loaded = True
    """Whether the rules leave a loaded backend as it was."""

    @pytest.fixture
    def strict(self, subject: ContractSubject) -> None:
        """For the rules of failing closed."""
        if subject.loads_itself_because:
            pytest.skip(f"the backend loads itself: {subject.loads_itself_because}")

    @pytest.fixture
    def unloaded(self, subject: ContractSubject) -> Iterator[InferenceBackend]:
        """A backend with nothing loaded."""
        backend = subject.make()
        yield backend
        backend.close()

    @pytest.fixture
    def loaded(self, subject: ContractSubject, request: pytest.FixtureRequest) -> InferenceBackend:
        """A backend with its model loaded."""
        name = subject.shared_as
        if not (name and self.leaves_loaded):
            unloaded: InferenceBackend = request.getfixturevalue("unloaded")
            unloaded.load_model(subject.model_id)
            return unloaded
        rules: pytest.Class = request.node.getparent(pytest.Class)
        shared: dict[str, InferenceBackend] = rules.stash.setdefault(_SHARED, {})
        if name not in shared:
            shared[name] = subject.make()
            rules.addfinalizer(shared[name].close)
            shared[name].load_model(subject.model_id)
        return shared[name]
