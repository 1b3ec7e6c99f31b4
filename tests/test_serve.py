"""Serving a report: what it answers and to whom, that it follows the runs, and that nothing that happens to them ends it."""

import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from opteq import cli
from opteq.report import serving
from opteq.report.serving import HEADERS, Pages, Server, serve
from processes import finish, in_child


class Renderer:
    """Stands for the page: counts how often it was made, and of what."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.error: Exception | None = None

    def read_all(self, folders: list[Path]) -> list[str]:
        return [str(folder) for folder in folders]

    def render(self, runs: list[str], live: bool) -> str:
        assert live
        self.calls.append(runs)
        if self.error is not None:
            raise self.error
        return f'<!DOCTYPE html>\n<html lang="en">page {len(self.calls)} \ud800</html>'


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Renderer:
    made = Renderer()
    monkeypatch.setattr(serving, "render", made.render)
    monkeypatch.setattr(serving, "read_all", made.read_all)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "metrics.jsonl").write_text("")
    return path


@pytest.fixture
def server(folder: Path, renderer: Renderer) -> Iterator[Server]:
    with serve([folder]) as found:
        yield found


def ask(server: Server, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    parts = urlsplit(server.address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def raw(server: Server, request: bytes) -> bytes:
    parts = urlsplit(server.address)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def version_in(page: str) -> str:
    return page.split('data-version="')[1].split('"')[0]


def append(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "step", "step": 1, "loss": 0.5}) + "\n")


# --- what it answers ------------------------------------------------------------------------------------------------------------


def test_the_page_and_its_version_are_served_with_safe_headers(server: Server) -> None:
    status, page, headers = ask(server)
    assert status == 200
    assert "page 1 ?" in page  # half a surrogate pair, which JSON may hold, is no reason to fail
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    other, version, _ = ask(server, "/version")
    assert (other, version) == (200, version_in(page))
    for path in ("/", "/version", "/nothing"):
        found = ask(server, path)[2]
        for name, value in HEADERS.items():
            assert found.get_all(name) == [value]
    assert HEADERS["Cache-Control"] == "no-store"
    assert HEADERS["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in HEADERS["Content-Security-Policy"]


def test_head_gives_the_headers_only(server: Server) -> None:
    answer = raw(server, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200")
    assert answer.endswith(b"\r\n\r\n")
    assert f"Content-Length: {len(ask(server)[1])}\r\n".encode() in answer


@pytest.mark.parametrize("path", ["/config.json", "/metrics.jsonl", "/../", "/?a=1", "/version/", "http://localhost/"])
def test_nothing_else_is_there(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"])
def test_nothing_can_be_done_but_to_look(server: Server, method: str) -> None:
    assert ask(server, method=method)[0] == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", ""])
def test_a_foreign_name_of_this_machine_is_refused(server: Server, renderer: Renderer, host: str) -> None:
    for path in ("/", "/version"):
        status, body, _ = ask(server, path, Host=host)
        assert status == 403
        assert "page" not in body
    assert renderer.calls == []


def test_a_request_without_a_name_or_with_two_is_refused(server: Server) -> None:
    for names in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        assert raw(server, b"GET / HTTP/1.1\r\n" + names + b"\r\n").startswith(b"HTTP/1.0 403")
    assert b"page" not in raw(server, b"GET /\r\n\r\n")  # the oldest protocol has no names at all
    assert b"page" not in raw(server, b"nonsense\r\n\r\n")


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:8888"])
def test_the_own_names_may_come_with_any_port_as_through_a_tunnel(server: Server, host: str) -> None:
    assert ask(server, Host=host)[0] == 200


def test_only_this_machine_is_listened_to(server: Server) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    assert server._server.server_address[0] == "127.0.0.1"


def test_a_browser_that_leaves_is_no_error_but_a_fault_is_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for error, told in ((ConnectionResetError("left"), False), (RuntimeError("a fault"), True)):
        try:
            raise error
        except (OSError, RuntimeError):
            server._server.handle_error(None, ("127.0.0.1", 1))
        assert (str(error) in capsys.readouterr().err) == told


# --- it follows the runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "certificate.json", "landscape.csv", "problem.txt"])
def test_the_page_is_rendered_once_for_each_change(folder: Path, renderer: Renderer, name: str) -> None:
    pages = Pages([folder])
    first = pages.page()
    assert pages.page() is first
    (folder / name).write_text("changed")
    second = pages.page()
    assert second.version != first.version
    assert pages.page() is second
    assert len(renderer.calls) == 2


def test_a_file_replaced_by_one_of_the_same_size_is_a_change(folder: Path, renderer: Renderer) -> None:
    pages = Pages([folder])
    first = pages.page()
    os.utime(folder / "config.json", ns=(1, 1))
    assert pages.page().version != first.version


def test_a_file_that_grows_within_one_tick_of_the_clock_is_a_change(folder: Path, renderer: Renderer) -> None:
    pages, time = Pages([folder]), (folder / "metrics.jsonl").stat().st_mtime_ns
    first = pages.page()
    append(folder)
    os.utime(folder / "metrics.jsonl", ns=(time, time))
    assert pages.page().version != first.version


def test_what_a_report_is_not_made_of_is_no_change(folder: Path, renderer: Renderer) -> None:
    pages = Pages([folder])
    first = pages.page()
    for name in ("report.html", "run.lock", "model.safetensors", ".config.json.12345678.tmp"):
        (folder / name).write_text("x")
    assert pages.page() is first


def test_a_run_that_writes_all_the_time_is_not_rendered_all_the_time(
    folder: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 103.0, 114.9, 115.0])  # 3 seconds to render: 12 seconds of rest
    monkeypatch.setattr(serving.time, "monotonic", lambda: next(clock))
    pages = Pages([folder])
    shown = pages.page().version
    append(folder)
    assert pages.version() == shown
    assert pages.version() != shown


def test_what_is_written_during_a_rendering_is_a_further_change(
    folder: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(runs: list[str], live: bool) -> str:
        append(folder)
        return renderer.render(runs, live)

    monkeypatch.setattr(serving, "render", slow)
    monkeypatch.setattr(serving, "REST", 0.0)
    pages = Pages([folder])
    assert pages.page().version != pages.version()


def test_a_run_that_is_not_there_is_waited_for(tmp_path: Path, folder: Path, renderer: Renderer) -> None:
    late = tmp_path / "<late>"
    with serve([late]) as server:
        status, page, _ = ask(server)
        assert status == 200
        assert "There is no run yet in" in page
        assert "&lt;late&gt;" in page
        assert ask(server, "/version")[1] == version_in(page)
        late.mkdir()
        assert "There is no run yet in" in ask(server)[1]
        (late / "config.json").write_text("{}")
        assert "page 1" in ask(server)[1]
    with serve([folder, tmp_path / '"never"']) as server:
        assert 'data-waiting="' + str(tmp_path) + '/&quot;never&quot;"' in ask(server)[1]
    assert renderer.calls == [[str(late)], [str(folder)]]


def test_what_goes_wrong_is_shown_and_the_server_goes_on(server: Server, renderer: Renderer, folder: Path) -> None:
    renderer.error = ZeroDivisionError("<b>damaged</b>")
    status, page, _ = ask(server)
    assert status == 500
    assert "ZeroDivisionError: &lt;b&gt;damaged&lt;/b&gt;" in page
    assert ask(server)[0] == 500
    assert len(renderer.calls) == 1
    renderer.error = None
    append(folder)
    assert ask(server)[0] == 200


def test_a_real_run_is_served_with_the_script_that_follows_it(folder: Path) -> None:
    append(folder)
    with serve([folder]) as server:
        status, page, _ = ask(server)
    assert status == 200
    script = resources.files("opteq.report").joinpath("templates/live.js").read_text()
    assert f"<script>{script}</script>" in page
    assert "connect-src &#39;self&#39;" in page or "connect-src 'self'" in page
    assert len(version_in(page)) == 64


# --- beginning and end ----------------------------------------------------------------------------------------------------------


def test_the_port_can_be_chosen_and_is_free_after_the_end(folder: Path, renderer: Renderer) -> None:
    with serve([folder]) as first:
        port = urlsplit(first.address).port
        assert port is not None
        with pytest.raises(OSError, match=rf"port {port} cannot be used \(.*\): choose another, or 0"):
            serve([folder], port)
    first.close()
    with serve([folder], port) as second:
        assert second.address == first.address
        assert ask(second)[0] == 200


def test_waiting_ends_with_the_server(server: Server) -> None:
    closing = threading.Timer(0.05, server.close)
    closing.start()
    server.wait()
    closing.join()
    with pytest.raises(ConnectionError):
        ask(server)


@pytest.mark.parametrize(
    ("folders", "port", "error", "words"),
    [
        ("run", 0, TypeError, "'folders' parameter of report.serve must be a list of run folders"),
        ([], 0, ValueError, "at least one run folder"),
        (["run"], -1, ValueError, "'port' parameter of report.serve"),
        (["run"], 65536, ValueError, "'port' parameter of report.serve must be at most 65535"),
        (["run"], "80", TypeError, "'port'"),
    ],
)
def test_wrong_arguments_are_named(folders: object, port: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        serve(folders, port)  # type: ignore[arg-type]


# --- the command ----------------------------------------------------------------------------------------------------------------


class Interrupted:
    """Stands for the server: it is interrupted as soon as it is waited for."""

    address = "http://127.0.0.1:1/"

    def __init__(self, folders: tuple[Path, ...], port: int) -> None:
        self.given, self.closed = (folders, port), False
        Interrupted.last = self

    def __enter__(self) -> "Interrupted":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def wait(self) -> None:
        raise KeyboardInterrupt

    last: "Interrupted"


@pytest.mark.parametrize("found", [True, False])
def test_the_command_serves_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("opteq.report.serve", Interrupted)
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or found)
    assert cli.main(["report", "a", "b", "--serve", "--port", "77", "--open"]) == 0
    assert Interrupted.last.given == ((Path("a"), Path("b")), 77)
    assert Interrupted.last.closed
    assert opened == [Interrupted.address]
    said = capsys.readouterr()
    assert f"The report is at {Interrupted.address} until Ctrl-C" in said.out
    assert ("No browser was found" in said.out) == (not found)
    assert said.err == ""


def test_the_command_may_be_interrupted_as_soon_as_its_address_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(address: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("opteq.report.serve", Interrupted)
    monkeypatch.setattr("webbrowser.open", interrupt)
    assert cli.main(["report", "a", "--serve", "--open"]) == 0
    assert Interrupted.last.closed


def test_an_interrupt_ends_it_cleanly(folder: Path, renderer: Renderer) -> None:
    reading, writing = os.pipe()

    def command() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with os.fdopen(writing, "w") as sys.stdout:
            assert cli.main(["report", str(folder), "--serve"]) == 0

    child = in_child(command)
    os.close(writing)
    with os.fdopen(reading) as said:
        address = said.readline().split()[4]
        with urlopen(address, timeout=20) as answer:
            assert b"page 1" in answer.read()
        os.kill(child, signal.SIGINT)
        assert finish(child) == 0
    with pytest.raises(URLError):
        urlopen(address, timeout=20)


def test_a_written_report_can_be_opened(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    opened: list[str] = []
    monkeypatch.setattr("opteq.report.write", lambda runs, out: runs[0] / "report.html")
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert cli.main(["report", str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").as_uri()]


@pytest.mark.parametrize("wrong", [["--serve", "--out", "x.html"], ["--port", "80"]])
def test_options_that_do_not_go_together_are_an_error(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "run", *wrong]) == 2
    assert "--serve" in capsys.readouterr().err
