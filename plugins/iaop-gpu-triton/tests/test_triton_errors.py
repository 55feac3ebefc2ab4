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
from iaop_gpu_triton.quotation import quoted

GONE = [
    "Request for unknown model: 'm' is not found",
    "Request for unknown model: 'm' version 7 is not found",
    "Request for unknown model: 'm' version 7 is not at ready state",
    "Request for unknown model: 'm' has no available versions",
    "Request for unknown model: 'space::m' is not found",
    "Server is stopping, scheduler for model has stopped accepting new inference requests",
]
CHANGED = [
    "unexpected inference input 'x' for model 'm'",
    "[request id: 7] unexpected shape for input 'x' for model 'm'. Expected [1], got [2]. ",
    "[request id: 7] inference input 'x' data-type is 'INT32', but model 'm' expects 'BOOL'",
    "expected number of inputs between 1 and 9 but got 0 inputs for model 'm'. Got input(s) [], …",
    "ModelInfer RPC doesn't support models with decoupled transaction policy",
]


def inference_error(message: str, *, answering: bool = False) -> IaopError:
    return _errors.inference_error(
        message, server="triton:8001", model="m", prompt="p", answering=answering
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory", BackendUnavailableError),
        *((message, _errors.ModelGoneError) for message in GONE),
        *((message, _errors.ModelChangedError) for message in CHANGED),
        ("[request id: 7] Exceeds maximum queue size", RateLimitedError),
        ("in ensemble 'm', [request id: 7] Exceeds maximum queue size", RateLimitedError),
    ],
)
def test_inference_error_is_typed_by_tritons_words(message: str, expected: type[IaopError]) -> None:
    error = inference_error(message)
    assert type(error) is expected
    assert error.kind == expected.kind
    assert " ".join(message.split()) in str(error)
    assert "triton:8001" in str(error)
    assert error.backend == "gpu-triton"


@pytest.mark.parametrize(
    "message",
    [
        "the scheduler is not ready: unexpected shape of the cache",
        "stage two: Request for unknown model: 'm' is not found",
        "Request for unknown model: 'another' is not found",
        "unexpected inference input 'x' for model 'another'",
        "my own queue: Exceeds maximum queue size",
    ],
)
def test_models_own_words_are_not_taken_for_tritons(message: str) -> None:
    error = inference_error(message)
    assert type(error) is BackendUnavailableError
    assert error.may_have_run


@pytest.mark.parametrize("message", [*GONE, *CHANGED, "maximum context length is 4096 tokens"])
def test_error_in_the_middle_of_an_answer_is_the_models_own(message: str) -> None:
    error = inference_error(message, answering=True)
    assert type(error) is BackendUnavailableError
    assert error.may_have_run


def test_only_a_failure_of_the_model_may_have_run() -> None:
    assert not inference_error("CUDA error").may_fail_over
    assert inference_error(GONE[0]).may_fail_over


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
    error = inference_error(message)
    assert isinstance(error, ContextLengthExceededError)
    assert (error.prompt_tokens, error.context_tokens) == (prompt_tokens, context_tokens)


def test_servers_words_are_shown_short_and_without_the_prompt() -> None:
    prompt = "a confidential question"
    shown = quoted(f"bad input:\n {prompt} " + "x" * 1000, prompt)
    assert shown.startswith("bad input: [prompt] xxx")
    assert len(shown) < 400


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("can't read 'the recipe of the house'", "can't read '[prompt]'"),
        ("can't read 'the recipe of\n  the house'", "can't read '[prompt]'"),
        ("token 'recipe of the' is bad", "token '[prompt]' is bad"),
        ("token 'recipe' is bad", "token 'recipe' is bad"),
        ("不能读取“秘密配方在这里”", "不能读取“[prompt]”"),
    ],
)
def test_part_of_the_prompt_is_not_shown_either(message: str, shown: str) -> None:
    prompt = "user: what is this?\n\nuser:the recipe of the house\n\n秘密配方在这里，保密"
    assert quoted(message, prompt) == shown


def test_nothing_of_a_prompt_that_is_cut_within_a_character_is_shown() -> None:
    prompt = "".join(chr(0x4E00 + 7 * i) for i in range(200))
    for start in range(0, 150, 7):
        cut = prompt.encode()[start : start + 97].decode(errors="replace")
        assert not set(prompt) & set(quoted(f"bad: {cut} (end)", prompt))


@pytest.mark.parametrize(
    ("status", "message", "answering", "expected"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", False, BackendUnavailableError),
        ("UNAVAILABLE", "DNS resolution failed for triton", False, BackendUnavailableError),
        (
            "UNAVAILABLE",
            "errors resolving a:1: [address lookup failed for a:1: Domain name not found]",
            False,
            _errors.UnreachableError,
        ),
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
    assert "model 'm' can't be loaded" in str(error)
