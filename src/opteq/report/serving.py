"""A report that follows its runs: a server on this machine whose page is rendered anew when the run folders change."""

import hashlib
import html
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from opteq.checks import check_integer, invalid
from opteq.report.page import render, script, source_hash
from opteq.report.reading import read_all, run_folders

__all__ = ["Server", "serve"]

READ = (".json", ".jsonl", ".csv", ".txt")  # what a report may be made of
REST = 4.0  # times the seconds of a rendering pass before the next: a run that writes all the time costs a fifth of a core
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",  # the page itself says the rest
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(folders: Sequence[str | Path], port: int = 0) -> "Server":
    """Serve the report of run folders to this machine only, until it is closed; 0 is any free port.

    The page loads itself anew when files of the runs change, and says so where the server is gone. A folder that holds no run yet
    is waited for; what goes wrong in reading or rendering is shown, and tried again at the next change.

    Examples:
        >>> from urllib.request import urlopen
        >>> from opteq import report
        >>> with report.serve(["runs/to-come"]) as server:
        ...     b"runs/to-come" in urlopen(server.address).read()
        True
    """
    paths = run_folders("report.serve", folders)
    check_integer("report.serve", "port", port, 0)
    if port > 65535:
        raise ValueError(invalid("report.serve", "port", "at most 65535", port))
    return Server(paths, port)


class Server:
    """A server at `address`, at work from the start to `close`; also a context manager.

    Examples:
        >>> from opteq import report
        >>> server = report.serve(["runs/to-come"])
        >>> server.address.startswith("http://127.0.0.1:")
        True
        >>> server.close()
    """

    def __init__(self, folders: list[Path], port: int) -> None:
        try:
            self._server = _Listener(("127.0.0.1", port), Pages(folders))
        except OSError as error:
            raise OSError(f"port {port} cannot be used ({error.strerror}): choose another, or 0 for any that is free") from error
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the server is closed, by another thread."""
        self._thread.join()

    def close(self) -> None:
        """Stop answering, and free the port; nothing happens if that was done already."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Shown:
    """A page, and the version of the run folders that it shows."""

    version: str
    status: HTTPStatus
    content: bytes


class Pages:
    """The newest page of the run folders, rendered once for each change."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._lock = threading.Lock()  # one rendering at a time
        self._shown: Shown | None = None
        self._rested = 0.0

    def page(self) -> Shown:
        """The page of what the folders hold now."""
        with self._lock:
            version = _version(self.folders)  # before it is read: what is written meanwhile is then a further change
            if self._shown is None or self._shown.version != version:
                start = time.monotonic()
                self._shown = _show(self.folders, version)
                end = time.monotonic()
                self._rested = end + REST * (end - start)
            return self._shown

    def version(self) -> str:
        """What tells whether there is a newer page: the version of the folders, or of the last page while it is too new."""
        shown = self._shown
        return shown.version if shown is not None and time.monotonic() < self._rested else _version(self.folders)


def _version(folders: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of the files that a report may be made of."""
    return hashlib.sha256(repr([_files(folder) for folder in folders]).encode(errors="replace")).hexdigest()


def _files(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    try:
        for entry in os.scandir(folder):
            if entry.name.endswith(READ):
                state = entry.stat(follow_symlinks=False)
                found.append((entry.name, state.st_size, state.st_mtime_ns))
    except OSError:  # the folder is not there yet, or a file is just being replaced: the next look will differ
        found.append(("", len(found), 0))
    return sorted(found)


def _show(folders: list[Path], version: str) -> Shown:
    ready = [folder for folder in folders if os.path.lexists(folder / "config.json")]
    waiting = ", ".join(str(folder) for folder in folders if folder not in ready)
    status = HTTPStatus.OK
    if not ready:
        page = _message("Waiting for a run", f"There is no run yet in {waiting}. This page will show it when there is.")
        waiting = ""
    else:
        try:
            page = render(read_all(ready), live=True)
        except Exception as error:  # whatever it is: the next change may mend it
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            page = _message("The report could not be made", f"{type(error).__name__}: {error}")
    # Which version this is, where the script of the page finds it.
    marked = page.replace("<html ", f'<html data-version="{version}" data-waiting="{html.escape(waiting)}" ', 1)
    return Shown(version, status, marked.encode(errors="replace"))


def _message(title: str, text: str) -> str:
    """A page with nothing but a message; it follows the runs as the report does."""
    live = script("live.js")
    policy = f"default-src 'none'; script-src {source_hash(live)}; style-src 'unsafe-inline'; connect-src 'self'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)} - opteq report</title>
<style>body {{ font: 1rem/1.5 sans-serif; margin: 2rem auto; max-width: 40rem; padding: 0 1rem; overflow-wrap: anywhere }}</style>
</head>
<body>
<main><h1>{html.escape(title)}</h1><p>{html.escape(text)}</p></main>
<footer></footer>
<script>{live}</script>
</body>
</html>
"""


class _Listener(ThreadingHTTPServer):
    """The server: one thread a request, and what it shows."""

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        super().__init__(address, _Handler)
        self.pages = pages

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a browser that leaves in the middle of an answer is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of / and /version, to those who call this machine by its own name."""

    server: _Listener
    server_version = "opteq"
    sys_version = ""
    timeout = 30

    def parse_request(self) -> bool:
        """Whether to go on; what is refused is answered here."""
        if not super().parse_request():
            return False
        refused = self._refused()
        if refused is not None:
            self.send_error(refused)
        return refused is None

    def _refused(self) -> HTTPStatus | None:
        # Any port: it may be another one at the near end of a tunnel.
        names = [host.rsplit(":", 1)[0] for host in self.headers.get_all("Host", [])]
        if names not in (["127.0.0.1"], ["localhost"]):
            return HTTPStatus.FORBIDDEN  # a foreign page whose name was made to lead here could else read ours
        if self.command not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED
        return None if self.path in ("/", "/version") else HTTPStatus.NOT_FOUND

    def do_GET(self) -> None:
        if self.path == "/version":
            self._answer(HTTPStatus.OK, "text/plain", self.server.pages.version().encode())
        else:
            shown = self.server.pages.page()
            self._answer(shown.status, "text/html", shown.content)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a question every two seconds is no news."""
