"""Which contract a model keeps: told from its metadata, never from its name."""

from __future__ import annotations

from collections.abc import Mapping

from iaop_gpu_triton.contract import TensorContract, refused
from iaop_gpu_triton.named_contract import ENSEMBLE, LLM_API, NamedContract, odd_names
from iaop_gpu_triton.tensors import ModelMetadata
from iaop_gpu_triton.vllm_contract import VllmContract


def contract_of(metadata: ModelMetadata, tensors: Mapping[str, str]) -> TensorContract:
    """The contract that the model's tensors show, or that the setting `tensors` tells.

    Raises `ModelLoadError`, naming the model's tensors, where there is none.
    """
    inputs = metadata.inputs.keys()
    if tensors:
        outputs = metadata.outputs.keys()
        for role, name in tensors.items():
            if name not in (outputs if role == "answer" else inputs):
                raise refused(metadata, f"it has no tensor {name}, which the setting tensors names")
        return NamedContract(metadata, odd_names(tensors))
    if "sampling_parameters" in inputs:
        return VllmContract(metadata)
    if "sampling_param_max_tokens" in inputs:
        return NamedContract(metadata, LLM_API)
    if {"text_input", "max_tokens"} <= inputs:
        return NamedContract(metadata, ENSEMBLE)
    if "input_ids" in inputs and "text_input" not in inputs:
        raise refused(
            metadata,
            "it takes token ids: a raw engine, no text model; name the ensemble or BLS model in "
            "front of it (TensorRT-LLM: ensemble, tensorrt_llm_bls), or put one there",
        )
    raise refused(
        metadata,
        "these are the tensors of no known kind of language model (vLLM has the input "
        "sampling_parameters, TensorRT-LLM max_tokens or sampling_param_max_tokens); where one "
        "text goes in and one comes out, name its tensors in the setting tensors",
    )
