"""Versions, control modes, overrides, reloads: right answers, or an error to be retried."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from scripted import ended, outcome_within, script
from triton_server import HERE, TritonServer

from iaop_core.errors import BackendUnavailableError, ModelLoadError, ValuesError
from iaop_gpu_triton import GpuTritonBackend

ABOUT = script(about_model=True)
TIMEOUT_MS = 5000


@pytest.fixture(scope="module")
def versions() -> Iterator[TritonServer]:
    """A server with three versions of one model, and whose clients may load."""
    server = TritonServer("echo", "echo-plain", preload=("echo",))
    server.add_version("echo", 2)
    server.add_version("echo", 4)
    with server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, versions: TritonServer) -> str:
    return versions.grpc_url if request.param == "grpc" else versions.http_url


def connect(url: str, model: str = "echo", **settings: Any) -> GpuTritonBackend:
    return GpuTritonBackend(url, model, **{"timeout_ms": TIMEOUT_MS, **settings})


def repository(server: TritonServer, action: str) -> None:
    address = f"{server.http_url}/v2/repository/models/{action}"
    urllib.request.urlopen(address, data=b"{}", timeout=10).close()


# -- versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "answer"), [("", "4 "), ("1", "1 "), ("2", "2 "), ("4", "4 ")])
def test_pinned_version_answers_and_else_the_servers_choice(
    url: str, version: str, answer: str
) -> None:
    with closing(connect(url, model_version=version)) as backend:
        backend.load_model()
        assert backend.infer(ABOUT).text == answer
        assert ended(list(backend.stream(ABOUT))).text == answer
        assert backend.health_check().healthy


def test_pinned_version_that_is_not_there_is_named_with_those_that_are(url: str) -> None:
    with closing(connect(url, model_version="3")) as backend:
        with pytest.raises(ModelLoadError, match=r"'3'.*1 \(ready\), 2 \(ready\), 4 \(ready\)"):
            backend.load_model()
    with closing(connect(url)) as other:
        other.load_model()
        assert other.infer(ABOUT).text == "4 "


# -- overrides ---------------------------------------------------------------------------------


def plain_config(greeting: str) -> dict[str, Any]:
    """The configuration of echo-plain in Triton's JSON, with a parameter that it tells of."""
    texts = ["text_input", "sampling_parameters"]
    flags = ["stream", "exclude_input_in_output", "return_finish_reason"]
    return {
        "backend": "python",
        "max_batch_size": 0,
        "input": [
            {"name": name, "data_type": kind, "dims": [1], "optional": name != "text_input"}
            for kind, names in (("TYPE_STRING", texts), ("TYPE_BOOL", flags))
            for name in names
        ],
        "output": [
            {"name": name, "data_type": "TYPE_STRING", "dims": [-1]}
            for name in ("text_output", "finish_reason")
        ],
        "parameters": {"greeting": {"string_value": greeting}},
    }


def test_model_is_loaded_with_the_values_configuration(url: str) -> None:
    with closing(connect(url, "echo-plain", load_config=plain_config("你好"))) as backend:
        backend.load_model()
        assert backend.infer(ABOUT).text == "1 你好"
        backend.load_model()
        assert backend.infer(ABOUT).text == "1 你好"


def test_model_is_loaded_with_the_values_files(url: str, tmp_path: Path) -> None:
    source = (HERE / "triton_models" / "echo-plain" / "1" / "model.py").read_text()
    own = tmp_path / "model.py"
    own.write_text(source.replace("TritonPythonModel", "TritonPythonModel as Base") + OWN_MODEL)
    settings = {"load_config": plain_config("x"), "load_files": {"1/model.py": str(own)}}
    with closing(connect(url, "echo-plain", **settings)) as backend:
        backend.load_model()
        assert backend.infer(ABOUT).text == "1 from the file"


OWN_MODEL = """

class TritonPythonModel(Base):
    def initialize(self, args):
        super().initialize(args)
        self.greeting = "from the file"
"""


def test_configuration_that_the_server_refuses_is_a_load_error_that_points_to_it(url: str) -> None:
    with closing(connect(url, "echo-plain", load_config={"max_batch_size": "many"})) as backend:
        with pytest.raises(ModelLoadError, match=r"echo-plain.*load_config takes the place"):
            backend.load_model()


def test_files_need_a_configuration_and_must_be_there(url: str) -> None:
    with pytest.raises(ValuesError, match="load_files"):
        connect(url, load_files={"1/model.py": "x"})
    settings = {"load_config": {"backend": "python"}, "load_files": {"1/model.py": "/no/such"}}
    with closing(connect(url, "echo-plain", **settings)) as backend:
        with pytest.raises(ValuesError, match=r"load_files.*No such file"):
            backend.load_model()


# -- control modes -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_server_of_another_control_mode_serves_and_refuses_to_load(mode: str) -> None:
    with TritonServer(
        "echo", control_mode=mode, options=["--repository-poll-secs=1"] if mode == "poll" else []
    ) as server:
        for address in (server.grpc_url, server.http_url):
            with closing(connect(address)) as backend:
                backend.load_model()
                assert backend.infer(ABOUT).text == "1 "
                with pytest.raises(ModelLoadError, match=r"not explicit.*repository has: echo"):
                    backend.load_model("other")
            with closing(connect(address, load_config=plain_config("x"))) as backend:
                with pytest.raises(ModelLoadError, match=r"load_config.*not explicit"):
                    backend.load_model()
        if mode == "none":
            return
        with closing(connect(server.grpc_url)) as backend:
            backend.load_model()
            answers = set()
            server.add_version("echo", 2)
            until = time.monotonic() + 15
            while "2 " not in answers and time.monotonic() < until:
                try:
                    answers.add(backend.infer(ABOUT).text)
                except BackendUnavailableError as error:
                    answers.add("" if error.may_retry else repr(error))
                time.sleep(0.02)
            assert answers - {""} == {"1 ", "2 "}


# -- changes under load ------------------------------------------------------------------------


class Load:
    """Threads that ask all the time; anything but a right answer or a retriable error is kept."""

    def __init__(self, backend: GpuTritonBackend, count: int = 6) -> None:
        self.backend, self.answers, self.retriable = backend, 0, 0
        self.wrong: list[object] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            tokens = [f"{number}-{turn}-{i} " for i in range(5)]
            try:
                prompt = script(tokens=tokens, delay_s=0.01)
                if turn % 2:
                    text = self.backend.infer(prompt).text
                else:
                    text = ended(list(self.backend.stream(prompt))).text
            except BackendUnavailableError as error:
                self.retriable += 1
                if not error.may_retry:
                    self.wrong.append(error)
                time.sleep(0.05)
            except Exception as error:
                self.wrong.append(error)
            else:
                self.answers += 1
                if text != "".join(tokens):
                    self.wrong.append(text)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"

    def wait_for(self, answers: int) -> None:
        """Until so many more answers have come."""
        until, wanted = time.monotonic() + 20, self.answers + answers
        while self.answers < wanted and time.monotonic() < until:
            time.sleep(0.02)
        assert self.answers >= wanted, self.wrong[:3]


def test_model_reloaded_under_load_gives_right_answers_or_retriable_errors(
    versions: TritonServer, url: str
) -> None:
    with closing(connect(url)) as backend:
        backend.load_model()
        with Load(backend) as load:
            for _ in range(3):
                repository(versions, "echo/load")
                load.wait_for(10)
    assert load.wrong == []


def test_model_unloaded_under_load_lets_answers_under_way_finish(
    versions: TritonServer, url: str
) -> None:
    with closing(connect(url)) as backend:
        backend.load_model()
        stream = iter(backend.stream(script(tokens=list("abc"), delay_s=0.3)))
        assert next(stream).delta == "a"
        with Load(backend) as load:
            load.wait_for(5)
            repository(versions, "echo/unload")
            try:
                assert "".join(chunk.delta for chunk in stream) == "bc"
                until = time.monotonic() + 10
                while not load.retriable and time.monotonic() < until:
                    time.sleep(0.02)
                health = backend.health_check()
                assert not health.healthy
                assert "model_ready=False" in health.detail
            finally:
                repository(versions, "echo/load")
            load.wait_for(10)
        assert load.retriable
        assert load.wrong == []
        assert backend.health_check().healthy


def test_own_unload_under_load_ends_every_call_and_cancels_it_on_the_server(
    versions: TritonServer, url: str
) -> None:
    with closing(connect(url)) as backend, closing(connect(url)) as other:
        for each in (backend, other):
            each.load_model()
        errors: list[BaseException] = []

        def read(number: int) -> None:
            try:
                list(backend.stream(script(tag=f"u{number}", tokens=list("abc"), delay_s=1)))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        backend.unload()
        for thread in threads:
            thread.join(5)
        assert len(errors) == 4
        assert all("unloaded" in str(error) for error in errors)
        assert outcome_within(other, "u0", 2) == "cancelled"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_model_that_this_backend_loaded_is_loaded_again_after_a_restart(protocol: str) -> None:
    with TritonServer("echo", preload=()) as server:
        address = server.grpc_url if protocol == "grpc" else server.http_url
        with closing(connect(address)) as backend:
            backend.load_model()
            server.kill()
            server.start()
            results: list[str] = []
            threads = [
                threading.Thread(target=lambda: results.append(backend.infer("again").text))
                for _ in range(5)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert results == ["again"] * 5
            assert backend.health_check().healthy
            repository(server, "echo/unload")
            assert ended(list(backend.stream("and again"))).text == "and again"


def test_model_that_the_server_had_itself_is_not_loaded_again_behind_its_back(
    versions: TritonServer, url: str
) -> None:
    with closing(connect(url)) as backend:
        backend.load_model()
        repository(versions, "echo/unload")
        try:
            until = time.monotonic() + 5
            while backend.health_check().healthy and time.monotonic() < until:
                time.sleep(0.02)
            with pytest.raises(BackendUnavailableError, match="not ready") as caught:
                backend.infer("a")
            assert caught.value.may_retry
        finally:
            repository(versions, "echo/load")
        assert backend.infer("back").text == "back"


def test_model_whose_tensors_have_changed_is_bound_again(versions: TritonServer) -> None:
    url = versions.grpc_url
    with closing(connect(url, "echo-plain", load_config=plain_config("a"))) as owner:
        owner.load_model()
        with closing(connect(url, "echo-plain")) as backend:
            backend.load_model()
            fewer = plain_config("b")
            fewer["input"] = [i for i in fewer["input"] if i["name"] != "return_finish_reason"]
            body = json.dumps({"parameters": {"config": json.dumps(fewer)}}).encode()
            address = f"{versions.http_url}/v2/repository/models/echo-plain/load"
            urllib.request.urlopen(address, data=body, timeout=10).close()
            assert backend.infer(ABOUT).text == "1 b"
