"""The command `iaop`."""

from iaop_core.cli.main import main

__all__ = ["main"]
