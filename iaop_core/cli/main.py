"""The group of commands, and how errors become exit codes."""

from __future__ import annotations

import importlib
from typing import Any

import click

from iaop_core.errors import ConfigurationError, IaopError, RequestError, ValuesError

__all__ = ["main"]

_COMMANDS = {
    "ask": "Ask a question and stream the answer.",
    "backends": "List the installed backends, with state and reason.",
    "config": "Check or show a values file.",
    "doctor": "Show what is installed and what is wrong with it.",
    "health": "Ask every backend of the values how it is.",
    "usage": "Show calls and tokens by day, tenant and backend.",
}


class _Commands(click.Group):
    """Imports a command's module when it is run, so that none pays for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"iaop_core.cli.{cmd_name}")
        return getattr(module, cmd_name)  # type: ignore[no-any-return]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except IaopError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(_exit_code(error))
        except KeyboardInterrupt:
            ctx.exit(130)


def _exit_code(error: IaopError) -> int:
    if isinstance(error, RequestError | ValuesError):
        return 2
    return 3 if isinstance(error, ConfigurationError) else 1


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="iaop-core")
def main() -> None:
    """One gateway in front of pluggable LLM inference backends.

    \b
    Exit codes:
      0    done, or healthy
      1    unhealthy, or the backend or the network failed
      2    wrong usage, wrong values or a wrong request
      3    the selected plugin or model can't be used
      130  interrupted
    """
