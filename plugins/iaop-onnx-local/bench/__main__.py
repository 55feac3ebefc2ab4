"""Measures the `onnx-local` backend beside other engines, on the same model and thread count.

What it needs is installed and downloaded into the cache folder the first time. It waits for the
machine to be idle, takes a measurement again when others had a part of the CPU, and tells at the
end which ones they disturbed all the same. All cases on all models take about 40 minutes;
docs/performance.md explains them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from cases import CASES, Bench, Model
from environments import bench_folder, make_environment
from machine import describe_machine
from measuring import DISTURBED, Measurer
from prompts import PromptMaker
from table import section_as_json, section_as_text

from iaop_onnx_local.fetch import PUBLISHED_MODELS, fetch_gguf
from iaop_onnx_local.threads import usable_cpus

_PUBLISHED = PUBLISHED_MODELS["smollm2-135m-instruct"]
_INT4 = bench_folder() / "models" / "genai-int4"


def _find_model(name: str) -> Model:
    if name == "int4":
        return Model(name, "onnxruntime-genai's own int4 folder", _INT4)
    dtype = "fp32" if name == "fp32" else "keep"
    command = [sys.executable, "-m", "iaop_onnx_local.cli", "fetch", "--json", "--dtype", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    folder = Path(json.loads(done.stdout)["folder"])
    if name == "fp32":
        return Model(name, "SmolLM2-135M, dequantized to fp32", folder)
    return Model(name, "SmolLM2-135M, Q4_1 from GGUF", folder, fetch_gguf(_PUBLISHED))


def _choose_models(chosen: tuple[str, ...]) -> list[Model]:
    if "int4" in chosen and not _INT4.is_dir():
        raise click.UsageError(f"there is no {_INT4}; docs/performance.md tells how to make it")
    names = chosen or ("gguf", "fp32", *(["int4"] if _INT4.is_dir() else []))
    return [_find_model(name) for name in names]


@click.command(help=__doc__)
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True)
@click.option("--model", "models", type=click.Choice(["gguf", "fp32", "int4"]), multiple=True)
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=usable_cpus(), show_default=True, type=click.IntRange(1))
@click.option(
    "--patience",
    default=20.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds to wait for an idle machine before each measurement; 0 measures at once.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(
    cases: tuple[str, ...],
    models: tuple[str, ...],
    rounds: int,
    threads: int,
    patience: float,
    json_file: Path | None,
) -> None:
    # Engines stand still while they are not measured: they are woken and ended on every way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for environment in ("genai", "llamacpp"):
        make_environment(environment)
    versions: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    machine = describe_machine(threads)
    click.echo(", ".join(f"{name} {_shown(value)}" for name, value in machine.items()))
    disturbed, measured = [], 0
    for model in _choose_models(models):
        prompts = PromptMaker(model.folder)
        measurer = Measurer(prompts.make("warm-up", 24, 16), patience)
        bench = Bench(model, prompts, measurer, threads, rounds, versions)
        for name, case in CASES.items():
            # The other cases ask about scheduling, which is the same for all weights.
            if name in cases or (not cases and (model.gguf or name in ("alone", "together"))):
                section = case(bench)
                click.echo(section_as_text(section))
                found.append({"model": model.name, "case": name, **section_as_json(section)})
        disturbed += measurer.disturbed
        measured += measurer.measured
    click.echo("\n" + ", ".join(f"{name} {value}" for name, value in versions.items()))
    if disturbed:
        click.echo(
            f"NOT IDLE: in {len(disturbed)} of {measured} measurements others had more than "
            f"{DISTURBED:.0%} of the machine; these figures are not to be relied on:\n  "
            + "\n  ".join(disturbed)
        )
    else:
        click.echo(
            f"others had at most {DISTURBED:.0%} of the machine in all {measured} measurements"
        )
    if json_file:
        report = {
            "machine": machine,
            "versions": versions,
            "sections": found,
            "measurements": measured,
            "disturbed": disturbed,
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
