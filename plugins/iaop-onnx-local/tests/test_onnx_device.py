"""What runs is what was asked for, and it is said plainly."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import onnxruntime
import pytest
from scripted_model import PROMPT, write_scripted_model

from iaop_core.errors import ModelLoadError
from iaop_onnx_local import OnnxLocalBackend, plugin
from iaop_onnx_local.installation import RuntimePackages, find_runtime_packages
from iaop_onnx_local.threads import usable_cpus


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


def cuda_works(folder: Path) -> bool:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return False
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=providers)
    return bool(session.get_providers()[0] == "CUDAExecutionProvider")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_scripted_model(tmp_path / "model", [b"a", b"b"])


def test_cuda_that_cannot_be_had_is_a_load_error(folder: Path) -> None:
    if cuda_works(folder):
        pytest.skip("this machine has CUDA")
    backend = OnnxLocalBackend(device="cuda")
    with pytest.raises(ModelLoadError, match="CUDAExecutionProvider") as caught:
        backend.load_model(str(folder))
    assert "pip install" in str(caught.value)
    assert caught.value.model == str(folder)
    assert not backend.health_check().healthy
    assert "cuda" not in backend.health_check().detail


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_results_and_health_name_the_device_of_the_session(folder: Path, device: str) -> None:
    if device == "auto" and cuda_works(folder):
        pytest.skip("this machine has CUDA")
    with OnnxLocalBackend(device=device) as backend:
        assert backend.capabilities.device == ""
        backend.load_model(str(folder))
        assert backend.infer(PROMPT).device == "cpu"
        assert "device=cpu" in backend.health_check().detail
        assert backend.capabilities.device == "cpu"


def test_cuda_runs_where_there_is_one(folder: Path) -> None:
    if not cuda_works(folder):
        pytest.skip("this machine has no CUDA")
    for device in ("auto", "cuda"):
        with OnnxLocalBackend(device=device) as backend:
            backend.load_model(str(folder))
            result = backend.infer(PROMPT)
            assert (result.text, result.device) == ("ab", "cuda")


# -- the installed packages ---------------------------------------------------------------------


def add_distribution(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)


def test_both_packages_are_refused_by_name(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_distribution(tmp_path, "onnxruntime", "1.1.1")
    add_distribution(tmp_path, "onnxruntime-gpu", "2.2.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    probe = plugin.iaop_backends()[0].probe()
    assert not probe.usable
    assert "onnxruntime 1.1.1 and onnxruntime-gpu 2.2.2" in probe.reason
    assert "Keep one" in probe.reason
    backend = OnnxLocalBackend()
    with pytest.raises(ModelLoadError, match="Keep one"):
        backend.load_model(str(folder))
    assert "probe_error" in backend.health_check().detail


def test_one_package_is_usable_and_none_is_not() -> None:
    assert not RuntimePackages(cpu="1.0", gpu="").problem
    assert not RuntimePackages(cpu="", gpu="1.0").problem
    assert "iaop-onnx-local[cpu]" in RuntimePackages(cpu="", gpu="").problem
    assert not find_runtime_packages().problem
    assert plugin.iaop_backends()[0].probe().usable


def test_backend_without_a_runtime_is_offline_and_says_so() -> None:
    done = run_python(
        """
        import logging, sys
        logging.basicConfig(format="%(levelname)s %(message)s")
        sys.modules["onnxruntime"] = None
        from iaop_onnx_local import OnnxLocalBackend
        backend = OnnxLocalBackend()
        backend.load_model("m")
        result = backend.infer("hello")
        print(result.text, result.offline, backend.offline, backend.health_check().detail)
        """
    )
    assert "WARNING" in done.stderr
    assert "OFFLINE" in done.stderr
    assert "[onnx:m] hello True True" in done.stdout
    assert "offline=True" in done.stdout


def test_listing_the_plugin_imports_no_engine() -> None:
    done = run_python(
        """
        import sys
        import iaop_onnx_local.plugin
        spec = iaop_onnx_local.plugin.iaop_backends()[0]
        assert spec.probe().usable
        heavy = {"onnxruntime", "numpy", "tokenizers", "jinja2", "onnx"} & sys.modules.keys()
        print(spec.name, sorted(heavy))
        """
    )
    assert done.stdout == "onnx-local []\n"


def test_spec_says_what_the_backend_says() -> None:
    spec = plugin.iaop_backends()[0]
    backend = spec.factory(spec.settings_class())
    assert backend.name == spec.name
    assert backend.capabilities == spec.capabilities


# -- threads ------------------------------------------------------------------------------------


def cgroup(root: Path, files: dict[str, str], membership: str = "") -> int:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "membership").write_text(membership)
    return usable_cpus(root, root / "membership")


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "", 8),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 8),
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "10000 100000\n"}, "0::/\n", 1),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, "0::/a/b\n", 3),
        ({"a/cpu.max": "600000 100000\n", "cpu.max": "400000 100000\n"}, "0::/a\n", 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", 8),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", 3),
        ({"cpu.max": "1600000 100000\n"}, "0::/\n", 8),
    ],
)
def test_threads_keep_to_quota_and_mask(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    membership: str,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cgroup(tmp_path, files, membership) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity masks")
def test_models_in_a_small_mask_start_no_more_threads_and_no_errors(folder: Path) -> None:
    done = run_python(
        f"""
        import os
        os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
        from iaop_onnx_local import OnnxLocalBackend
        for threads, expected in ((0, 1), (3, 3)):
            backend = OnnxLocalBackend(device="cpu", threads=threads)
            before = len(os.listdir("/proc/self/task"))
            backend.load_model({str(folder)!r})
            started = len(os.listdir("/proc/self/task")) - before
            assert started == expected - 1, started
            assert f"threads={{expected}}" in backend.health_check().detail
        """
    )
    assert done.stderr == ""
