"""What Triton, gRPC and aiohttp report, as core's errors: the most specific one wins."""

from __future__ import annotations

import re

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
from iaop_gpu_triton.quotation import quoted
from iaop_gpu_triton.settings import NAME

_NEVER_CONNECTED = re.compile(
    r"failed to connect|name resolution|DNS resolution|errors resolving|domain name not found",
    re.IGNORECASE,
)
_RESTRICTED = re.compile(r"is restricted, expecting header", re.IGNORECASE)
_LOADING_NOT_ALLOWED = re.compile(r"explicit model load / unload is not allowed", re.IGNORECASE)
_TOO_LARGE = re.compile(r"larger than max", re.IGNORECASE)
# Triton's own words, as a whole and about the model that was asked: a model may write the like.
_REQUEST_ID = re.compile(r"\[request id: [^\]]*\] ")
_UNKNOWN_MODEL = re.compile(
    r"Request for unknown model: '(?P<model>.+?)'"
    r"( version -?\d+)?( is not found| is not at ready state| has no available versions)"
    r"|Server not ready|Server is stopping, scheduler for model has stopped accepting .*"
)
_QUEUE_FULL = re.compile(
    r"(in ensemble '.+?', )?(\[request id: [^\]]*\] )?Exceeds maximum queue size"
)
_BAD_TENSORS = re.compile(
    r"(unexpected inference input|unexpected shape for input) '.+?' for model '(?P<a>.+?)'.*"
    r"|expected number of inputs between .* but got .* for model '(?P<b>.+?)'.*"
    r"|inference input '.+?' data-type is '.+?', but model '(?P<c>.+?)' expects .*"
    r"|ModelInfer RPC doesn't support models with decoupled transaction policy"
    r"|The schema can not convert input '.+?' to tensor with proper shape",
    re.DOTALL,
)
# vLLM's two wordings: "maximum context length is N tokens", and "prompt (length P) is longer than
# the maximum model length of N".
_TOO_LONG = re.compile(
    r"maximum context length is (?P<a>\d+)|"
    r"\(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<b>\d+)"
)


class LoadingNotAllowedError(ModelLoadError):
    """The server's control mode refuses the repository API's load and unload."""


class ModelGoneError(BackendUnavailableError):
    """The server has not, or no longer, the model ready that was loaded."""


class ModelChangedError(BackendProtocolError):
    """The model's tensors are not those that it had when it was loaded."""


class UnreachableError(BackendUnavailableError):
    """No connection to the server came about."""


# To callers these are no kinds of their own.
ModelGoneError.kind = UnreachableError.kind = BackendUnavailableError.kind
ModelChangedError.kind = BackendProtocolError.kind


def inference_error(
    message: str, *, server: str, model: str, prompt: str, answering: bool = False
) -> IaopError:
    """The error that a server answered to an inference, by its words: a stream has no status.

    In the middle of an answer (`answering`) it is the model's own, whatever its words.
    """
    said = f"the Triton server at {server} says: {quoted(message, prompt)}"
    own = "" if answering else _REQUEST_ID.sub("", message.strip(), count=1)
    if not answering and (found := _TOO_LONG.search(message)):
        numbers = found.groupdict()
        return ContextLengthExceededError(
            f"the prompt is too long for model {model!r}; {said}",
            backend=NAME,
            param="prompt",
            prompt_tokens=_number(numbers["prompt"]),
            context_tokens=_number(numbers["a"] or numbers["b"]),
        )
    if _is_about(model, _UNKNOWN_MODEL.fullmatch(own)):
        return ModelGoneError(f"model {model!r} is not ready (any more); {said}", backend=NAME)
    if _QUEUE_FULL.fullmatch(own):
        return RateLimitedError(f"the queue of model {model!r} is full; {said}", backend=NAME)
    if _is_about(model, _BAD_TENSORS.fullmatch(own)):
        return ModelChangedError(
            f"the tensors of model {model!r} are not those that it had when it was loaded; "
            f"call load_model() again; {said}",
            backend=NAME,
        )
    return BackendUnavailableError(
        f"model {model!r} failed; {said}", backend=NAME, may_have_run=True
    )


def _is_about(model: str, found: re.Match[str] | None) -> bool:
    if found is None:
        return False
    named = [name for name in found.groupdict().values() if name is not None]
    # With model namespaces on, Triton writes "namespace::name".
    return all(name == model or name.endswith(f"::{model}") for name in named)


def load_error(message: str, *, server: str, model: str) -> IaopError:
    """The error that a server answered to a question about a model or to its loading."""
    said = f"the Triton server at {server} says: {quoted(message)}"
    if _LOADING_NOT_ALLOWED.search(message):
        return LoadingNotAllowedError(
            f"model {model!r} can't be loaded or unloaded by its clients; {said}",
            backend=NAME,
            model=model,
        )
    return ModelLoadError(f"model {model!r} can't be loaded; {said}", backend=NAME, model=model)


def unreachable(server: str, reason: str | None) -> UnreachableError:
    """No connection came about, so that nothing was begun."""
    return UnreachableError(
        f"the Triton server at {server} can't be reached: {quoted(reason)}; check server_url, its "
        "scheme and port too, and that the server runs",
        backend=NAME,
    )


def lost(server: str, reason: str | None, *, answering: bool, prompt: str = "") -> IaopError:
    """The connection broke, before or after the first response."""
    said = quoted(reason, prompt)
    if answering:
        return StreamInterruptedError(
            f"the Triton server at {server} was lost in the middle of an answer: {said}",
            backend=NAME,
        )
    return BackendUnavailableError(
        f"the Triton server at {server} was lost before it answered: {said}",
        backend=NAME,
        may_have_run=True,
    )


def ended_early(server: str, model: str) -> StreamInterruptedError:
    """The stream ended in order, as far as the protocol goes, without the answer's end."""
    return StreamInterruptedError(
        f"the Triton server at {server} closed the stream of model {model!r} without the end of "
        "the answer; what came of it is not complete",
        backend=NAME,
    )


def timed_out(server: str, timeout_s: float, what: str) -> BackendTimeoutError:
    return BackendTimeoutError(
        f"no {what} from the Triton server at {server} within {timeout_s * 1000:.0f} ms",
        backend=NAME,
        timeout_ms=timeout_s * 1000,
    )


def unexpected(error: Exception) -> BackendProtocolError:
    """What no client library should raise; without its words, which might quote the answer."""
    return BackendProtocolError(
        f"reading the Triton server's answer failed with {type(error).__name__}; the plugin "
        "iaop-gpu-triton is at fault, tell its provider",
        backend=NAME,
    )


def credentials_refused(server: str, message: str | None) -> CredentialsRefusedError:
    return CredentialsRefusedError(
        f"the Triton server at {server}, or a proxy before it, refuses this client: "
        f"{quoted(message)}",
        backend=NAME,
    )


def request_too_large(size: int, limit: int) -> InvalidRequestError:
    """Refused before it is sent."""
    return InvalidRequestError(
        f"the request is {size} bytes long and max_message_bytes is {limit}; shorten the prompt, "
        "or raise that setting, and the limits of the server and of proxies before it",
        backend=NAME,
        param="prompt",
    )


def response_too_large(limit: int) -> BackendProtocolError:
    return BackendProtocolError(
        f"a response is longer than max_message_bytes, {limit}; ask for fewer tokens, or raise "
        "that setting",
        backend=NAME,
    )


def status_error(
    status: str,
    message: str | None,
    *,
    server: str,
    timeout_s: float | None,
    answering: bool,
    prompt: str = "",
) -> IaopError:
    """The error for a gRPC status by its name, such as `UNAVAILABLE`."""
    words = message or ""
    if _RESTRICTED.search(words):
        return credentials_refused(server, message)
    if status == "UNAVAILABLE" and _NEVER_CONNECTED.search(words):
        return unreachable(server, message)
    if status in ("UNAVAILABLE", "CANCELLED", "ABORTED", "INTERNAL", "UNKNOWN", "DATA_LOSS"):
        return lost(server, message, answering=answering, prompt=prompt)
    if status == "DEADLINE_EXCEEDED":
        return timed_out(server, timeout_s or 0, "answer")
    said = quoted(message, prompt)
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return credentials_refused(server, said)
    if status == "RESOURCE_EXHAUSTED":
        if _TOO_LARGE.search(words):
            kind = BackendProtocolError if "eceived" in words else InvalidRequestError
            return kind(
                f"a message is too large for the Triton server at {server}, a proxy before it, or "
                f"max_message_bytes: {said}",
                backend=NAME,
            )
        return RateLimitedError(
            f"the Triton server at {server} asks for fewer calls: {said}", backend=NAME
        )
    if status == "UNIMPLEMENTED":
        return BackendProtocolError(
            f"the server at {server} does not speak Triton's protocol: {said}", backend=NAME
        )
    return BackendProtocolError(
        f"the Triton server at {server} answered {status}: {said}", backend=NAME
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
