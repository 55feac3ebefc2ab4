"""`iaop doctor` shows what backends tell of themselves, and outlives whatever that does to them."""

from __future__ import annotations

import json

import pytest
from conftest import Run
from fake_site import FakeSite, good_plugin

from iaop_core.cli import diagnosis


@pytest.fixture(autouse=True)
def _without_the_real_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ("iaop-onnx-local", "iaop-gpu-triton", "iaop-cloud-api")
    monkeypatch.setenv("IAOP_DISABLE_PLUGINS", ",".join(real))


def install(site: FakeSite, name: str, diagnose: str) -> None:
    more = f"diagnose=lambda: {diagnose},"
    site.install(f"iaop-{name}", good_plugin(name, more=more), name=name)


def test_facts_and_findings_of_a_backend_are_shown(fake_site: FakeSite, run_iaop: Run) -> None:
    tells = "__import__('iaop_core').Diagnosis({'cards': '2'}, ['card 1 is hot'])"
    install(fake_site, "npu", tells)
    fake_site.install("iaop-mute", good_plugin("mute"), name="mute")
    done = run_iaop("doctor", path=(fake_site.folder,))
    assert done.returncode == 0, done.stderr
    assert "\nnpu\n  cards: 2\n" in done.stdout
    assert "! backend npu: card 1 is hot" in done.stdout
    told = json.loads(run_iaop("doctor", "--json", path=(fake_site.folder,)).stdout)
    assert told["diagnoses"]["npu"] == {"cards": "2"}
    assert "backend npu: card 1 is hot" in told["findings"]
    assert "mute" not in told["diagnoses"]


@pytest.mark.parametrize(
    ("diagnose", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('os')._exit(7)", "exit code 7"),
        ("__import__('sys').exit('no card')", "no card"),
        ("__import__('os').abort()", "exit code -6"),
        ("'nothing of the kind'", "AttributeError"),
    ],
)
def test_diagnosis_that_fails_is_a_finding(
    fake_site: FakeSite, run_iaop: Run, diagnose: str, told: str
) -> None:
    install(fake_site, "bad", diagnose)
    done = run_iaop("doctor", path=(fake_site.folder,))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "! backend bad" in line)
    assert told in line


def test_what_an_sdk_prints_is_no_part_of_the_diagnosis(fake_site: FakeSite, run_iaop: Run) -> None:
    noisy = (
        "__import__('os').write(1, b'loading') and __import__('iaop_core').Diagnosis({'a': 'b'})"
    )
    install(fake_site, "noisy", noisy)
    told = json.loads(run_iaop("doctor", "--json", path=(fake_site.folder,)).stdout)
    assert told["diagnoses"]["noisy"] == {"a": "b"}


def test_diagnosis_that_does_not_end_is_stopped(
    fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(fake_site, "slow", "__import__('time').sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(fake_site.folder))
    monkeypatch.setattr(diagnosis, "_TIMEOUT_S", 1)
    assert "did not end" in diagnosis.diagnose("slow").findings[0]


def test_listing_asks_no_backend_for_a_diagnosis(fake_site: FakeSite, run_iaop: Run) -> None:
    install(fake_site, "bad", "__import__('os')._exit(7)")
    done = run_iaop("backends", path=(fake_site.folder,))
    assert (done.returncode, "bad" in done.stdout) == (0, True)
