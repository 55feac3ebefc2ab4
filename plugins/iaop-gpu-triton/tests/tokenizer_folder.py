"""A folder with a chat template, as tokenizers are published in."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}<assistant>"
)


def write_tokenizer_folder(folder: Path) -> Path:
    """Write one into the folder."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
