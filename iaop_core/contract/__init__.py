"""The rules that every backend keeps, as tests that a plugin runs on itself.

A plugin's test module gives a fixture `subject` and takes the classes::

    import pytest
    from iaop_core.contract import *
    from my_plugin import MyNpuBackend

    @pytest.fixture(params=["offline", "real"])
    def subject(request):
        offline = request.param == "offline"
        return ContractSubject(make=lambda: MyNpuBackend(offline=offline), model_id="m")

    class TestLifecycle(LifecycleContract): ...
    class TestCapabilities(CapabilitiesContract): ...
    class TestInfer(InferContract): ...
    class TestStream(StreamContract): ...
    class TestHealth(HealthContract): ...
    class TestOffline(OfflineContract): ...

What a subject does not have, such as another model or an offline mode, is skipped with the reason.
docs/contract.md lists the rules. Needs the extra `iaop-core[contract]`.
"""

from __future__ import annotations

import pytest

for _module in ("capabilities", "health", "infer", "lifecycle", "offline", "stream"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from iaop_core.contract.capabilities import CapabilitiesContract  # noqa: E402
from iaop_core.contract.health import HealthContract  # noqa: E402
from iaop_core.contract.infer import InferContract  # noqa: E402
from iaop_core.contract.lifecycle import LifecycleContract  # noqa: E402
from iaop_core.contract.offline import OfflineContract  # noqa: E402
from iaop_core.contract.stream import StreamContract  # noqa: E402
from iaop_core.contract.subject import ContractSubject  # noqa: E402

__all__ = [
    "CapabilitiesContract",
    "ContractSubject",
    "HealthContract",
    "InferContract",
    "LifecycleContract",
    "OfflineContract",
    "StreamContract",
]
