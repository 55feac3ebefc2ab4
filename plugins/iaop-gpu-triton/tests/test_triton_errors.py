"""What a server says becomes the fitting error of core's tree."""

from __future__ import annotations

import pytest

from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    ContextLengthExceededError,
    CredentialsRefusedError,
    IaopError,
    InvalidRequestError,
    ModelLoadError,
    RateLimitedError,
    StreamInterruptedError,
)
from iaop_gpu_triton import _errors


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory", BackendUnavailableError),
        ("Request for unknown model: 'm' is not found", BackendUnavailableError),
        ("Request for unknown model: 'm' has no available versions", BackendUnavailableError),
        ("Exceeds maximum queue size", RateLimitedError),
        ("unexpected inference input 'x' for model 'm'", BackendProtocolError),
        ("expected number of inputs between 1 and 3 but got 7 inputs", BackendProtocolError),
    ],
)
def test_inference_error_is_typed_by_its_words(message: str, expected: type[IaopError]) -> None:
    error = _errors.inference_error(message, server="triton:8001", model="m", prompt="p")
    assert isinstance(error, expected)
    assert error.kind == expected.kind
    assert message in str(error)
    assert "triton:8001" in str(error)
    assert error.backend == "gpu-triton"


def test_only_a_failure_of_the_model_may_have_run() -> None:
    said = {"server": "s", "model": "m", "prompt": "p"}
    failed = _errors.inference_error("CUDA error", **said)
    unknown = _errors.inference_error("Request for unknown model: 'm' is not found", **said)
    assert not failed.may_fail_over
    assert unknown.may_fail_over


@pytest.mark.parametrize(
    ("message", "prompt_tokens", "context_tokens"),
    [
        ("This model's maximum context length is 4096 tokens. However, …", None, 4096),
        (
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
            5000,
            4096,
        ),
    ],
)
def test_prompt_that_is_too_long_is_the_callers_error_with_its_numbers(
    message: str, prompt_tokens: int | None, context_tokens: int
) -> None:
    error = _errors.inference_error(message, server="s", model="m", prompt="p")
    assert isinstance(error, ContextLengthExceededError)
    assert (error.prompt_tokens, error.context_tokens) == (prompt_tokens, context_tokens)


def test_servers_words_are_shown_short_and_without_the_prompt() -> None:
    prompt = "a confidential question"
    shown = _errors.quoted(f"bad input:\n {prompt} " + "x" * 1000, prompt)
    assert shown.startswith("bad input: [prompt] xxx")
    assert len(shown) < 400


@pytest.mark.parametrize(
    ("status", "message", "answering", "expected"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", False, BackendUnavailableError),
        ("UNAVAILABLE", "DNS resolution failed for triton", False, BackendUnavailableError),
        ("UNAVAILABLE", "Socket closed", False, BackendUnavailableError),
        ("UNAVAILABLE", "Socket closed", True, StreamInterruptedError),
        ("CANCELLED", "", True, StreamInterruptedError),
        ("DEADLINE_EXCEEDED", "", False, BackendTimeoutError),
        ("UNAUTHENTICATED", "no token", False, CredentialsRefusedError),
        ("PERMISSION_DENIED", "no", False, CredentialsRefusedError),
        ("RESOURCE_EXHAUSTED", "too many", False, RateLimitedError),
        ("RESOURCE_EXHAUSTED", "message larger than max", False, InvalidRequestError),
        ("UNIMPLEMENTED", "Method not found!", False, BackendProtocolError),
        ("OUT_OF_RANGE", "?", False, BackendProtocolError),
    ],
)
def test_status_is_typed(
    status: str, message: str, answering: bool, expected: type[IaopError]
) -> None:
    error = _errors.status_error(
        status, message, server="triton:8001", timeout_s=2.0, answering=answering
    )
    assert isinstance(error, expected)
    assert error.kind == expected.kind
    assert "triton:8001" in str(error)


def test_lost_connection_may_have_run_and_a_refused_one_has_not() -> None:
    assert not _errors.lost("s", "reset", answering=False).may_fail_over
    assert _errors.unreachable("s", "refused").may_fail_over


def test_loading_that_the_server_does_not_allow_is_told_from_other_failures() -> None:
    refused = "explicit model load / unload is not allowed if polling is enabled"
    assert isinstance(
        _errors.load_error(refused, server="s", model="m"), _errors.LoadingNotAllowedError
    )
    error = _errors.load_error("failed to poll from model repository", server="s", model="m")
    assert type(error) is ModelLoadError
    assert "no model 'm'" in str(error)
