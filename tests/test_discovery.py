"""Finding plugins: every entry point has a state and a reason, and none can harm the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Run
from fake_site import FakeSite, good_plugin

from iaop_core import LLMGateway
from iaop_core.errors import DuplicateBackendError, PluginLoadError, UnknownBackendError
from iaop_core.plugins import BackendRecord, PluginRegistry

OFFERS = "from iaop_core import hookimpl\n@hookimpl\ndef iaop_backends():\n    return {specs}\n"


def _record(name: str, distribution: str = "") -> BackendRecord:
    found = [
        record
        for record in PluginRegistry().records()
        if record.name == name and record.distribution in (distribution or record.distribution)
    ]
    assert len(found) == 1
    return found[0]


def _values(plugin: str) -> dict[str, object]:
    return {"backends": {"b": {"plugin": plugin}}}


def _select(plugin: str) -> None:
    with LLMGateway.from_values(_values(plugin)):
        pass


# -- what is healthy ----------------------------------------------------------------------------


def test_builtin_backend_is_available() -> None:
    record = _record("echo")
    assert (record.state, record.distribution, record.reason) == ("available", "iaop-core", "")
    assert record.capabilities is not None


def test_healthy_plugin_is_available_with_its_facts(fake_site: FakeSite) -> None:
    fake_site.install("iaop-fake", good_plugin("fake"), name="fake", version="2.3")
    record = _record("fake")
    assert (record.state, record.version, record.api_version) == ("available", "2.3", "1.0")
    assert record.summary == "A test backend"


def test_one_distribution_may_offer_several_backends(fake_site: FakeSite) -> None:
    for name in ("one", "two"):
        fake_site.write_module(f"fake_{name}", good_plugin(name))
    fake_site.install("iaop-fake", entry_points="[iaop.backends]\none = fake_one\ntwo = fake_two\n")
    values = {
        "backends": {"a": {"plugin": "one"}, "b": {"plugin": "two"}},
        "routes": {"r": {"targets": [{"backend": "a"}], "fallback": ["b"]}},
    }
    with LLMGateway.from_values(values) as gateway:
        assert str(gateway.ask("hi")) == "hi"


def test_one_module_may_offer_several_backends(fake_site: FakeSite) -> None:
    source = (
        good_plugin("one")
        .replace("name='one'", "name=name")
        .replace(
            "return [",
            "return [spec(name) for name in ('one', 'two')]\n\ndef spec(name):\n    return (",
        )
    )
    fake_site.write_module("fake_both", source.rstrip().removesuffix("]") + ")\n")
    fake_site.install(
        "iaop-fake", entry_points="[iaop.backends]\none = fake_both\ntwo = fake_both\n"
    )
    registry = PluginRegistry()
    assert [registry.get_spec(name).name for name in ("one", "two")] == ["one", "two"]


# -- what is broken -----------------------------------------------------------------------------

BROKEN = {
    "import": ("import no_such_sdk", "ModuleNotFoundError: No module named 'no_such_sdk'"),
    "exit": ("import sys; sys.exit(3)", "it called sys.exit(3)"),
    "key": ("{}['missing']", "KeyError: 'missing'"),
    "syntax": ("def", "SyntaxError"),
    "empty": ("", "gives no BackendSpec named 'bad'"),
    "hook-raises": (
        OFFERS.format(specs="fail()") + "def fail():\n    raise RuntimeError('no register')\n",
        "RuntimeError: no register",
    ),
    "hook-exits": (
        OFFERS.format(specs="fail()") + "def fail():\n    raise SystemExit(2)\n",
        "it called sys.exit(2)",
    ),
    "signature": (
        "from iaop_core import hookimpl\n@hookimpl\ndef iaop_backends(registry): return []\n",
        "registry",
    ),
    "unknown-hook": (
        good_plugin("bad") + "\n@hookimpl\ndef iaop_backend_started(): ...\n",
        "iaop_backend_started",
    ),
    "wrapper": (
        good_plugin("bad")
        + "\n@hookimpl(wrapper=True)\ndef iaop_infer_started(call):\n    return (yield)\n",
        "iaop_infer_started is told, not wrapped",
    ),
    "other-name": (good_plugin("other"), "gives no BackendSpec named 'bad'"),
    "no-list": (OFFERS.format(specs="42"), "TypeError"),
    "no-spec": (OFFERS.format(specs="['bad']"), "gives no BackendSpec named 'bad'"),
    "spec-types": (good_plugin("bad", api_version=1.0), "'api_version' must be"),  # type: ignore[arg-type]
    "unknown-field": (good_plugin("bad", more="colour='red',"), "colour"),
    "settings": (
        good_plugin("bad").replace("settings_class=Settings", "settings_class=dict"),
        "dict",
    ),
    "probe-says-no": (
        good_plugin("bad", more="probe=lambda: Probe(False, 'no SDK: pip install sdk'),"),
        "no SDK: pip install sdk",
    ),
    "probe-raises": (
        good_plugin("bad", more="probe=lambda: 1 / 0,"),
        "its probe failed: ZeroDivisionError",
    ),
    "probe-exits": (good_plugin("bad", more="probe=lambda: exit(4),"), "its probe failed"),
    "probe-answers-nothing": (good_plugin("bad", more="probe=lambda: None,"), "its probe failed"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plugin_is_listed_with_its_reason_and_harms_no_other(
    kind: str, fake_site: FakeSite
) -> None:
    source, reason = BROKEN[kind]
    fake_site.install("iaop-bad", source, name="bad", version="0.3")
    record = _record("bad")
    assert (record.state, record.version) == ("broken", "0.3")
    assert reason in record.reason
    assert _record("echo").state == "available"
    with LLMGateway.from_values(_values("echo")) as gateway:
        assert str(gateway.ask("hi")) == "hi"
    with pytest.raises(PluginLoadError) as caught:
        _select("bad")
    assert reason in str(caught.value)
    assert "backends.b.plugin" in str(caught.value), "the setting that asks is named"
    assert caught.value.distribution == "iaop-bad 0.3"


def test_interrupt_during_a_plugins_import_still_ends(fake_site: FakeSite) -> None:
    fake_site.install("iaop-bad", "raise KeyboardInterrupt", name="bad")
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry().records()


def test_plugin_that_is_no_python_reference_is_broken(fake_site: FakeSite) -> None:
    fake_site.install("iaop-bad", entry_points="[iaop.backends]\nbad = not a module!\n")
    good = fake_site.install("iaop-good", good_plugin("good"), name="good")
    assert good.exists()
    states = {record.name: record.state for record in PluginRegistry().records()}
    assert states["good"] == "available"
    assert states.get("bad", "broken") == "broken"


@pytest.mark.parametrize(
    "content",
    [
        b"[iaop.backends]\nno equals sign\n",
        b"[iaop.backends\nx = y\n",
        b"iaop = x\n",
        b"[iaop.backends]\nbad = m\xff\n",
    ],
)
def test_unreadable_entry_points_harm_no_other(content: bytes, fake_site: FakeSite) -> None:
    (fake_site.install("iaop-bad") / "entry_points.txt").write_bytes(content)
    fake_site.install("iaop-good", good_plugin("good"), name="good")
    registry = PluginRegistry()
    assert {record.name: record.state for record in registry.records()}["good"] == "available"
    registry.broken_metadata()


def test_unreadable_entry_points_are_told(
    fake_site: FakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fake_site.install("iaop-bad")
    (folder / "entry_points.txt").write_bytes(b"[iaop.backends]\nbad = m\xff\n")
    registry = PluginRegistry()
    with pytest.raises(UnknownBackendError, match=r"metadata folders are broken: .*iaop_bad"):
        registry.get_spec("bad")
    assert "iaop_bad-1.0.dist-info are unreadable" in caplog.text


# -- API versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("1.1", "upgrade iaop-core"),
        ("2.0", "upgrade iaop-core"),
        ("0.9", "upgrade iaop-fake"),
        ("1", "not of the form MAJOR.MINOR"),
        ("1.0.0", "not of the form MAJOR.MINOR"),
        ("", "not of the form MAJOR.MINOR"),
        ("1.x", "not of the form MAJOR.MINOR"),
    ],
)
def test_plugin_of_another_api_version_is_incompatible(
    version: str, says: str, fake_site: FakeSite
) -> None:
    fake_site.install("iaop-fake", good_plugin("fake", api_version=version), name="fake")
    record = _record("fake")
    assert (record.state, record.api_version) == ("incompatible", version)
    assert says in record.reason
    with pytest.raises(PluginLoadError, match=says):
        PluginRegistry().get_spec("fake", allow_offline=True)


def test_plugin_of_a_newer_api_with_new_hooks_is_told_to_upgrade_core(fake_site: FakeSite) -> None:
    newer = good_plugin("fake", api_version="1.9") + "\n@hookimpl\ndef iaop_new_thing(): ...\n"
    fake_site.install("iaop-fake", newer, name="fake")
    record = _record("fake")
    assert record.state == "incompatible"
    assert "upgrade iaop-core" in record.reason


# -- names --------------------------------------------------------------------------------------


def test_unknown_name_tells_the_nearest_and_all(fake_site: FakeSite) -> None:
    fake_site.install("iaop-fake", "raise SystemExit", name="gpu-triton")
    with pytest.raises(UnknownBackendError) as caught:
        _select("gpu-tritn")
    assert "did you mean 'gpu-triton'?" in str(caught.value)
    assert {"echo", "gpu-triton"} <= set(caught.value.known)
    assert not fake_site.imported, "names are told without importing anything"


def test_backend_names_compare_exactly(fake_site: FakeSite) -> None:
    fake_site.install("iaop-fake", good_plugin("fake_one"), name="fake_one")
    for other in ("fake-one", "Fake_One", "FAKE_ONE"):
        with pytest.raises(UnknownBackendError, match=r"found: .*fake_one"):
            PluginRegistry().get_spec(other)
    assert PluginRegistry().get_spec("fake_one").name == "fake_one"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["one-first", "two-first"])
def test_name_that_two_distributions_offer_is_refused_whatever_the_order(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = [FakeSite(tmp_path / "a"), FakeSite(tmp_path / "b")]
    sites[0].install("iaop-one", good_plugin("onnx"), name="onnx", version="1.1")
    sites[1].install("iaop-two", good_plugin("onnx"), name="onnx", version="2.2")
    for number in order:
        monkeypatch.syspath_prepend(str(sites[number].folder))
    records = [record for record in PluginRegistry().records() if record.name == "onnx"]
    assert [record.state for record in records] == ["duplicate"] * 2
    assert all(
        record.reason.startswith("iaop-one 1.1 and iaop-two 2.2 both offer it; uninstall one")
        for record in records
    )
    with pytest.raises(DuplicateBackendError) as caught:
        _select("onnx")
    assert caught.value.distributions == ("iaop-one 1.1", "iaop-two 2.2")
    assert not sites[0].imported | sites[1].imported


def test_disabling_one_of_two_makes_the_other_usable(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_site.install("iaop-one", good_plugin("onnx"), name="onnx")
    fake_site.install("iaop-two", good_plugin("onnx"), name="onnx")
    monkeypatch.setenv("IAOP_DISABLE_PLUGINS", "Iaop_One")
    states = {r.distribution: r.state for r in PluginRegistry().records() if r.name == "onnx"}
    assert states == {"iaop-one": "disabled", "iaop-two": "available"}
    assert PluginRegistry().get_spec("onnx").name == "onnx"
    assert fake_site.imported == {"iaop_two"}


def test_builtin_name_that_is_claimed_is_refused(fake_site: FakeSite) -> None:
    fake_site.install("iaop-thief", good_plugin("echo"), name="echo")
    with pytest.raises(DuplicateBackendError, match=r"iaop-core .* and iaop-thief 1\.0"):
        PluginRegistry().get_spec("echo")


# -- allowing and denying -----------------------------------------------------------------------

SPELLINGS = ["our-gw-triton", "Our_GW.Triton", "OUR-GW-TRITON", "our.gw_triton", "our--gw..triton"]


@pytest.mark.parametrize("listed", SPELLINGS)
@pytest.mark.parametrize("installed", ["our-gw-triton", "Our_GW.Triton"])
def test_denied_distribution_is_never_imported_in_any_spelling(
    listed: str, installed: str, fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_site.install(installed, good_plugin("triton"), name="triton", module="our_gw")
    monkeypatch.setenv("IAOP_DISABLE_PLUGINS", f"other, {listed}")
    record = _record("triton")
    assert record.state == "disabled"
    with pytest.raises(PluginLoadError, match="IAOP_DISABLE_PLUGINS"):
        PluginRegistry().get_spec("triton", allow_offline=True)
    assert not fake_site.imported


def test_allow_list_keeps_the_others_out_but_not_cores_own(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_site.install("iaop-one", good_plugin("one"), name="one")
    fake_site.install("iaop-two", good_plugin("two"), name="two")
    monkeypatch.setenv("IAOP_PLUGINS", "IAOP_ONE")
    states = {record.name: record.state for record in PluginRegistry().records()}
    assert (states["one"], states["two"], states["echo"]) == ("available", "disabled", "available")
    assert fake_site.imported == {"iaop_one"}


# -- metadata that lies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stale",
    ["iaop_triton-0.9.dist-info", "iaop-triton-0.9.dist-info", "iaop_triton-0.9-py3.11.egg-info"],
)
def test_broken_metadata_that_hides_an_install_is_named(
    stale: str, tmp_path: Path, fake_site: FakeSite, run_iaop: Run
) -> None:
    first = tmp_path / "first"
    (first / stale).mkdir(parents=True)
    if stale.endswith("egg-info"):
        (first / stale / "PKG-INFO").write_text("Name: iaop-triton\nVersion: 0.9\n")
    fake_site.install("iaop-triton", good_plugin("triton"), name="triton")
    fake_site.install("iaop-other", good_plugin("other"), name="other")
    path = (first, fake_site.folder)
    Path("values.yaml").write_text("backends: {gpu: {plugin: triton}}\n")
    done = run_iaop("ask", "hi", path=path)
    assert done.returncode == 3
    assert "backends.gpu.plugin: backend 'triton'" in done.stderr
    assert str(first / stale) in done.stderr
    assert not fake_site.imported
    listed = run_iaop("backends", path=path)
    assert listed.returncode == 0
    assert str(first / stale) in listed.stdout


def test_broken_metadata_is_named_when_the_wanted_name_is_nowhere(fake_site: FakeSite) -> None:
    empty = fake_site.folder / "iaop_triton-0.9.dist-info"
    empty.mkdir()
    with pytest.raises(UnknownBackendError) as caught:
        _select("triton")
    for part in ("backends.b.plugin", "'triton'", "found: ", "echo", str(empty)):
        assert part in str(caught.value)


def test_install_that_is_on_the_path_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = FakeSite(tmp_path / "a")
    site.install("iaop-fake", good_plugin("fake"), name="fake")
    shutil.copytree(site.folder, tmp_path / "copy")
    (tmp_path / "link").symlink_to(site.folder)
    for folder in ("a", "copy", "link", "a"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert _record("fake").state == "available"


def test_metadata_without_a_version_is_no_crash(fake_site: FakeSite) -> None:
    fake_site.install("iaop-fake", good_plugin("fake"), name="fake", metadata=False)
    record = _record("fake")
    assert record.state == "available"
    assert record.version in ("", "1.0")


# -- three culprits at once ---------------------------------------------------------------------


@pytest.fixture
def culprits(fake_site: FakeSite) -> FakeSite:
    fake_site.install("iaop-a", "import no_such_sdk", name="a")
    fake_site.install("iaop-b", "import sys; sys.exit(3)", name="b")
    fake_site.install("iaop-c", "{}['missing']", name="c")
    fake_site.install("iaop-good", good_plugin("good"), name="good")
    fake_site.install("iaop-one", good_plugin("taken"), name="taken")
    fake_site.install("iaop-two", good_plugin("taken"), name="taken")
    return fake_site


@pytest.mark.parametrize("command", ["backends", "doctor"])
def test_commands_work_beside_broken_plugins_and_name_them(
    command: str, culprits: FakeSite, run_iaop: Run
) -> None:
    done = run_iaop(command, path=(culprits.folder,))
    assert done.returncode == 0, done.stderr
    for part in ("iaop-a", "no_such_sdk", "iaop-b", "sys.exit(3)", "iaop-c", "KeyError: 'missing'"):
        assert part in done.stdout
    assert "iaop-one 1.0 and iaop-two 1.0 both offer it" in done.stdout


def test_version_and_ask_work_beside_broken_plugins(culprits: FakeSite, run_iaop: Run) -> None:
    assert run_iaop("--version", path=(culprits.folder,)).returncode == 0
    done = run_iaop("ask", "hi", "--backend", "good", path=(culprits.folder,))
    assert (done.returncode, done.stdout) == (0, "hi\n")
    assert culprits.imported == {"iaop_good"}


@pytest.mark.parametrize(
    ("name", "cause"),
    [("a", "no_such_sdk"), ("b", "sys.exit(3)"), ("c", "KeyError"), ("taken", "both offer it")],
)
def test_selected_broken_plugin_is_an_error_with_its_cause(
    name: str, cause: str, culprits: FakeSite, run_iaop: Run
) -> None:
    done = run_iaop("ask", "hi", "--backend", name, path=(culprits.folder,))
    assert done.returncode == 3
    assert cause in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_json_of_the_list_tells_every_state(culprits: FakeSite, run_iaop: Run) -> None:
    done = run_iaop("backends", "--json", path=(culprits.folder,))
    records = {record["name"]: record for record in json.loads(done.stdout)}
    keys = {"name", "state", "distribution", "version", "api_version", "capabilities", "reason"}
    assert all(set(record) == keys for record in records.values())
    states = {name: records[name]["state"] for name in ("a", "b", "c", "good", "taken", "echo")}
    assert states == {
        **dict.fromkeys("abc", "broken"),
        "good": "available",
        "taken": "duplicate",
        "echo": "available",
    }
    assert records["good"]["capabilities"]["max_concurrency"] == 2
    assert records["a"]["capabilities"] is None


# -- a missing SDK ------------------------------------------------------------------------------


def test_backend_without_its_sdk_is_had_only_when_offline_is_allowed(fake_site: FakeSite) -> None:
    no_sdk = "probe=lambda: Probe(False, 'no SDK'),"
    fake_site.install("iaop-a", good_plugin("a", more=no_sdk, offline_mode=True), name="a")
    fake_site.install("iaop-b", good_plugin("b", more=no_sdk), name="b")
    registry = PluginRegistry()
    for name, allowed in (("a", False), ("b", False), ("b", True)):
        with pytest.raises(PluginLoadError, match="no SDK"):
            registry.get_spec(name, allow_offline=allowed)
    assert registry.get_spec("a", allow_offline=True).name == "a"
