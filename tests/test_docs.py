"""The documents say what the code does: tables are compared with it, examples are run."""

from __future__ import annotations

import datetime
import inspect
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs
import pytest
from click.testing import CliRunner
from fake_site import FakeSite, good_plugin

import iaop_core.contract
import iaop_core.errors
from iaop_core import API_VERSION, LLMGateway, Secret, errors, plugins, values
from iaop_core.audit import AuditRow, Outcome
from iaop_core.cli import main
from iaop_core.errors import CapabilityNotSupportedError, IaopError, ValuesError
from iaop_core.plugins import PluginRegistry
from iaop_core.values import Values

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
if not DOCS.is_dir() and not (ROOT / "iaop_core").is_dir():
    pytest.skip("the documents were not copied beside the tests", allow_module_level=True)

DOCUMENTS = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return [match[2] for match in BLOCK.finditer(text) if match[1] == language]


def tables(text: str) -> list[list[dict[str, str]]]:
    """Every table of a document as its rows, each a mapping from the head's cells."""
    found: list[list[dict[str, str]]] = []
    head: list[str] | None = None
    for line in BLOCK.sub("", text).splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head = cells
            found.append([])
        elif not set(line) <= set("|- "):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def table_after(text: str, marker: str) -> list[dict[str, str]]:
    assert text.count(marker) == 1, marker
    return tables(text.partition(marker)[2])[0]


def code(cell: str) -> str:
    """The one code span that the cell is."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]


def codes(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


# -- links and languages ------------------------------------------------------------------------


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text))


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_document_links_lead_somewhere(document: Path) -> None:
    if not (ROOT / "plugins").is_dir():
        pytest.skip("only a checkout has all that is linked to")
    for link in links(document.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def without_comments(block: str) -> str:
    return re.sub(r"(^|  +)#.*$", "", block, flags=re.MULTILINE)


def test_chinese_readme_matches_the_english_one() -> None:
    english, chinese = read("README.md"), read("README.zh-CN.md")

    def shape(text: str) -> dict[str, Any]:
        prose = BLOCK.sub("", text)
        return {
            "headings": re.findall(r"^#+", prose, re.MULTILINE),
            "code": [(m[1], without_comments(m[2])) for m in BLOCK.finditer(text)],
            "links": [link for link in links(text) if not link.startswith("README")],
            "table rows": [len(table) for table in tables(text)],
            "spans": sorted(re.findall(r"`[^`]+`", prose)),
            "numbers": sorted(re.findall(r"(?<![\w.])\d+(?:\.\d+)?", prose)),
        }

    assert shape(chinese) == shape(english)
    assert "README.md" in links(chinese)
    assert "README.zh-CN.md" in links(english)


# -- values.md ----------------------------------------------------------------------------------

SETTINGS = [
    cls for cls in vars(values).values() if attrs.has(cls) and cls.__module__ == "iaop_core.values"
]
UNITS = {"_ms": "ms", "tokens_per_": "tokens", "requests_per_": "calls", "max_concurrency": "calls"}


def kind_of(cls: Any) -> str:
    """A field's type in the words of values.md."""
    choices = [choice for choice in get_args(cls) if choice is not type(None)]
    origin = get_origin(cls)
    if origin is tuple:
        return "list of " + kind_of(choices[0]) + "s"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping of name to mapping" if attrs.has(choices[1]) else "mapping"
    if choices:
        return " or ".join(kind_of(choice) for choice in choices)
    if attrs.has(cls):
        return "mapping"
    names = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    return {**names, Secret: "secret"}[cls]


def default_of(attribute: Any) -> str:
    default = attribute.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    if default is attrs.NOTHING:
        return "required"
    if default is None:
        return "none"
    if attrs.has(type(default)):
        return "all defaults"
    if isinstance(default, tuple | dict):
        return "`[]`" if isinstance(default, tuple) else "`{}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default or repr(default).replace(chr(39), chr(34))}`"


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_values_document_has_every_key(cls: type[Any]) -> None:
    rows = table_after(read("docs/values.md"), f"<!-- keys of {cls.__name__} -->")
    types = typing.get_type_hints(cls)
    expected = [
        (attribute.name, kind_of(types[attribute.name]), default_of(attribute))
        for attribute in attrs.fields(cls)
        if attribute.init
    ]
    assert [(code(row["key"]), row["type"], row["default"]) for row in rows] == expected
    for row in rows:
        unit = next((unit for part, unit in UNITS.items() if part in row["key"]), None)
        assert unit is None or row["unit"] == unit
        assert row["meaning"]


@pytest.mark.parametrize("name", ["README.md", "docs/values.md", "docs/backend.md"])
@pytest.mark.parametrize("language", ["yaml", "toml"])
def test_values_examples_are_valid(tmp_path: Path, name: str, language: str) -> None:
    examples = [block for block in blocks(read(name), language) if "[build-system]" not in block]
    assert examples or (language, name) != ("yaml", name)
    registry = PluginRegistry()
    for example in examples:
        file = tmp_path / f"values.{language}"
        file.write_text(example, encoding="utf-8")
        checked = Values.load(file)
        checked.default_route()
        for backend, settings in checked.backends.items():
            if settings.plugin in registry.names():  # those of the plugins that are installed
                spec = registry.get_spec(settings.plugin, allow_offline=True)
                checked.plugin_settings(backend, spec.settings_class)


def test_values_examples_in_toml_say_what_those_in_yaml_say(tmp_path: Path) -> None:
    text = read("docs/values.md")
    loaded = []
    for language, block in (("yaml", blocks(text, "yaml")[1]), ("toml", blocks(text, "toml")[0])):
        file = tmp_path / f"values.{language}"
        file.write_text(block, encoding="utf-8")
        loaded.append(Values.load(file))
    whole, beginning = loaded
    assert beginning.gateway == whole.gateway
    assert beginning.backends["gpu"].settings == whole.backends["gpu"].settings
    assert beginning.routes["assistant"] == whole.routes["assistant"]
    assert beginning.tenants["line-3"].api_key == whole.tenants["line-3"].api_key


def test_values_document_tells_the_default_route() -> None:
    two = {"a": {"plugin": "echo"}, "b": {"plugin": "echo"}}
    assert Values.load({"backends": {"a": two["a"]}}).default_route() == "a"
    assert Values.load({"backends": two, "gateway": {"route": "b"}}).default_route() == "b"
    with pytest.raises(ValuesError):
        Values.load({"backends": two})
    routes = {name: {"targets": [{"backend": "a"}]} for name in ("x", "y")}
    assert Values.load({"backends": two, "routes": {"x": routes["x"]}}).default_route() == "x"
    several = Values.load({"backends": two, "routes": routes})
    with pytest.raises(ValuesError):
        several.default_route()


def test_values_document_tells_the_on_premises_rule(fake_site: FakeSite) -> None:
    away = """name = 'away'
        capabilities = BackendCapabilities(streaming=True, max_concurrency=2, on_premises=False)
    """
    source = good_plugin("away").replace("name = 'away'", away)
    fake_site.install("iaop-away", source, name="away")
    told = {}
    for row in table_after(read("docs/values.md"), "follows:\n"):
        required = {"`true`": True, "`false`": False, "not given": None}[
            row["`require.on_premises`"]
        ]
        told[required] = tuple(
            row[place].startswith("yes") for place in ("as a target", "as a fallback")
        )

    def may(on_premises: bool | None, *, target: str, fallback: list[str]) -> bool:
        route: dict[str, Any] = {"targets": [{"backend": target}], "fallback": fallback}
        if on_premises is not None:
            route["require"] = {"on_premises": on_premises}
        site = {
            "backends": {"here": {"plugin": "echo"}, "away": {"plugin": "away"}},
            "routes": {"r": route},
        }
        try:
            with LLMGateway.from_values(site):
                return True
        except CapabilityNotSupportedError as error:
            return error.capability != "on_premises"

    assert told == {
        required: (
            may(required, target="away", fallback=["here"]),
            may(required, target="here", fallback=["away"]),
        )
        for required in (True, None, False)
    }


# -- contract.md --------------------------------------------------------------------------------

RULES = [
    getattr(iaop_core.contract, name)
    for name in iaop_core.contract.__all__
    if name.endswith("Contract")
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: rules.__name__)
def test_contract_document_has_every_rule(rules: type[Any]) -> None:
    rows = table_after(read("docs/contract.md"), f"## {rules.__name__}\n")
    tests = [name for name in vars(rules) if name.startswith("test_")]
    assert [code(row["rule"]) for row in rows] == tests
    for row in rows:
        marks = getattr(getattr(rules, code(row["rule"])), "pytestmark", [])
        strict = any(mark.args == ("strict",) for mark in marks)
        assert row["what holds"].startswith("*strict* · ") == strict


def test_contract_document_has_every_fact_of_a_subject() -> None:
    rows = table_after(read("docs/contract.md"), "<!-- fields of ContractSubject -->")
    fields = attrs.fields(iaop_core.contract.ContractSubject)
    assert [code(row["field"]) for row in rows] == [field.name for field in fields]
    for row, field in zip(rows, fields, strict=True):
        if field.default is None or field.default is attrs.NOTHING:
            assert row["default"] == ("required" if field.default is attrs.NOTHING else "None")


# -- errors.md ----------------------------------------------------------------------------------

BRANCHES = {errors.RequestError, errors.ConfigurationError, errors.ServiceError}
CLASSES = [getattr(errors, name) for name in errors.__all__]
LEAVES = [cls for cls in CLASSES if cls not in {IaopError, *BRANCHES}]


@pytest.fixture(scope="module")
def error_rows() -> dict[str, dict[str, str]]:
    rows = [row for table in tables(read("docs/errors.md")) for row in table]
    return {code(row["class"]): row for row in rows}


def test_error_document_has_the_tree() -> None:
    tree = blocks(read("docs/errors.md"), "text")[0]
    docstring = inspect.getdoc(iaop_core.errors) or ""
    assert "\n".join(f"    {line}" for line in tree.splitlines()) in docstring
    for cls in CLASSES:
        line = next(line for line in tree.splitlines() if re.search(rf"\b{cls.__name__}\b", line))
        builtin = re.search(r"\((\w+)\)", line)
        own = [base.__name__ for base in cls.__bases__ if not issubclass(base, IaopError)]
        assert own == ([builtin[1]] if builtin else ["Exception"] * (cls is IaopError))


def test_error_document_has_every_class(error_rows: dict[str, dict[str, str]]) -> None:
    assert set(error_rows) == {cls.__name__ for cls in LEAVES}


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_error_document_tells_attributes_and_retries(
    error_rows: dict[str, dict[str, str]], cls: type[Any]
) -> None:
    row = error_rows[cls.__name__]
    assert codes(row["attributes"]) == set(vars(cls("a"))) - {"backend"}
    for column, attribute in (("fails over", "may_fail_over"), ("retried", "may_retry")):
        cell = row[column]
        assert getattr(cls("a"), attribute) == (cell != "no")
        for flag in {"may_have_run", "busy"} & set(vars(cls("a"))):
            assert getattr(cls("a", **{flag: True}), attribute) == (f"`{flag}`" not in cell)


_RAISING = """
from iaop_core.echo import EchoBackend
from iaop_core import errors

class Raising(EchoBackend):
    name = "raising"

    def stream(self, prompt, context=None, *, params=None):
        raise getattr(errors, prompt)("as told", **self.more)
        yield

    more = {}
"""


@pytest.fixture
def raising_values(fake_site: FakeSite, tmp_path: Path) -> Path:
    source = good_plugin("raising").replace("return Backend()", "return Raising()")
    fake_site.install("iaop-raising", source + _RAISING, name="raising")
    file = tmp_path / "values.yaml"
    file.write_text("gateway: {retries: 0}\nbackends: {r: {plugin: raising}}\n")
    return file


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_error_document_tells_outcome_and_exit_code(
    error_rows: dict[str, dict[str, str]], raising_values: Path, cls: type[Any]
) -> None:
    row = error_rows[cls.__name__]
    ended = CliRunner().invoke(main, ["ask", "--values", str(raising_values), cls.__name__])
    assert ended.exit_code == int(row["exit"])
    outcome, kind = _query("SELECT outcome, error_kind FROM iaop_calls")[0]
    assert kind == cls.kind
    if cls is not errors.AuditError:  # raised by a backend here; in truth there is no row
        assert outcome == row["outcome"]


def test_error_document_example_prints_what_it_shows(run_python: Any) -> None:
    example, shown = (
        blocks(read("docs/errors.md"), "python")[0],
        blocks(read("docs/errors.md"), "text")[1],
    )
    assert run_python("-c", example).stdout == shown


# -- audit.md -----------------------------------------------------------------------------------


def _query(statement: str) -> list[Any]:
    connection = sqlite3.connect("iaop-audit.db")
    try:
        with connection:
            return connection.execute(statement).fetchall()
    finally:
        connection.close()


@pytest.fixture
def audit_database() -> None:
    with LLMGateway.from_values({"backends": {"a": {"plugin": "echo"}}}) as gateway:
        gateway.ask("a b c")


@pytest.mark.usefixtures("audit_database")
def test_audit_document_has_every_column() -> None:
    rows = table_after(read("docs/audit.md"), "## Columns\n")
    columns = {name: kind for _, name, kind, *_ in _query("PRAGMA table_info(iaop_calls)")}
    assert [code(row["column"]) for row in rows] == list(columns)
    assert list(columns)[3:] == [field.name for field in attrs.fields(AuditRow)][1:]
    names = {
        "integer": "INTEGER BIGINT",
        "timestamp": "DATETIME",
        "text": "TEXT",
        "boolean": "BOOLEAN",
        "float": "FLOAT",
    }
    for row in rows:
        assert columns[code(row["column"])] in names[row["type"]].split()


def test_audit_document_has_every_outcome() -> None:
    rows = table_after(read("docs/audit.md"), "## Outcomes\n")
    assert [code(row["outcome"]) for row in rows] == list(get_args(Outcome))


@pytest.mark.usefixtures("audit_database")
@pytest.mark.parametrize("number", range(5))
def test_audit_document_queries_run(number: int) -> None:
    queries = blocks(read("docs/audit.md"), "sql")
    assert len(queries) == 5
    _query(re.sub(r"2026-02-01", "9999-01-01", queries[number]))


@pytest.mark.usefixtures("audit_database")
def test_audit_document_query_of_a_month_finds_the_calls() -> None:
    month = blocks(read("docs/audit.md"), "sql")[0]
    today = datetime.datetime.now(datetime.UTC).date()
    month = month.replace("2026-01-01", f"{today}").replace(
        "2026-02-01", f"{today + datetime.timedelta(days=2)}"
    )
    assert _query(month) == [("", 1, 6)]


# -- versions.md --------------------------------------------------------------------------------


def test_version_document_tells_the_versions() -> None:
    text, project = read("docs/versions.md"), tomllib.loads(read("pyproject.toml"))["project"]
    assert f"`iaop_core.API_VERSION` is `{API_VERSION}`" in text
    major, minor, _ = project["version"].split(".")
    assert f"`iaop-core>={major}.{minor},<{major}.{int(minor) + 1}`" in text
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert f"Python {', '.join(pythons[:-1])} and {pythons[-1]} are supported" in text


@pytest.mark.parametrize(
    "row",
    tables(read("docs/versions.md"))[0],
    ids=lambda row: f"{row['core offers']}-{row['plugin states']}",
)
def test_version_document_tells_which_plugins_fit(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch, row: dict[str, str]
) -> None:
    monkeypatch.setattr(plugins, "API_VERSION", row["core offers"])
    source = good_plugin("other", api_version=row["plugin states"])
    fake_site.install("the-plugin", source, name="other")
    record = next(record for record in PluginRegistry().records() if record.name == "other")
    assert record.state == row["state"]
    what_to_do = row["what to do"].replace("the plugin", "the-plugin")
    assert record.reason.endswith(what_to_do)
    assert bool(record.reason) == bool(what_to_do)


# -- architecture.md ----------------------------------------------------------------------------


def test_architecture_document_draws_the_layers_that_are_held() -> None:
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    held = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawn = blocks(read("docs/architecture.md"), "text")[0].splitlines()
    assert [re.split(r"  +", line)[0] for line in drawn] == [
        layer.replace("iaop_core.", "") for layer in held
    ]


# -- backend.md ---------------------------------------------------------------------------------

FILE = re.compile(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_files(text: str, folder: Path) -> None:
    for file in FILE.finditer(text):
        path = folder / file[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file[2], encoding="utf-8")


@pytest.fixture
def documented_plugin(tmp_path: Path) -> Path:
    """The package that backend.md prints before it uses it, as if it were installed there."""
    folder = tmp_path / "iaop-wordpairs"
    write_files(read("docs/backend.md").partition("```console")[0], folder)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    return folder


def sessions(text: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each command of the console blocks, and the lines that it is shown to print.

    The files that the text prints are there from where it prints them on, as for its reader.
    """
    end = 0
    for block in BLOCK.finditer(text):
        if block[1] != "console":
            continue
        write_files(text[end : block.start()], folder)
        end = block.end()
        for command in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]:
            line, *shown = command.splitlines()
            yield line, shown


def test_backend_document_runs_as_it_shows(documented_plugin: Path) -> None:
    programs = set()
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(documented_plugin),
        "PYTHONWARNINGS": "error",
    }
    for command, shown in sessions(read("docs/backend.md"), documented_plugin):
        programs.add(command.split()[0])
        ended = subprocess.run(
            command,
            shell=True,
            cwd=documented_plugin,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        printed = iter([" ".join(line.split()) for line in ended.stdout.splitlines()])
        for line in shown:  # each in its turn; … stands for anything, other lines may be between
            pattern = re.escape(" ".join(line.split())).replace("…", ".*")
            assert any(re.fullmatch(pattern, other) for other in printed), (
                f"$ {command}\n{ended.stdout}\nlacks: {line}"
            )
        assert (ended.returncode != 0) == any(line.startswith("Error") for line in shown), command
    assert programs == {"iaop", "mv", "pytest"}


def test_backend_document_lists_its_files(documented_plugin: Path) -> None:
    write_files(read("docs/backend.md"), documented_plugin)
    tree = blocks(read("docs/backend.md"), "text")[0]
    for name in re.findall(r"^  (\S+?)(?:, |  |$)", tree, re.MULTILINE):
        assert (documented_plugin / name).is_file(), name


def test_backend_document_lists_every_face() -> None:
    rows = table_after(read("docs/backend.md"), "## Which face to write\n")
    faces = {face for row in rows for face in codes(row["you write"])}
    assert {"infer", "stream", "ainfer", "astream"} <= faces
