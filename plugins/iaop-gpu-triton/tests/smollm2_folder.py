"""The ONNX folder of SmolLM2-135M-Instruct, from the cache or made by iaop-onnx-local."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

MODEL = "smollm2-135m-instruct"


class ConverterMissingError(RuntimeError):
    """The folder isn't in the cache, and nothing here can make it."""


def smollm2_folder(cache: Path) -> Path:
    """The model's folder; fetched (93 MB) and converted when it isn't in the cache.

    The converter is a part of iaop-onnx-local, which need not be installed where only this plugin
    is: then `ConverterMissingError` says what to install.
    """
    folder = cache / "models" / MODEL
    if (folder / "import.json").exists():
        return folder
    missing = [name for name in ("iaop_onnx_local", "onnx") if find_spec(name) is None]
    if missing:
        raise ConverterMissingError(
            f"the real language model is not in {folder}, and {' and '.join(missing)} is not "
            "installed to make it; pip install 'iaop-onnx-local[import]'"
        )
    command = [sys.executable, "-m", "iaop_onnx_local.cli", "fetch", MODEL, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Path(json.loads(done.stdout)["folder"])
