"""Where downloaded and converted models live."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder", "models_folder"]


def cache_folder() -> Path:
    """`$IAOP_CACHE_DIR`, else `iaop` in `$XDG_CACHE_HOME`, else `~/.cache/iaop`."""
    if chosen := os.environ.get("IAOP_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "iaop"


def models_folder() -> Path:
    """The folder whose subfolders can be given as model ids by name alone."""
    return cache_folder() / "models"
