"""Virtual environments for the engines that are compared, made once in the cache folder.

Each has its own, because onnxruntime-genai brings an ONNX Runtime that would overwrite ours.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from iaop_onnx_local.cache import cache_folder

__all__ = ["bench_folder", "make_environment"]


def bench_folder() -> Path:
    """Where the benchmark keeps what it makes."""
    return cache_folder() / "bench"


def _requirements() -> dict[str, list[str]]:
    return {
        # The same ONNX Runtime as ours, so that the engines are compared and not two runtimes.
        "genai": [
            "onnxruntime-genai==0.18.*",
            f"onnxruntime=={version('onnxruntime')}",
            "numpy>=2,<3",
        ],
        "llamacpp": ["xllamacpp>=2026.10,<2027"],
    }


def make_environment(name: str) -> Path:
    """Makes the environment unless it is there, and returns its Python.

    Raises:
        subprocess.CalledProcessError: pip could not install the packages; it has said why.
    """
    requirements = _requirements()[name]
    folder = bench_folder() / "environments" / name
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join([f"# Python {sys.version.split()[0]}", *requirements, ""])
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"Installing {', '.join(requirements)} into {folder} …", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements], check=True, stdout=sys.stderr)
    stamp.write_text(wanted, "utf-8")  # last: an environment half made is made anew
    return python


if __name__ == "__main__":
    for wanted_name in sys.argv[1:] or _requirements():
        print(make_environment(wanted_name))
