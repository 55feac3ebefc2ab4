"""`iaop ask`"""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import click
import yaml
from click.core import ParameterSource

from iaop_core.cli.options import (
    DEFAULT_VALUES,
    echo_json,
    find_values,
    json_option,
    values_option,
)
from iaop_core.errors import InvalidRequestError, ValuesError
from iaop_core.messages import InferResult
from iaop_core.values import RouteSettings, TargetSettings, Values

__all__ = ["ask"]

# What a terminal would obey instead of showing: a model's text must not steer it.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command()
@click.argument("prompt")
@values_option
@click.option(
    "--no-values", is_flag=True, help="Read no values file; --backend is an installed one."
)
@click.option("--route", "-r", help="A route of the values.")
@click.option("--backend", "-b", help="Instead of a route: this backend alone.")
@click.option("--model", "-m", default="", help="Without values: the model.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Without values: a setting."
)
@click.option(
    "--allow-offline", is_flag=True, help="Without values: take answers of the offline kernel too."
)
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
    no_values: bool,
    route: str | None,
    backend: str | None,
    model: str,
    settings: tuple[str, ...],
    allow_offline: bool,
    tenant: str | None,
    context: tuple[str, ...],
    max_tokens: int | None,
    temperature: float | None,
    params: tuple[str, ...],
    as_json: bool,
) -> None:
    """Ask PROMPT (or standard input, for -) and stream the answer.

    Where there is a values file, --backend is one of its backends. Without one, or with
    --no-values, it is an installed backend, as `iaop backends` lists them.
    """
    from iaop_core.gateway import LLMGateway

    if backend is not None and route is not None:
        raise click.UsageError("--route and --backend exclude each other: give one")
    file = None if no_values else find_values(values)
    if no_values and _is_typed("values"):
        raise click.UsageError("--values and --no-values exclude each other: give one")
    if no_values and backend is None:
        raise click.UsageError("--no-values needs --backend")
    if backend is not None and file is None:
        chosen = _values_of_plugin(backend, model, _pairs(settings), allow_offline)
    elif model or settings or allow_offline:
        raise click.UsageError(
            "--model, --set and --allow-offline go with --backend and no values file; "
            + (f"{file} says it, unless you add --no-values" if file else "name a --backend")
        )
    else:
        chosen = Values.load(file or DEFAULT_VALUES)
        if backend is not None:
            chosen = _only(chosen, backend, str(file))
    given = {"max_tokens": max_tokens, "temperature": temperature, **_pairs(params)}
    given = {name: value for name, value in given.items() if value is not None}
    text = _standard_input() if prompt == "-" else _readable(prompt, "PROMPT")
    for source in context:
        _readable(source, "--context")
    gateway = LLMGateway.from_values(chosen)
    try:
        gateway.load(route=route or chosen.default_route())
        if as_json:
            result = gateway.ask(text, context, route=route, tenant=tenant, params=given)
            echo_json(attrs.asdict(result, value_serializer=_as_json))
            return
        chunks: Any = gateway.stream(text, context, route=route, tenant=tenant, params=given)
        with closing(chunks):  # before the gateway: an interrupted call has its row, too
            for chunk in chunks:
                _echo_delta(chunk.delta)
                if chunk.result is not None:
                    click.echo()
                    click.echo(_summary(chunk.result), err=True)
    finally:
        gateway.close()


def _as_json(_instance: object, _attribute: object, value: Any) -> Any:
    return list(value) if isinstance(value, bytes) else value  # as the OpenAI API writes bytes


def _is_typed(parameter: str) -> bool:
    """Whether the parameter stands on the command line, not in the environment."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is ParameterSource.COMMANDLINE


def _values_of_plugin(
    plugin: str, model: str, settings: dict[str, Any], allow_offline: bool
) -> Values:
    return Values.load(
        {
            "gateway": {"allow_offline": allow_offline},
            "backends": {plugin: {"plugin": plugin, "model": model, "settings": settings}},
        }
    )


def _only(values: Values, backend: str, source: str) -> Values:
    """The values with one route, which has this backend alone."""
    if backend not in values.backends:
        raise ValuesError(
            f"no backend {backend!r}; there are: {', '.join(values.backends)}. To ask an installed "
            "backend without values, add --no-values",
            source=source,
        )
    only = RouteSettings(targets=(TargetSettings(backend=backend),))
    gateway = attrs.evolve(values.gateway, route=backend)
    return attrs.evolve(values, gateway=gateway, routes={backend: only})


def _standard_input() -> str:
    # Not by sys.stdin's own decoding, which depends on the locale.
    return _readable(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"), "standard input")


def _readable(text: str, what: str) -> str:
    """The text, unless its bytes were no UTF-8, which Python keeps as halves of surrogate pairs."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequestError(f"{what} is not UTF-8 text", param="prompt")
    return text


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
