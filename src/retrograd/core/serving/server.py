"""Serves runs to browsers of this machine: it reads, writes nothing, and answers nobody who does not know the token."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import sys
import tempfile
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote

from retrograd.core.errors import LaunchError, RunError
from retrograd.core.foreign.text import parse_json, parse_object, show_plainly
from retrograd.core.limits import LIMITS
from retrograd.core.notices import say
from retrograd.core.runs.layout import find_rank_folders, is_run
from retrograd.core.runs.listing import find_runs
from retrograd.core.serving.followed_run import (
    ChosenSites,
    ColumnRange,
    FollowedRun,
    NotServedError,
    OtherSitesError,
    TooMuchError,
)
from retrograd.core.serving.listed_runs import ComparedRuns, ListedRuns
from retrograd.core.views.page.frame import frame_page

HOST = "127.0.0.1"

_MOST_RUNS = 8
"""Runs that are held open: those that were asked for last."""

_LARGEST = 1 << 53
"""Numbers in an address; a script of a page tells larger ones not apart."""

_NOTHING_YET = b"""<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>retrograd</title>
<p>Nothing was recorded yet. This page looks again every second."""

_REDIRECT = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={0}"><title>retrograd</title><p><a href="{0}">The page of the run</a>
"""

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
        is_awaited: it is a run that will be recorded, and need not be there yet.

    Attributes:
        path: the same.
        single: the name of the only run; empty for a folder of runs.
        listed: the runs of the folder, each in a line.

    Raises:
        NotARunError: it is neither.
    """

    def __init__(self, path: Path, *, is_awaited: bool = False) -> None:
        self.path = path
        self.is_awaited = is_awaited
        self.single = path.name if is_awaited or is_run(path) else ""
        if not is_awaited:
            find_rank_folders(path) if self.single else find_runs(path)
        self.listed = ListedRuns(path, is_single=bool(self.single))
        self._open: OrderedDict[str, _Slot] = OrderedDict()
        self._lock = threading.Lock()
        self._compared = ComparedRuns()

    def find(self, name: str) -> FollowedRun:
        """The run of a name.

        Raises:
            NotServedError: there is none.
            RunError: it cannot be read.
        """
        with self._lock:
            slot = self._open.pop(name, None) or _Slot(self._folder_of(name))
            self._open[name] = slot
            while len(self._open) > _MOST_RUNS:
                self._open.popitem(last=False)
        return slot.take()

    def compare(self, names: list[str], base: str, home: str = "") -> str:
        """The page of several runs, which asks at an address whether they have gone on; ``home`` is that of all.

        Raises:
            NotServedError: there is none of a name.
            RunError: one cannot be read.
        """
        return self._compared.make_page([self._folder_of(name) for name in names], base, home)

    def tell_state(self, names: list[str]) -> str:
        """A text that changes when one of several runs does.

        Raises:
            NotServedError: there is none of a name.
        """
        return self._compared.tell_state([self._folder_of(name) for name in names])

    def _folder_of(self, name: str) -> Path:
        if self.single:
            if name != self.single:
                raise NotServedError(name)
            return self.path
        found = {folder.name: folder for folder in self.path.iterdir()}  # a name is looked up, never a path
        if name not in found or not is_run(found[name]):
            raise NotServedError(name)
        return found[name]


class _Slot:
    """A run that is opened by who asks for it first; others of the same run wait, and nobody else does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._run: FollowedRun | None = None

    def take(self) -> FollowedRun:
        with self._lock:
            if self._run is None:
                self._run = FollowedRun(self._folder)
            return self._run


class RunServer(ThreadingHTTPServer):
    """A server on the loopback of this machine.

    Args:
        served: the runs.
        port: where; any that is free by default.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, served: Served, port: int = 0) -> None:
        self.served = served
        self.token = secrets.token_urlsafe(18)
        self.answering = threading.BoundedSemaphore(LIMITS.answers_at_once)
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        self._connected = 0
        self._redirect: Path | None = None
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def write_redirect(self) -> Path:
        """Write a page that leads to ours, and that this user alone can read: command lines can be read by everybody.

        It is removed once it has led somebody here, or when the server closes.
        """
        handle, name = tempfile.mkstemp(prefix="retrograd-", suffix=".html")  # mode 0600
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123  # of a number
            file.write(_REDIRECT.format(self.address))
        self._redirect = Path(name)
        return self._redirect

    def server_close(self) -> None:
        """Close, and remove what was written."""
        super().server_close()
        self.remove_redirect()

    def remove_redirect(self) -> None:
        """Remove what was written, which is not needed any more."""
        redirect, self._redirect = self._redirect, None
        if redirect is not None:
            redirect.unlink(missing_ok=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are too many and none of them is idle."""
        with self._lock:
            self._connected += 1
            oldest = next(iter(self._idle), None) if self._connected > LIMITS.connections else None
            is_refused = self._connected > LIMITS.connections and oldest is None
            if oldest is not None:
                del self._idle[oldest]
                with contextlib.suppress(OSError):  # it has gone away itself
                    oldest.shutdown(socket.SHUT_RDWR)  # which wakes its thread
            if not is_refused:
                self._idle[request] = None
        if is_refused:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._connected -= 1
            self._idle.pop(request, None)
        super().shutdown_request(request)

    @contextlib.contextmanager
    def working(self, request: socket.socket) -> Iterator[None]:
        """While it is answered, a connection is not idle."""
        with self._lock:
            self._idle.pop(request, None)
        try:
            yield
        finally:
            with self._lock:
                self._idle[request] = None

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is no news; anything else is."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Report what has failed here and where, once for each place."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
        if where not in self._reported:
            self._reported.add(where)
            say(show_plainly(f"an answer failed: {where}: {error}"))


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version = "retrograd"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = LIMITS.connection_seconds
    kinds: ClassVar[dict[str, str]] = {
        "page": "text/html; charset=utf-8",
        "json": "application/json",
        "bytes": "application/octet-stream",
    }

    def do_GET(self) -> None:
        with self.server.working(self.connection):
            self._answer_get()

    def _answer_get(self) -> None:
        if {"content-length", "transfer-encoding"} & {name.lower() for name in self.headers}:
            self.close_connection = True  # a question has no body: it is not read
        path, _, query = self.path.partition("?")  # as it came: nothing is made of it for who lacks the token
        _, token, *words = [*map(unquote, path.split("/")), ""]
        if not self._is_from_here() or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "page", b"The address is that which retrograd serve has printed.")
            return
        self.server.remove_redirect()
        try:
            with self.server.answering:
                kind, content = self._find(words[:-1], parse_qsl(query))
        except TooMuchError:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "page", b"This is more than one answer holds.")
        except NotServedError:
            self._answer(HTTPStatus.NOT_FOUND, "page", b"There is nothing here.")
        except _QueryError as error:
            self._answer(HTTPStatus.BAD_REQUEST, "page", f"This cannot be asked: {error}.".encode())
        except OtherSitesError:
            self._answer(HTTPStatus.PRECONDITION_FAILED, "page", b"The run has other sites by now.")
        except RunError as error:
            self._answer(HTTPStatus.CONFLICT, "page", f"<pre>{escape(show_plainly(str(error)))}</pre>".encode())
        except Exception as error:
            self.server.tell(error)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "page", f"This failed: {type(error).__name__}.".encode())
        else:
            self._answer(HTTPStatus.OK, kind, content)

    def _is_from_here(self) -> bool:
        """A name that somebody else's server resolves to this machine is not ours."""
        port = self.server.server_port
        return self.headers.get("Host") in {f"{HOST}:{port}", f"localhost:{port}"}

    def _find(self, words: list[str], pairs: list[tuple[str, str]]) -> tuple[str, bytes]:
        served, query = self.server.served, dict(pairs)
        match words:
            case [""] if served.single:
                return "page", self._make_page(served.single)
            case [""]:
                return "page", _make_list(served.listed.tell_lines()).encode()
            case ["runs" | "losses" as what]:
                return "json", json.dumps(self._tell_listed(what, query)).encode()
            case ["compare", *what] if what in ([], ["state"]):
                return self._compare(_read_runs(pairs), is_page=not what)
            case ["run", name]:
                return "page", self._make_page(name)
            case ["run", name, "news"]:
                have, numbers = _read_digests(query), _read_numbers(query, "column", "step", "until", "width")
                return "json", json.dumps(served.find(name).find_news(have, **numbers)).encode()
            case ["run", name, "scalars"]:
                return "bytes", served.find(name).read_scalars(_read_names(query), _read_columns(query))
            case ["run", name, "numbers"]:
                names, chosen, columns = _read_names(query), _read_chosen(query), _read_columns(query)
                return "bytes", served.find(name).read_numbers(names, chosen, columns)
            case ["run", name, "exponents"]:
                chosen, columns = _read_chosen(query), _read_columns(query)
                return "json", json.dumps(served.find(name).read_exponents(chosen, columns)).encode()
        raise NotServedError(self.path)

    def _compare(self, names: list[str], *, is_page: bool) -> tuple[str, bytes]:
        served = self.server.served
        if is_page:
            return "page", served.compare(names, f"/{self.server.token}/compare", f"/{self.server.token}/").encode()
        return "bytes", served.tell_state(names).encode()

    def _tell_listed(self, what: str, query: dict[str, str]) -> dict[str, Any]:
        listed = self.server.served.listed
        return listed.tell_lines() if what == "runs" else listed.tell_losses(**_read_numbers(query, "since"))

    def _make_page(self, name: str) -> bytes:
        if self.server.served.is_awaited and not is_run(self.server.served.path):
            return _NOTHING_YET
        home = "" if self.server.served.single else f"/{self.server.token}/"
        return (
            self.server.served.find(name).make_page(f"/{self.server.token}/run/{quote(name, safe='')}", home).encode()
        )

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": self.kinds[kind]}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name there
        """Log nothing: the address holds the token."""


class _QueryError(ValueError):
    """A query that no page of ours makes."""


def _read_runs(pairs: list[tuple[str, str]]) -> list[str]:
    names = list(dict.fromkeys(value for name, value in pairs if name == "run"))
    if not 2 <= len(names) <= _MOST_RUNS:
        raise _QueryError(f"two to {_MOST_RUNS} runs are compared")
    return names


def _read_numbers(query: dict[str, str], *names: str) -> dict[str, int]:
    try:
        numbers = {name: int(query[name]) for name in names}
    except (KeyError, ValueError) as error:
        raise _QueryError(f"{', '.join(names)} are whole numbers") from error
    if numbers.get("width", 1) < 1 or any(abs(number) > _LARGEST for number in numbers.values()):
        raise _QueryError(f"a number of {', '.join(names)} is out of range")
    return numbers


def _read_columns(query: dict[str, str]) -> ColumnRange:
    return ColumnRange(**_read_numbers(query, *ColumnRange._fields))


def _read_chosen(query: dict[str, str]) -> ChosenSites:
    try:
        return ChosenSites([int(number) for number in query["series"].split(",")], query["sites"])
    except (KeyError, ValueError) as error:
        raise _QueryError("series are whole numbers, and sites a digest") from error


def _read_names(query: dict[str, str]) -> list[str]:
    try:
        names = parse_json(query["names"])
    except (KeyError, ValueError) as error:
        raise _QueryError("names are a list") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _QueryError("names are a list of texts")
    return names


def _read_digests(query: dict[str, str]) -> dict[str, str]:
    try:
        return {str(name): str(digest) for name, digest in parse_object(query["have"]).items()}
    except (KeyError, ValueError) as error:
        raise _QueryError("have is an object of digests") from error


def _make_list(told: dict[str, Any]) -> str:
    return frame_page("retrograd.core.serving", "Runs", told, {}, is_served=True)


def serve(path: Path, port: int, *, told: Callable[[RunServer], None]) -> None:
    """Serve until somebody interrupts.

    Args:
        path: a run, or a folder that holds runs.
        port: where; 0 for any that is free.
        told: called with the server once its address can be opened.

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
        told(server)
        server.serve_forever()
