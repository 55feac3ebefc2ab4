"""The settings of the `onnx-local` backend, as the values file gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen, validators

from iaop_core import BackendCapabilities
from iaop_core.messages import PARAM_NAMES

__all__ = ["NAME", "OnnxLocalSettings"]

NAME: Final = "onnx-local"

_LEAST_CONTEXT: Final = 8  # what a cache is checked with at load has six tokens
_DEVICE: Final = r"auto|cuda|cpu|\w+ExecutionProvider"
_OPTION: Final = validators.deep_mapping(
    validators.instance_of(str), validators.instance_of((str, int, float))
)


@frozen(kw_only=True, slots=True)
class OnnxLocalSettings:
    """Settings of `onnx-local`; every one has a default."""

    model: str = "smollm2-135m-instruct"
    """The model that an empty model id means: a folder's path, or a name in the cache folder."""
    model_file: str = ""
    """Which ONNX file of the model folder runs: its path in the folder, or the name of a variant of
    the weights (`q4` is `model_q4.onnx` or `onnx/model_q4.onnx`). Empty: the one that
    `genai_config.json` names, else `model.onnx`, else `onnx/model.onnx`."""
    device: str = field(default="auto", validator=validators.matches_re(_DEVICE))
    """`cuda` must be had, or loading fails; so must any other execution provider, given by its full
    name, such as `OpenVINOExecutionProvider`. `auto` takes CUDA where the installed runtime can
    use it, else the CPU; results and health say which."""
    provider_options: Mapping[str, Any] = field(factory=dict, validator=_OPTION)
    """Options of the execution provider of `device`, by the names that it documents. Not with
    `auto`, nor `device_id` for `cuda`: which card it is says `CUDA_VISIBLE_DEVICES`."""
    provider_library: str = ""
    """Path of a vendor's plugin library (built for ONNX Runtime's interface of execution providers)
    that offers the provider of `device`, which has to be given by its full name."""
    threads: int = field(default=0, validator=validators.ge(0))
    """CPU threads of one step. 0: as many as the affinity mask and the cgroup's quota allow."""
    max_concurrency: int = field(default=8, validator=validators.ge(1))
    """Answers under way at a time: the rows of the batch, each with its part of the cache."""
    max_waiting: int = field(default=64, validator=validators.ge(0))
    """Further calls that may wait for a row, first come, first served. One more is refused."""
    prompt_part: int = field(default=64, validator=validators.ge(1))
    """Tokens of a new prompt that are read between two steps of the answers under way. More let
    the newcomer begin sooner, and the others wait longer for their next token."""
    batch_invariant: bool = False
    """Keeps a text the same to the token whatever else is in the batch, with quantized weights,
    too: their kernels round otherwise for one row, so a lone answer is computed as one of two,
    and takes about a fifth longer. And for one token than for a prompt, so a chat that goes on
    has its last answer read again. In fp32 it is so anyway."""
    max_tokens: int = field(default=256, validator=validators.ge(1))
    """Tokens of an answer at most, where the call doesn't say."""
    context_length: int = field(default=0, validator=validators.ge(0))
    """Tokens of prompt and answer together at most, no fewer than 8. 0: what the model was made
    for."""
    chat_template: str = ""
    """A Jinja file's path, or the name of one of the model's own chat templates, such as
    `tool_use`. Empty: the model's default."""
    stall_timeout_s: float = field(default=60.0, validator=validators.gt(0))
    """Health fails when one step of the engine has been running for so long (seconds)."""
    offline: bool = False
    """Answers from the offline kernel; no model, no runtime."""

    def __attrs_post_init__(self) -> None:
        if 0 < self.context_length < _LEAST_CONTEXT:
            raise ValueError(f"context_length is 0 or at least {_LEAST_CONTEXT}")
        if self.provider_options and self.device == "auto":
            raise ValueError("provider_options need a device by name, not 'auto'")
        if self.device.lower().startswith("cuda") and "device_id" in self.provider_options:
            raise ValueError("device_id is not for cuda: CUDA_VISIBLE_DEVICES says which card")
        if self.provider_library and self.device in ("auto", "cuda", "cpu"):
            raise ValueError("provider_library needs the full name of its provider as device")

    @property
    def capabilities(self) -> BackendCapabilities:
        """What a backend with these settings can do; it knows its device once a model is loaded."""
        return BackendCapabilities(
            streaming=True,
            max_concurrency=self.max_concurrency,
            on_premises=True,
            params=PARAM_NAMES,
            offline_mode=True,
        )
