"""Builds `tokenizer.json` from the vocabulary inside a GGUF file.

The file names its pre-tokenizer; the split rules here are those of llama.cpp's `llama-vocab.cpp`
and of the tokenizers the models were published with. A name that isn't known is refused: with the
wrong rules a model still answers, only worse, and nobody notices.
"""

from __future__ import annotations

from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from iaop_onnx_local.importer.gguf import GgufError, GgufFile

__all__ = ["build_tokenizer", "special_token_ids"]

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """Builds the tokenizer of a byte-level BPE vocabulary.

    Raises:
        GgufError: another kind of vocabulary, or an unknown pre-tokenizer.
    """
    kind = gguf.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise GgufError(f"{gguf.path}: tokenizer model {kind!r} can't be imported; known: 'gpt2'")
    texts = gguf.get("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges", list)]
    name = gguf.get("tokenizer.ggml.pre", str)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(texts)},
            merges=merges,
            ignore_merges=name == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf, name)
    tokenizer.decoder = decoders.ByteLevel()
    for number, type_ in enumerate(gguf.get("tokenizer.ggml.token_type", list)):
        if type_ in (_CONTROL, _USER_DEFINED):
            token = AddedToken(texts[number], normalized=False, special=type_ == _CONTROL)
            add = tokenizer.add_special_tokens if type_ == _CONTROL else tokenizer.add_tokens
            add([token])
    if gguf.metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = gguf.get("tokenizer.ggml.bos_token_id", int)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{texts[bos]} $A",
            pair=f"{texts[bos]} $A {texts[bos]} $B",
            special_tokens=[(texts[bos], bos)],
        )
    return tokenizer


def special_token_ids(gguf: GgufFile) -> dict[str, Any]:
    """Returns `bos_token_id`, `pad_token_id` (where given) and the list `eos_token_id`.

    Every token that ends a turn or a message counts as an end: EOS, end of turn, end of message.
    """
    found: dict[str, Any] = {
        f"{short}_token_id": gguf.metadata[key]
        for short, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in gguf.metadata
    }
    ends = (gguf.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    found["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    if not found["eos_token_id"]:
        raise GgufError(f"{gguf.path}: no metadata key names a token that ends an answer")
    return found


def _pre_tokenizer(gguf: GgufFile, name: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise GgufError(
        f"{gguf.path}: pre-tokenizer {name!r} can't be imported; "
        "known: 'gpt-2', 'llama-bpe', 'smollm'"
    )
