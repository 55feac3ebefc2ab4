"""What runs is what was asked for, and it is said plainly."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from scripted_model import PROMPT, write_scripted_model

from iaop_core.errors import ModelLoadError
from iaop_core.values import Values
from iaop_onnx_local import OnnxLocalBackend, plugin
from iaop_onnx_local.cuda import find_cuda_problem
from iaop_onnx_local.installation import RuntimePackages, find_runtime_packages
from iaop_onnx_local.memory import usable_memory_bytes
from iaop_onnx_local.settings import OnnxLocalSettings
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


# -- other execution providers ------------------------------------------------------------------


def providers_of_a_library() -> Path:
    """A library that is there with every runtime, and offers no plugin's entry."""
    return next((Path(onnxruntime.__file__).parent / "capi").glob("*onnxruntime_providers_shared*"))


def fail_to_load(folder: Path, **settings: Any) -> str:
    backend = OnnxLocalBackend(**settings)
    with pytest.raises(ModelLoadError) as caught:
        backend.load_model(str(folder))
    assert caught.value.model == str(folder)
    assert not backend.health_check().healthy
    return str(caught.value)


def test_provider_by_its_full_name_runs_and_is_told(folder: Path) -> None:
    with OnnxLocalBackend(device="CPUExecutionProvider") as backend:
        backend.load_model(str(folder))
        assert backend.infer(PROMPT).device == "cpu"


def test_provider_that_is_not_offered_is_a_load_error(folder: Path) -> None:
    told = fail_to_load(folder, device="NobodysExecutionProvider")
    assert "has no NobodysExecutionProvider" in told
    assert "CPUExecutionProvider" in told


def test_provider_that_leaves_all_to_the_cpu_is_a_load_error(folder: Path) -> None:
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs a provider that runs nothing here")
    told = fail_to_load(folder, device="AzureExecutionProvider")
    assert "takes no operator" in told


def test_damaged_model_is_not_blamed_on_the_device(folder: Path) -> None:
    (folder / "model.onnx").write_text("no model")
    assert "damaged or no ONNX model" in fail_to_load(folder, device="CPUExecutionProvider")
    if "AzureExecutionProvider" in onnxruntime.get_available_providers():
        assert "damaged" not in fail_to_load(folder, device="NobodysExecutionProvider")


@pytest.mark.parametrize(
    ("library", "told"),
    [
        (lambda _: Path("/no/such/library.so"), "no such file"),
        (lambda folder: folder / "tokenizer.json", "can't be used as a provider_library"),
        (lambda _: providers_of_a_library(), "CreateEpFactories"),
    ],
)
def test_library_of_no_provider_is_a_load_error(folder: Path, library: Any, told: str) -> None:
    path = str(library(folder))
    message = fail_to_load(folder, device="NpuExecutionProvider", provider_library=path)
    assert told in message
    assert path in message


@pytest.mark.skipif("IAOP_ONNX_PROVIDER_LIBRARY" not in os.environ, reason="no library is given")
def test_provider_of_a_vendors_library_runs_or_says_why_not(folder: Path) -> None:
    """`IAOP_ONNX_PROVIDER_LIBRARY`: NAMEExecutionProvider=PATH of a real plugin library."""
    provider, _, path = os.environ["IAOP_ONNX_PROVIDER_LIBRARY"].partition("=")
    backend = OnnxLocalBackend(device=provider, provider_library=path)
    try:
        backend.load_model(str(folder))
    except ModelLoadError as error:
        assert "on this machine" in str(error) or "could not start" in str(error)  # noqa: PT017
    else:
        assert backend.infer(PROMPT).text == "ab"
        assert backend.infer(PROMPT).device == provider.removesuffix("ExecutionProvider").lower()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"device": "gpu"}, "device"),
        ({"provider_options": {"a": 1}}, "by name"),
        ({"device": "cuda", "provider_options": {"device_id": 1}}, "CUDA_VISIBLE_DEVICES"),
        ({"device": "CUDAExecutionProvider", "provider_options": {"device_id": 1}}, "VISIBLE"),
        ({"device": "cpu", "provider_library": "x.so"}, "full name"),
        ({"device": "cuda", "provider_options": {"a": []}}, "provider_options"),
        ({"context_length": 7}, "at least 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        OnnxLocalSettings(**settings)


def test_provider_settings_can_stand_in_the_values() -> None:
    given = {"device": "TvmExecutionProvider", "provider_options": {"depth": 2, "fast": True}}
    backend = {"plugin": "onnx-local", "settings": given}
    values = Values.load({"backends": {"npu": backend}})
    assert values.backends["npu"].settings == given


# -- why CUDA can't be used ---------------------------------------------------------------------


def test_missing_cuda_library_is_quoted_with_the_versions_needed(tmp_path: Path) -> None:
    (tmp_path / "libonnxruntime_providers_shared.so").write_text("no library")
    problem = find_cuda_problem(tmp_path)
    assert "libonnxruntime_providers_shared.so" in problem
    assert "cuDNN 9" in problem
    assert "pip install" in problem


@pytest.mark.skipif(sys.platform != "linux", reason="names libraries as Linux does")
def test_missing_cudnn_is_quoted(tmp_path: Path) -> None:
    if can_load("libcudnn.so.9"):
        pytest.skip("this machine has cuDNN")
    for name in ("shared", "cuda"):  # libraries that need nothing further
        shutil.copy(providers_of_a_library(), tmp_path / f"libonnxruntime_providers_{name}.so")
    assert "libcudnn.so.9: cannot open" in find_cuda_problem(tmp_path)


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def test_machine_without_a_driver_says_so() -> None:
    if can_load("libcuda.so.1"):
        pytest.skip("this machine has a driver")
    assert "there is no NVIDIA driver: libcuda.so.1" in find_cuda_problem()


# -- what iaop doctor shows ---------------------------------------------------------------------


def test_diagnosis_tells_what_runs_here() -> None:
    found = plugin.iaop_backends()[0].diagnose()
    assert found.facts["runtime"] == str(find_runtime_packages())
    assert found.facts["CPUExecutionProvider"] == "starts"
    for provider in onnxruntime.get_available_providers():
        assert provider in found.facts
    assert found.facts["threads"].startswith(str(usable_cpus()))
    assert "MB" in found.facts["memory"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        assert not found.findings


def test_doctor_tells_of_this_backend_in_json() -> None:
    command = [sys.executable, "-m", "iaop_core.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)["diagnoses"]["onnx-local"]
    assert facts["CPUExecutionProvider"] == "starts"


# -- the installed packages ---------------------------------------------------------------------


def add_distribution(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text)


@pytest.mark.parametrize("order", [1, -1])
def test_both_packages_are_refused_by_name(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    for name, version in [("onnxruntime", "1.1.1"), ("onnxruntime-gpu", "2.2.2")][::order]:
        add_distribution(tmp_path, name, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    probe = plugin.iaop_backends()[0].probe()
    assert not probe.usable
    for part in ("onnxruntime 1.1.1", "onnxruntime-gpu 2.2.2", "Keep one"):
        assert part in probe.reason
    backend = OnnxLocalBackend()
    with pytest.raises(ModelLoadError, match="Keep one"):
        backend.load_model(str(folder))
    assert "probe_error" in backend.health_check().detail


def test_one_package_is_usable_and_none_is_not() -> None:
    for name in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"):
        assert not RuntimePackages({name: "1.0"}, is_importable=True).problem
    assert not RuntimePackages({}, is_importable=True).problem  # somebody's own build
    none = RuntimePackages({}, is_importable=False)
    assert "iaop-onnx-local[cpu]" in none.problem
    assert not find_runtime_packages().problem
    assert plugin.iaop_backends()[0].probe().usable


def test_package_whose_files_are_gone_is_not_usable(tmp_path: Path) -> None:
    # Uninstalling one of two packages takes the shared files with it, and leaves a bare folder.
    add_distribution(tmp_path, "onnxruntime", "1.1.1")
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    done = run_python(
        f"""
        import sys
        from importlib import import_module
        from pathlib import Path
        import iaop_onnx_local.plugin
        site = next(p for p in sys.path if (Path(p) / "onnxruntime" / "__init__.py").exists())
        sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if p != site)]
        print(iaop_onnx_local.plugin.find_runtime_packages().problem)
        """
    )
    assert "onnxruntime 1.1.1 is installed, but its files are gone" in done.stdout
    assert "--force-reinstall onnxruntime" in done.stdout


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


def write_cgroup(root: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "membership").write_text(membership)
    return root, root / "membership"


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
        (
            {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}
            | {"cpu/a/cpu.cfs_quota_us": "500000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/a/b\n0::/\n",
            5,
        ),
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
    assert usable_cpus(*write_cgroup(tmp_path, files, membership)) == expected


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "", None),
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"a/b/memory.max": "max\n", "a/memory.max": "1048576\n"}, "0::/a/b\n", 2**20),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "2:memory:/\n", None),
        ({"memory/a/memory.limit_in_bytes": "4096\n"}, "2:pids,memory:/a\n", 4096),
    ],
)
def test_memory_keeps_to_the_groups_limit(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int | None
) -> None:
    machine = usable_memory_bytes(tmp_path, tmp_path / "none")
    assert usable_memory_bytes(*write_cgroup(tmp_path, files, membership)) == (expected or machine)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity masks")
def test_models_in_a_small_mask_start_no_more_threads_and_no_errors(folder: Path) -> None:
    done = run_python(
        f"""
        import os
        os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
        from iaop_onnx_local import OnnxLocalBackend
        backends = []
        for threads, expected in ((0, 1), (3, 3)):
            backend = OnnxLocalBackend(device="cpu", threads=threads)
            backends.append(backend)
            before = len(os.listdir("/proc/self/task"))
            backend.load_model({str(folder)!r})
            started = len(os.listdir("/proc/self/task")) - before
            # The engine's own thread takes part in the work, so it needs one less besides.
            assert started == expected, started
            backend.infer({PROMPT!r})
            assert f"threads={{expected}}" in backend.health_check().detail
        """
    )
    assert done.stderr == ""
