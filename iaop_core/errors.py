"""Everything that iaop-core and its backends raise on purpose.

::

    IaopError
     ├── RequestError                       the caller's fault: the same call fails again
     │    ├── InvalidRequestError           (ValueError)
     │    │    └── ContextLengthExceededError
     │    ├── CapabilityNotSupportedError   (NotImplementedError)
     │    ├── QuotaExceededError            (PermissionError)
     │    └── RequestVetoedError            (PermissionError) an add-on refused the call
     ├── ConfigurationError                 the values', the plugin's or the model's fault
     │    ├── ValuesError                   (ValueError)
     │    ├── UnknownBackendError           (LookupError)
     │    ├── DuplicateBackendError         (LookupError)
     │    ├── PluginLoadError               (ImportError)
     │    ├── ModelLoadError                (RuntimeError)
     │    ├── ModelNotLoadedError           (RuntimeError)
     │    └── CredentialsRefusedError       (PermissionError)
     └── ServiceError                       the engine's, the network's or the disk's fault
          ├── BackendUnavailableError       (ConnectionError)
          ├── BackendTimeoutError           (TimeoutError)
          ├── RateLimitedError              (ConnectionError)
          ├── StreamInterruptedError        (ConnectionError)
          ├── BackendProtocolError          (RuntimeError)
          └── AuditError                    (OSError)

A message says what failed, why, who provides it and what to do. It never holds a prompt, a reply or
a secret. The facts are attributes too, so that a program need not read the message.
"""

from __future__ import annotations

import re
from typing import ClassVar

__all__ = [
    "AuditError",
    "BackendProtocolError",
    "BackendTimeoutError",
    "BackendUnavailableError",
    "CapabilityNotSupportedError",
    "ConfigurationError",
    "ContextLengthExceededError",
    "CredentialsRefusedError",
    "DuplicateBackendError",
    "IaopError",
    "InvalidRequestError",
    "ModelLoadError",
    "ModelNotLoadedError",
    "PluginLoadError",
    "QuotaExceededError",
    "RateLimitedError",
    "RequestError",
    "RequestVetoedError",
    "ServiceError",
    "StreamInterruptedError",
    "UnknownBackendError",
    "ValuesError",
]


class IaopError(Exception):
    """Base of the tree.

    `backend` is the name of the backend concerned, or `""`. `kind` is the stable word for this kind
    of error, as audit rows and JSON output show it, such as `"model_not_loaded"`.
    """

    kind: ClassVar[str] = "iaop"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        stem = cls.__name__.removesuffix("Error")
        cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", stem).lower()

    def __init__(self, message: str = "", *, backend: str = "") -> None:
        super().__init__(message)
        self.backend = backend

    def __str__(self) -> str:
        # KeyError-like bases would quote the message; every class of this tree shows it as it is.
        return str(self.args[0]) if self.args else ""

    @property
    def may_fail_over(self) -> bool:
        """Whether trying another backend is safe and could help: no work was begun."""
        return False

    @property
    def may_retry(self) -> bool:
        """Whether trying the same backend again, a little later, is safe and could help."""
        return False


class RequestError(IaopError):
    """The request can't be served as it is; sending it again changes nothing."""


class InvalidRequestError(RequestError, ValueError):
    """A prompt, message or parameter is malformed. `param` names it, or is `""`."""

    def __init__(self, message: str = "", *, backend: str = "", param: str = "") -> None:
        super().__init__(message, backend=backend)
        self.param = param


class ContextLengthExceededError(InvalidRequestError):
    """The prompt, with the answer asked for, is longer than the model's context (all in tokens).

    A number that the backend does not tell is None.
    """

    def __init__(
        self,
        message: str = "",
        *,
        backend: str = "",
        param: str = "",
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message, backend=backend, param=param)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class CapabilityNotSupportedError(RequestError, NotImplementedError):
    """The backend can't do what the request or its route asks. `capability` names it."""

    def __init__(self, message: str = "", *, backend: str = "", capability: str = "") -> None:
        super().__init__(message, backend=backend)
        self.capability = capability


class QuotaExceededError(RequestError, PermissionError):
    """The tenant's budget is used up. `retry_after_s` is when to try again, in seconds."""

    def __init__(
        self, message: str = "", *, tenant: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.tenant = tenant
        self.retry_after_s = retry_after_s


class RequestVetoedError(RequestError, PermissionError):
    """An add-on raises this from a lifecycle hook to refuse what is about to happen."""


class ConfigurationError(IaopError):
    """The site's set-up is at fault: its values, an installed plugin, or the model."""


class ValuesError(ConfigurationError, ValueError):
    """The values are wrong. `source` and `line` say where, `path` is the key such as `a.b`."""

    def __init__(
        self, message: str = "", *, source: str = "", line: int | None = None, path: str = ""
    ) -> None:
        where = f"{source}:{line}" if line else source
        super().__init__(f"{where}: {message}" if where else message)
        self.source = source
        self.line = line
        self.path = path


class UnknownBackendError(ConfigurationError, LookupError):
    """No installed distribution offers a backend of that name. `known` are those that are."""

    def __init__(
        self, message: str = "", *, backend: str = "", known: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, backend=backend)
        self.known = known


class DuplicateBackendError(ConfigurationError, LookupError):
    """More than one distribution offers the name. `distributions` names each with its version."""

    def __init__(
        self, message: str = "", *, backend: str = "", distributions: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, backend=backend)
        self.distributions = distributions


class PluginLoadError(ConfigurationError, ImportError):
    """An installed plugin can't be used; the message is the reason.

    `distribution` is its distribution and version, such as `"iaop-x 1.2"`.
    """

    def __init__(self, message: str = "", *, backend: str = "", distribution: str = "") -> None:
        super().__init__(message, backend=backend)
        self.distribution = distribution

    @property
    def may_fail_over(self) -> bool:
        return True


class ModelLoadError(ConfigurationError, RuntimeError):
    """The model can't be had as configured, or any more. `model` is its id."""

    def __init__(self, message: str = "", *, backend: str = "", model: str = "") -> None:
        super().__init__(message, backend=backend)
        self.model = model

    @property
    def may_fail_over(self) -> bool:
        return True


class ModelNotLoadedError(ConfigurationError, RuntimeError):
    """The backend was asked to infer before `load_model`: it fails closed."""

    @property
    def may_fail_over(self) -> bool:
        return True


class CredentialsRefusedError(ConfigurationError, PermissionError):
    """The service refuses this site's credentials; another call with the same ones is useless."""

    @property
    def may_fail_over(self) -> bool:
        return True


class ServiceError(IaopError):
    """The engine, the network or the disk failed; the request itself may be fine."""


class BackendUnavailableError(ServiceError, ConnectionError):
    """The backend can't be reached, has no free slot, or failed.

    `may_have_run` is true when the backend may have accepted the request, so that sending it again
    could do, and bill, the work twice. `busy` is true when it is well but has no room for the call.
    """

    def __init__(
        self,
        message: str = "",
        *,
        backend: str = "",
        may_have_run: bool = False,
        busy: bool = False,
    ) -> None:
        super().__init__(message, backend=backend)
        self.may_have_run = may_have_run
        self.busy = busy

    @property
    def may_fail_over(self) -> bool:
        return not self.may_have_run

    @property
    def may_retry(self) -> bool:
        return not self.may_have_run and not self.busy


class BackendTimeoutError(ServiceError, TimeoutError):
    """A time limit ran out; the work may have been begun. `timeout_ms` is that limit."""

    def __init__(
        self, message: str = "", *, backend: str = "", timeout_ms: float | None = None
    ) -> None:
        super().__init__(message, backend=backend)
        self.timeout_ms = timeout_ms


class RateLimitedError(ServiceError, ConnectionError):
    """The service asks to be called less often. `retry_after_s` is what it said, in seconds."""

    def __init__(
        self, message: str = "", *, backend: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, backend=backend)
        self.retry_after_s = retry_after_s

    @property
    def may_fail_over(self) -> bool:
        return True

    @property
    def may_retry(self) -> bool:
        return True


class StreamInterruptedError(ServiceError, ConnectionError):
    """A stream ended without the end that its backend owes: the text so far is not an answer."""


class BackendProtocolError(ServiceError, RuntimeError):
    """The backend answered something that its protocol or the backend contract does not allow."""


class AuditError(ServiceError, OSError):
    """The audit record can't be written; a call that can't be recorded is not served."""
