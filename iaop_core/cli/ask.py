"""`iaop ask`"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import yaml

from iaop_core.cli.options import DEFAULT_VALUES, echo_json, json_option, values_option
from iaop_core.errors import ValuesError
from iaop_core.messages import InferResult
from iaop_core.values import RouteSettings, TargetSettings, Values

__all__ = ["ask"]

# What a terminal would obey instead of showing: a model's text must not steer it.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command()
@click.argument("prompt")
@values_option
@click.option(
    "--backend", "-b", help="With --values one of its backends, otherwise an installed one."
)
@click.option("--model", "-m", default="", help="The model, where no values name one.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of --backend."
)
@click.option("--allow-offline", is_flag=True, help="Take answers of the offline kernel too.")
@click.option("--route", "-r", help="A route of the values.")
@click.option("--tenant", "-t", help="Whom to bill.")
@click.option("--context", "-c", multiple=True, help="A source text; may be given several times.")
@click.option("--max-tokens", type=int, help="Tokens of the answer at most.")
@click.option("--temperature", type=float)
@click.option(
    "--param", "-p", "params", multiple=True, metavar="KEY=VALUE", help="Another parameter."
)
@json_option
def ask(
    prompt: str,
    values: Path | None,
    backend: str | None,
    model: str,
    settings: tuple[str, ...],
    allow_offline: bool,
    route: str | None,
    tenant: str | None,
    context: tuple[str, ...],
    max_tokens: int | None,
    temperature: float | None,
    params: tuple[str, ...],
    as_json: bool,
) -> None:
    """Ask PROMPT (or standard input, for -) and stream the answer.

    With --backend and no values file the installed backend of that name is taken.
    """
    from iaop_core.gateway import LLMGateway

    chosen = _choose(values, backend, model, _pairs(settings), allow_offline)
    given = {"max_tokens": max_tokens, "temperature": temperature, **_pairs(params)}
    given = {name: value for name, value in given.items() if value is not None}
    text = sys.stdin.read() if prompt == "-" else prompt
    gateway = LLMGateway.from_values(chosen)
    try:
        gateway.load(route=route or chosen.default_route())
        if as_json:
            result = gateway.ask(text, context, route=route, tenant=tenant, params=given)
            echo_json(attrs.asdict(result))
            return
        chunks = gateway.stream(text, context, route=route, tenant=tenant, params=given)
        for chunk in chunks:
            _echo_delta(chunk.delta)
            if chunk.result is not None:
                click.echo()
                click.echo(_summary(chunk.result), err=True)
    finally:
        gateway.close()


def _choose(
    values: Path | None,
    backend: str | None,
    model: str,
    settings: Mapping[str, Any],
    allow_offline: bool,
) -> Values:
    if values is None and backend is not None:
        data = {
            "gateway": {"allow_offline": allow_offline},
            "backends": {backend: {"plugin": backend, "model": model, "settings": settings}},
        }
        return Values.load(data)
    if model or settings or allow_offline:
        raise click.UsageError(
            "--model, --set and --allow-offline go with --backend and no values file; "
            "otherwise the values say it"
        )
    chosen = Values.load(values or DEFAULT_VALUES)
    if backend is None:
        return chosen
    if backend not in chosen.backends:
        raise ValuesError(f"no backend {backend!r}; there are: {', '.join(chosen.backends)}")
    only = RouteSettings(targets=(TargetSettings(backend=backend),))
    gateway = attrs.evolve(chosen.gateway, route=backend)
    return attrs.evolve(chosen, gateway=gateway, routes={backend: only})


def _pairs(texts: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE texts; a value is read as YAML, so that numbers are numbers."""
    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{text!r} is not KEY=VALUE")
        try:
            pairs[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            pairs[key] = value
    return pairs


def _echo_delta(delta: str) -> None:
    if sys.stdout.isatty():
        delta = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", delta)
    click.echo(delta, nl=False)
    sys.stdout.flush()


def _summary(result: InferResult) -> str:
    about = "about " if result.usage_estimated else ""
    parts = [
        f"{result.backend_name}: {result.model_id}"
        + (f" on {result.device}" * bool(result.device)),
        f"{about}{result.prompt_tokens} + {result.completion_tokens} tokens",
        f"{result.latency_ms / 1000:.2f} s",
    ]
    if result.time_to_first_token_ms is not None:
        parts.append(f"first token after {result.time_to_first_token_ms / 1000:.2f} s")
    if result.finish_reason != "stop":
        parts.append(f"ended by {result.finish_reason}")
    if result.offline:
        parts.append("OFFLINE KERNEL: this is no model's answer")
    return f"[{' · '.join(parts)}]"
