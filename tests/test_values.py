"""The values file: every rule, with the file, the line and the key of each error."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen, validators

from iaop_core import Secret
from iaop_core.errors import ValuesError
from iaop_core.values import Values

FULL_YAML = """\
gateway:
  route: assistant
  timeout_ms: 5000
backends:
  gpu: {plugin: gpu-triton, model: llm-70b-onnx, settings: {server_url: "triton:8001"}}
  local:
    plugin: onnx-local
    max_concurrency: 2
  cloud: {plugin: cloud-api, settings: {api_key: "${env:CLOUD_KEY}"}}
routes:
  assistant:
    targets: [{backend: gpu, weight: 95}, {backend: local, weight: 5}]
    fallback: [local]
    require: {on_premises: true}
tenants:
  line-3: {api_key: "${file:/run/secrets/line-3}", tokens_per_day: 2000000}
audit: {url: "postgresql+psycopg://iaop:${env:PG_PASSWORD}@db/audit"}
"""

FULL_TOML = """\
[gateway]
route = "assistant"
timeout_ms = 5000

[backends.gpu]
plugin = "gpu-triton"
model = "llm-70b-onnx"
settings = { server_url = "triton:8001" }

[backends.local]
plugin = "onnx-local"
max_concurrency = 2

[backends.cloud]
plugin = "cloud-api"
settings.api_key = "${env:CLOUD_KEY}"

[routes.assistant]
fallback = ["local"]
require.on_premises = true

[[routes.assistant.targets]]
backend = "gpu"
weight = 95

[[routes.assistant.targets]]
backend = "local"
weight = 5

[tenants.line-3]
api_key = "${file:/run/secrets/line-3}"
tokens_per_day = 2000000

[audit]
url = "postgresql+psycopg://iaop:${env:PG_PASSWORD}@db/audit"
"""

ONE = "backends: {a: {plugin: echo}}\n"


def _load(text: str, suffix: str = ".yaml") -> Values:
    path = Path(f"values{suffix}")
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return Values.load(path)


def _refusal(text: str, suffix: str = ".yaml") -> ValuesError:
    with pytest.raises(ValuesError) as caught:
        _load(text, suffix)
    assert str(caught.value).startswith(f"values{suffix}")
    return caught.value


def test_yaml_and_toml_say_the_same() -> None:
    assert _load(FULL_YAML) == _load(FULL_TOML, ".toml")


def test_values_are_read_as_written() -> None:
    values = _load(FULL_YAML)
    assert values.gateway.timeout_ms == 5000
    assert values.backends["local"].max_concurrency == 2
    assert [target.weight for target in values.routes["assistant"].targets] == [95, 5]
    assert values.routes["assistant"].require.on_premises is True
    assert values.tenants["line-3"].api_key == Secret("${file:/run/secrets/line-3}")
    assert values.default_route() == "assistant"


def test_mapping_is_taken_as_a_file_is() -> None:
    data = {"backends": {"a": {"plugin": "echo"}}}
    assert Values.load(data) == _load(ONE)


def test_checked_values_are_taken_as_they_are() -> None:
    values = _load(ONE)
    assert Values.load(values) is values


def test_byte_order_mark_is_no_part_of_the_values() -> None:
    assert _load("\ufeff" + ONE) == _load('\ufeffbackends.a.plugin = "echo"', ".toml")


# -- where an error is --------------------------------------------------------------------------

WRONG: list[tuple[str, int | None, str, str]] = [
    # text, line, key, what the message says
    ("", None, "backends", "'backends' is missing"),
    ("- a\n", None, "", "is a mapping such as {backends: …}, not of type list"),
    ("backends: {}\n", 1, "backends", "at least one backend"),
    ("backends: []\n", 1, "backends", "is a mapping of keys to values"),
    ("backends:\n  a: {model: m}\n", 2, "backends.a.plugin", "'plugin' is missing"),
    (ONE + "gatway: {}\n", 2, "gatway", "did you mean 'gateway'?"),
    (ONE + "zzz: {}\n", 2, "zzz", "known: gateway, backends, routes, tenants, audit"),
    ("backends:\n  a:\n    plugin: x\n    modle: m\n", 4, "backends.a.modle", "'model'"),
    ("backends:\n  a:\n    plugin: 7\n", 3, "backends.a.plugin", "a text, not of type int"),
    ("backends:\n  a:\n    plugin: null\n", 3, "backends.a.plugin", "a text, not of type NoneT"),
    (ONE + "gateway:\n  timeout_ms: soon\n", 3, "gateway.timeout_ms", "a number, not of type str"),
    (ONE + "gateway:\n  timeout_ms: true\n", 3, "gateway.timeout_ms", "not of type bool"),
    (ONE + "gateway:\n  timeout_ms: 0\n", 3, "gateway.timeout_ms", "must be > 0"),
    (ONE + "gateway:\n  timeout_ms: .nan\n", 3, "gateway.timeout_ms", "must be > 0"),
    (ONE + "gateway:\n  timeout_ms: .inf\n", 3, "gateway.timeout_ms", "must be < inf"),
    (ONE + "gateway:\n  slot_wait_ms: -1\n", 3, "gateway.slot_wait_ms", "must be >= 0"),
    (ONE + "gateway:\n  retries: 1.5\n", 3, "gateway.retries", "a whole number, not of type float"),
    (ONE + "gateway:\n  retries: '1'\n", 3, "gateway.retries", "a whole number, not of type str"),
    (ONE + "gateway:\n  allow_offline: 'yes'\n", 3, "gateway.allow_offline", "true or false"),
    (ONE + "gateway:\n  allow_offline: 1\n", 3, "gateway.allow_offline", "true or false"),
    (ONE + "gateway: {route: b}\n", 2, "gateway.route", "no route is named 'b'"),
    (ONE + "routes:\n  r: {}\n", 3, "routes.r.targets", "'targets' is missing"),
    (
        ONE + "routes:\n  r:\n    targets: []\n",
        4,
        "routes.r.targets",
        "need one with a weight above 0",
    ),
    (ONE + "routes:\n  r:\n    targets: a\n", 4, "routes.r.targets", "is a list, not of type str"),
    (
        ONE + "routes:\n  r:\n    targets: [a]\n",
        *(4, "routes.r.targets[0]", "is a mapping such as {backend: …}, not of type str"),
    ),
    (ONE + "gateway: a\n", 2, "gateway", "is a mapping such as {route: …}, not of type str"),
    (
        ONE + "routes:\n  r:\n    targets:\n    - backend: a\n      weight: 0\n",
        *(4, "routes.r.targets", "need one with a weight above 0"),
    ),
    (
        ONE + "routes:\n  r:\n    targets:\n    - backend: a\n      weight: .inf\n",
        *(6, "routes.r.targets[0].weight", "must be < inf"),
    ),
    (
        ONE + "routes:\n  r:\n    targets:\n    - {backend: a}\n    - {backend: aa}\n",
        *(6, "routes.r.targets[1].backend", "no backend is named 'aa'; did you mean 'a'?"),
    ),
    (
        ONE + "routes:\n  r:\n    targets: [{backend: a}]\n    fallback: [zzz]\n",
        *(5, "routes.r.fallback[0]", "no backend is named 'zzz'; there are: a"),
    ),
    (
        ONE + "routes:\n  r:\n    targets: [{backend: a}]\n    fallback: a\n",
        *(5, "routes.r.fallback", "is a list, not of type str"),
    ),
    (
        ONE + "routes:\n  r:\n    targets: [{backend: a}]\n    require: {onpremises: true}\n",
        *(5, "routes.r.require.onpremises", "did you mean 'on_premises'?"),
    ),
    (
        "backends:\n  a: {plugin: echo}\n  b: {plugin: echo}\n",
        *(None, "gateway.route", "several backends and no routes"),
    ),
    (ONE + "tenants:\n  t:\n    tokens_per_day: 0\n", 4, "tenants.t.tokens_per_day", "must be > 0"),
    (
        ONE + "tenants:\n  t:\n    api_key: sk-zebra\n",
        *(4, "tenants.t.api_key", "a secret is given by reference"),
    ),
    (
        ONE + "tenants:\n  t:\n    api_key: 4711\n",
        *(4, "tenants.t.api_key", "is a text, not of type int"),
    ),
    (
        "backends:\n  a:\n    plugin: echo\n    model: '${env:MODEL}'\n",
        *(4, "backends.a.model", "stand in secret settings only"),
    ),
    (
        ONE + "audit:\n  url: postgresql://iaop:sk-zebra@db/audit\n",
        *(3, "audit.url", "holds a password; give it by reference"),
    ),
    (
        ONE + "audit:\n  url: postgresql://db/audit?user=iaop&password=sk-zebra\n",
        *(3, "audit.url", "holds a password; give it by reference"),
    ),
    # what is no YAML, or YAML that means no values
    ("backends: {a: {plugin: echo}\n", 2, "", "not YAML"),
    ("a: 1\nb: 2\na: 3\n", 3, "", "the key 'a' is given twice"),
    ("backends:\n  a: {plugin: x, plugin: y}\n", 2, "", "the key 'plugin' is given twice"),
    ("backends:\n  ? [a, b]\n  : 1\n", 2, "", "a key is a text"),
    ("backends:\n  a: {plugin: !!python/name:os.system }\n", 2, "", "not YAML"),
    ("backends: {a: {plugin: x, model: 2024-13-45}}\n", None, "", "not YAML: month"),
    ("backends: {a: {plugin: !!int x}}\n", None, "", "not YAML"),
    ("a: 1\nb: \x07\n", 2, "", "not YAML: special characters"),
    ("backends: &x\n  a: *x\n", 2, "backends.a.plugin", "unknown key"),
]


@pytest.mark.parametrize(("text", "line", "key", "says"), WRONG, ids=lambda x: repr(x)[:40])
def test_wrong_values_are_refused_at_their_line(
    text: str, line: int | None, key: str, says: str
) -> None:
    error = _refusal(text)
    assert says in str(error)
    assert (error.line, error.path) == (line, key)
    assert "zebra" not in str(error)
    assert "4711" not in str(error)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[backends.a]\nplugin = 'echo'\nmodle = 'm'\n", 3, "did you mean 'model'?"),
        ("[backends.a]\nplugin = 7\n", 2, "is a text, not of type int"),
        ("[backends.a]\nplugin = 'x'\nplugin = 'y'\n", None, "not TOML"),
        ("backends = {\n", None, "not TOML"),
        (
            "[backends.a]\nplugin = 'x'\n[[routes.r.targets]]\nbackend = 'b'\n",
            *(3, "no backend is named 'b'"),
        ),
    ],
)
def test_wrong_toml_is_refused_at_its_line(text: str, line: int | None, says: str) -> None:
    error = _refusal(text, ".toml")
    assert says in str(error)
    assert error.line == line


def test_every_problem_is_told_at_once() -> None:
    error = _refusal("backends:\n  a: {plugin: 7}\n  b: {plugin: x, modle: m}\ngatewy: {}\n")
    text = str(error)
    for line, key in ((2, "backends.a.plugin"), (3, "backends.b.modle"), (4, "gatewy")):
        assert f"values.yaml:{line}: {key}: " in text


def test_every_contradiction_is_told_at_once() -> None:
    error = _refusal(
        ONE + "gateway: {route: s}\n"
        "routes:\n"
        "  r: {targets: [{backend: b}], fallback: [c]}\n"
        "  t: {targets: [{backend: d}]}\n"
    )
    lines = str(error).splitlines()
    assert [line.partition(": no ")[0] for line in lines] == [
        "values.yaml:4: routes.r.targets[0].backend",
        "values.yaml:4: routes.r.fallback[0]",
        "values.yaml:5: routes.t.targets[0].backend",
        "values.yaml:2: gateway.route",
    ]
    assert (error.line, error.path) == (4, "routes.r.targets[0].backend")


def test_aliases_that_multiply_are_read_in_no_time() -> None:
    laughs = "l0: &l0 [lol]\n" + "".join(
        f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert "unknown key" in str(_refusal(laughs))


def test_nesting_without_end_is_refused() -> None:
    assert "nested too deeply" in str(_refusal("a: " + "[" * 5000 + "]" * 5000))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.yaml", "No such file"),
        (".", "Is a directory"),
        ("values.json", "in a .yaml, .yml or .toml file"),
        ("latin.yaml", "not UTF-8"),
    ],
)
def test_file_that_can_not_be_read_is_a_values_error(name: str, says: str) -> None:
    Path("values.json").write_text("{}")
    Path("latin.yaml").write_bytes("backends: {ä: 1}".encode("latin-1"))
    with pytest.raises(ValuesError, match=says):
        Values.load(name)


@pytest.mark.parametrize("values", [None, 7, [], "", b"x"])
def test_values_of_another_type_are_a_values_error(values: Any) -> None:
    with pytest.raises(ValuesError):
        Values.load(values)


# -- routes -------------------------------------------------------------------------------------


def test_only_backend_is_the_route_when_there_are_no_routes() -> None:
    values = _load(ONE)
    assert values.default_route() == "a"
    assert [target.backend for target in values.routes["a"].targets] == ["a"]


def test_gateway_route_names_the_backend_when_there_are_no_routes() -> None:
    values = _load("gateway: {route: b}\nbackends: {a: {plugin: x}, b: {plugin: x}}\n")
    assert values.default_route() == "b"
    assert list(values.routes) == ["b"]


def test_only_route_is_the_default() -> None:
    values = _load(ONE + "routes: {r: {targets: [{backend: a}]}}\n")
    assert values.default_route() == "r"


def test_default_route_among_several_has_to_be_named() -> None:
    routes = "routes: {r: {targets: [{backend: a}]}, s: {targets: [{backend: a}]}}\n"
    with pytest.raises(ValuesError, match=r"several routes \(r, s\)"):
        _load(ONE + routes).default_route()
    assert _load(ONE + routes + "gateway: {route: s}\n").default_route() == "s"


# -- settings of a plugin -----------------------------------------------------------------------


@frozen
class Inner:
    a: int = 0


@frozen
class Settings:
    url: str = ""
    timeout_ms: float = 1.0
    device: Literal["auto", "cuda", "cpu"] = "auto"
    api_key: Secret | None = None
    headers: Mapping[str, str | Secret] = field(factory=dict)
    names: Sequence[str] = ()
    ids: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()
    inner: Inner = Inner()
    more: dict[str, Inner] = field(factory=dict)
    path: Path | None = None
    mode: str = field(default="a", validator=validators.in_(["a", "b"]))
    count: int = field(default=1)

    @count.validator
    def _check(self, _attribute: object, value: int) -> None:
        if value > 3:
            raise ValueError("'count' is 3 at most")


def _settings(text: str) -> Settings:
    indented = textwrap.indent(textwrap.dedent(text), "      ")
    values = _load(f"backends:\n  a:\n    plugin: x\n    settings:\n{indented}")
    return values.plugin_settings("a", Settings)


def test_settings_are_of_the_plugins_class() -> None:
    settings = _settings(
        """
        timeout_ms: 5
        device: cpu
        api_key: "${env:KEY}"
        headers: {x-site: plant, x-key: "Bearer ${env:KEY}"}
        names: [a, b]
        ids: [1]
        tags: [t]
        inner: {a: 1}
        more: {k: {a: 2}}
        """
    )
    assert settings == Settings(
        timeout_ms=5,
        device="cpu",
        api_key=Secret("${env:KEY}"),
        headers={"x-site": "plant", "x-key": Secret("Bearer ${env:KEY}")},
        names=("a", "b"),
        ids=(1,),
        tags=frozenset({"t"}),
        inner=Inner(1),
        more={"k": Inner(2)},
    )


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("\ntimout_ms: 5", 6, "settings.timout_ms: unknown key; did you mean 'timeout_ms'?"),
        ("\nurl: 5", 6, "settings.url: is a text, not of type int"),
        ("\nurl: '${env:KEY}'", 6, "stand in secret settings only"),
        ("\ndevice: gpu", 6, "settings.device: is one of auto, cuda, cpu"),
        ("\ndevice: true", 6, "settings.device: is one of auto, cuda, cpu"),
        ("\napi_key: sk-zebra", 6, "settings.api_key: a secret is given by reference"),
        ("\nheaders: {a: 1}", 6, "settings.headers.a: is a text, not of type int"),
        ("\nheaders: {1: a}", 6, "settings.headers.1: the key is a text, not of type int"),
        ("\nheaders: [a]", 6, "settings.headers: is a mapping of keys to values"),
        ("\nnames: abc", 6, "settings.names: is a list, not of type str"),
        ("\ntags: abc", 6, "settings.tags: is a list, not of type str"),
        ("\nids: abc", 6, "settings.ids: is a list, not of type str"),
        ("\nids: {a: 1}", 6, "settings.ids: is a list, not of type dict"),
        ("\nids: [1, x]", 6, "settings.ids[1]: is a whole number, not of type str"),
        ("\ninner:\n  b: 1", 7, "settings.inner.b: unknown key"),
        ("\nmore:\n  k:\n    a: x", 8, "settings.more.k.a: is a whole number"),
        ("\ncount: 4", 6, "settings.count: is 3 at most"),
        ("\npath: 5", 6, "settings.path: "),
        ("\nmode: c", 6, "settings.mode: must be in ['a', 'b'] (got 'c')"),
    ],
)
def test_wrong_setting_is_refused_at_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ValuesError) as caught:
        _settings(text)
    assert says in str(caught.value)
    assert caught.value.line == line
    assert "zebra" not in str(caught.value)


def test_settings_that_are_made_in_a_program_are_taken_as_they_are() -> None:
    values = Values.load({"backends": {"a": {"plugin": "x", "settings": {"inner": Inner(5)}}}})
    assert values.plugin_settings("a", Settings).inner == Inner(5)


# -- what is shown ------------------------------------------------------------------------------


def test_secrets_are_in_no_repr_and_shown_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_KEY", "sk-zebra")
    monkeypatch.setenv("PG_PASSWORD", "sk-zebra")
    values = _load(FULL_YAML)
    data = values.as_data()
    assert "sk-zebra" not in repr(values) + str(data)
    assert "CLOUD_KEY" not in repr(values), "unchecked settings may hold a secret in plain text"
    assert data["audit"]["url"] == "***${env:PG_PASSWORD}***"
    assert data["tenants"]["line-3"]["api_key"] == "${file:/run/secrets/line-3}"
    assert data["gateway"]["retries"] == 1, "defaults are shown too"
