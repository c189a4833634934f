"""Serves runs to browsers of this machine: it reads, writes nothing, and answers nobody who does not know the token."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from retrograd.errors import LaunchError, RunError
from retrograd.runs.layout import find_rank_folders, is_run
from retrograd.runs.listing import list_runs, read_line
from retrograd.serving.followed_run import FollowedRun
from retrograd.views.page.frame import frame_page

HOST = "127.0.0.1"

_MOST_RUNS = 8
"""Runs that are held open: those that were asked for last."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Served:
    """The runs that a server shows, opened when they are asked for.

    Args:
        path: a run, or a folder that holds runs.

    Raises:
        NotARunError: it is neither.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.single = path.name if is_run(path) else ""
        if self.single:
            find_rank_folders(path)
        else:
            list_runs(path)
        self._open: OrderedDict[str, FollowedRun] = OrderedDict()
        self._lock = threading.Lock()

    def list_lines(self) -> list[dict[str, Any]]:
        """The runs as JSON values, newest first; a loss that is not finite is text."""
        lines = [read_line(self._path)] if self.single else list_runs(self._path)
        return [json.loads(each.as_json()) for each in lines]

    def find(self, name: str) -> FollowedRun:
        """The run of a name.

        Raises:
            KeyError: there is none.
            RunError: it cannot be read.
        """
        with self._lock:
            if name not in self._open:
                self._open[name] = FollowedRun(self._folder_of(name))
            self._open.move_to_end(name)
            while len(self._open) > _MOST_RUNS:
                self._open.popitem(last=False)
            return self._open[name]

    def _folder_of(self, name: str) -> Path:
        if self.single:
            if name != self.single:
                raise KeyError(name)
            return self._path
        found = {folder.name: folder for folder in self._path.iterdir()}  # a name is looked up, never a path
        if name not in found or not is_run(found[name]):
            raise KeyError(name)
        return found[name]


class RunServer(ThreadingHTTPServer):
    """A server on the loopback of this machine.

    Args:
        served: the runs.
        port: where; any that is free by default.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, served: Served, port: int = 0) -> None:
        self.served = served
        self.token = secrets.token_urlsafe(18)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version = "retrograd"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60
    kinds: ClassVar[dict[str, str]] = {
        "page": "text/html; charset=utf-8",
        "json": "application/json",
        "bytes": "application/octet-stream",
    }

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.split("/")[1:]]
        if not self._is_from_here() or not hmac.compare_digest(words[0].encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "page", b"The address is that which retrograd serve has printed.")
            return
        try:
            kind, content = self._find(words[1:], dict(parse_qsl(parts.query)))
        except (KeyError, ValueError):
            self._answer(HTTPStatus.NOT_FOUND, "page", b"There is nothing here.")
        except RunError as error:
            self._answer(HTTPStatus.CONFLICT, "page", f"This run cannot be read: {type(error).__name__}.".encode())
        else:
            self._answer(HTTPStatus.OK, kind, content)

    def _is_from_here(self) -> bool:
        """A name that somebody else's server resolves to this machine is not ours."""
        port = self.server.server_port
        return self.headers.get("Host") in {f"{HOST}:{port}", f"localhost:{port}"}

    def _find(self, words: list[str], query: dict[str, str]) -> tuple[str, bytes]:
        served = self.server.served
        match words:
            case [""] if served.single:
                return "page", self._make_page(served.single)
            case [""]:
                return "page", _make_list(served.list_lines()).encode()
            case ["runs"]:
                return "json", json.dumps(served.list_lines()).encode()
            case ["run", name]:
                return "page", self._make_page(name)
            case ["run", name, "news"]:
                numbers = {each: int(query[each]) for each in ("column", "step", "until", "width")}
                return "json", json.dumps(served.find(name).find_news(json.loads(query["have"]), **numbers)).encode()
            case ["run", name, "block", block]:
                return "bytes", served.find(name).read_block(block, **_read_span(query))
            case ["run", name, "exponents"]:
                return "json", json.dumps(served.find(name).read_exponents(query["site"], **_read_span(query))).encode()
        raise KeyError(self.path)

    def _make_page(self, name: str) -> bytes:
        return self.server.served.find(name).make_page(f"/{self.server.token}/run/{quote(name, safe='')}").encode()

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": self.kinds[kind]}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name there
        """Say nothing: the address holds the token."""


def _read_span(query: dict[str, str]) -> dict[str, int]:
    return {name: int(query[name]) for name in ("step", "until", "width")}


def _make_list(lines: list[dict[str, Any]]) -> str:
    return frame_page("retrograd.serving", "Runs", {"runs": lines}, {}, is_served=True)


def serve(path: Path, port: int, *, told: Callable[[str], None]) -> None:
    """Serve until somebody interrupts.

    Args:
        path: a run, or a folder that holds runs.
        port: where; 0 for any that is free.
        told: called with the address once it can be opened.

    Raises:
        NotARunError: there is nothing to serve.
        LaunchError: the port is taken.
    """
    served = Served(path)
    try:
        server = RunServer(served, port)
    except OSError as error:
        problem = f"Port {port} cannot be used: {error.strerror or error}."
        raise LaunchError(problem, repair="give another --port, or none.") from error
    with server:
        told(server.address)
        server.serve_forever()
