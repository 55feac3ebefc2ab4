"""`iaop-onnx`: makes model folders for the `onnx-local` backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from iaop_onnx_local.importer.folder import ImportedModel

_DTYPE = click.option(
    "--dtype",
    type=click.Choice(["keep", "fp32"]),
    default="keep",
    show_default=True,
    help="keep: weights stay as the file encodes them. fp32: all dequantized (large, exact).",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def main() -> None:
    """Make model folders for the onnx-local backend."""


@main.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@_DTYPE
@click.option("--force", is_flag=True, help="Replace OUT where it is there already.")
@_JSON
def import_(file: Path, out: Path, dtype: Any, force: bool, as_json: bool) -> None:
    """Convert the GGUF model FILE to the ONNX model folder OUT."""
    _require_onnx()
    from iaop_onnx_local.importer.folder import import_gguf

    with _reported_errors(), _progress(f"Converting {file.name}", file.stat().st_size) as advance:
        made = import_gguf(file, out, dtype=dtype, overwrite=force, advance=advance)
    _report(made, out, as_json)


@main.command()
@click.argument("name", default="smollm2-135m-instruct")
@_DTYPE
@_JSON
def fetch(name: str, dtype: Any, as_json: bool) -> None:
    """Download the published model NAME and convert it into the cache folder, once."""
    _require_onnx()
    from iaop_onnx_local.fetch import PUBLISHED_MODELS, fetch_gguf
    from iaop_onnx_local.importer.folder import import_gguf

    model = PUBLISHED_MODELS.get(name)
    if model is None:
        known = ", ".join(PUBLISHED_MODELS)
        raise click.BadParameter(f"no published model is named {name!r}; known: {known}")
    folder, made = model.folder(dtype), None
    if not model.is_converted(dtype):
        with _reported_errors():
            source = fetch_gguf(model)
            with _progress(f"Converting {name}", model.size_bytes) as advance:
                made = import_gguf(source, folder, dtype=dtype, overwrite=True, advance=advance)
    _report(made, folder, as_json)


def _require_onnx() -> None:
    if find_spec("onnx") is None:
        raise click.ClickException(
            "converting a model needs the package onnx: pip install 'iaop-onnx-local[import]'"
        )


@contextmanager
def _reported_errors() -> Iterator[None]:
    from iaop_onnx_local.fetch import FetchError
    from iaop_onnx_local.importer.gguf import GgufError

    try:
        yield
    except FileExistsError as error:
        raise click.ClickException(f"{error}; --force replaces it") from None
    except (FetchError, GgufError, OSError) as error:
        raise click.ClickException(str(error)) from None


@contextmanager
def _progress(label: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=size_bytes, label=label, file=sys.stderr) as bar:
        yield bar.update


def _report(made: ImportedModel | None, folder: Path, as_json: bool) -> None:
    if as_json:
        facts: dict[str, Any] = {"folder": str(folder), "converted": made is not None}
        if made is not None:
            facts |= {
                "dtype": made.dtype,
                "source_sha256": made.source_sha256,
                "size_bytes": made.size_bytes,
                "seconds": round(made.seconds, 3),
            }
        click.echo(json.dumps(facts))
    elif made is None:
        click.echo(f"{folder} is there already")
    else:
        click.echo(f"{folder}: {made.size_bytes / 1e6:.0f} MB in {made.seconds:.1f} s")


if __name__ == "__main__":
    main()
