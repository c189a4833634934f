"""What a server answers, and whom."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import socket
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlencode, urlsplit

import numpy as np
import pytest

from retrograd.core.cli import main
from retrograd.core.errors import LaunchError, NotARunError
from retrograd.core.history.sink import Phase
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import open_run
from retrograd.core.serving import followed_run, listed_runs
from retrograd.core.serving.followed_run import ChosenSites, ColumnRange, FollowedRun
from retrograd.core.serving.server import RunServer, Served, serve
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer, write_run
from tests.core.serving.served import serving


def ask(server: RunServer, path: str, host: str | None = None, token: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    headers = {"Host": host or f"127.0.0.1:{server.server_port}"}
    connection.request("GET", f"/{server.token if token is None else token}/{path}", headers=headers)
    answer = connection.getresponse()
    told = answer.status, answer.read()
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert answer.getheader("Access-Control-Allow-Origin") is None
    connection.close()
    return told


def digest_of(sites: list[str]) -> str:
    return hashlib.sha256(json.dumps(sites).encode()).hexdigest()[:12]


def of_all(parent: Path, **other: str | int) -> str:
    """A question for the rms of all sites and steps, save what is given otherwise."""
    sites = open_run(parent / "done").history.sites
    series = ",".join(map(str, range(len(sites))))
    query = {"names": '["rms"]', "series": series, "sites": digest_of(sites), "step": 0, "until": 4, "width": 1}
    return urlencode({**query, **other})


def say(server: RunServer, request: bytes) -> bytes:
    """What is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("target", ["//[", "/[::1", "http://[/", "*", "x", "?", "%", "/%ff", "//\u2100", "/?run=a#["])
@pytest.mark.parametrize("knows_token", [False, True])
def test_a_malformed_request_is_answered_and_nothing_fails(
    server: RunServer, capfd: pytest.CaptureFixture[str], target: str, knows_token: bool
) -> None:
    target = f"/{server.token}/{target}" if knows_token else target
    answer = say(server, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404") if knows_token else b"HTTP/1.1 403")
    assert capfd.readouterr().err == ""


def test_only_this_machine_and_who_knows_the_token_are_answered(server: RunServer, parent: Path) -> None:
    before = sorted(str(path) for path in parent.rglob("*"))
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "")[0] == 200
    assert ask(server, "", host=f"localhost:{server.server_port}")[0] == 200
    assert ask(server, "", host="evil.example")[0] == 403
    assert ask(server, "", host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, "", token="guessed")[0] == 403
    assert ask(server, "", token="")[0] == 403
    for path in (
        "run/..",
        "run/%2e%2e",
        "run/done%2f..%2fdone",
        "run/nosuch",
        "run/done/numbers?" + of_all(parent, names='["nosuch"]'),
        "run/done/numbers?" + of_all(parent, series="99"),
        "run/done/exponents?" + of_all(parent, series="-1"),
    ):
        assert ask(server, path)[0] == 404, path
    for query in ("", "step=x&until=4&width=1", "step=0&until=4&width=0", f"step=0&until={10**30}&width=1"):
        assert ask(server, f"run/done/scalars?names=[]&{query}")[0] == 400, query
    for wrong in ({"names": "{"}, {"names": "[1]"}, {"names": '"rms"'}, {"names": "[" * 9999}, {"series": ""}):
        assert ask(server, f"run/done/numbers?{of_all(parent, **wrong)}")[0] == 400, wrong
    assert ask(server, f"run/done/numbers?{of_all(parent, sites='others')}")[0] == 412
    assert ask(server, f"run/done/exponents?{of_all(parent, sites='others')}")[0] == 412
    for have in ("", "[]", "{"):
        assert ask(server, f"run/done/news?column=0&step=0&until=0&width=1&have={have}")[0] == 400, have
    listed = json.loads(ask(server, "runs")[1])["runs"]
    assert {line["name"]: line["last_step"] for line in listed} == {"done": 4, "<img src=x onerror=alert(1)>": 1}
    page = ask(server, "")[1].decode() + ask(server, "run/done")[1].decode()
    assert "<img" not in page
    assert "connect-src 'self'" in page
    assert sorted(str(path) for path in parent.rglob("*")) == before


def test_numbers_are_those_of_the_history_from_any_step_on(server: RunServer, parent: Path) -> None:
    matrix = open_run(parent / "done").history.matrix("rms")
    answer = np.frombuffer(ask(server, f"run/done/numbers?{of_all(parent, step=2, until=3)}")[1], "<f4")
    np.testing.assert_array_equal(answer.reshape(5, 2), matrix.values[:, 2:4].astype(np.float32))
    several = of_all(parent, step=2, until=3, names='["zero_share","rms"]', series="3,1")
    answer = np.frombuffer(ask(server, f"run/done/numbers?{several}")[1], "<f4").reshape(2, 2, 2)
    zeros = open_run(parent / "done").history.matrix("zero_share")
    np.testing.assert_array_equal(answer[0], zeros.values[[3, 1], 2:4].astype(np.float32))
    np.testing.assert_array_equal(answer[1], matrix.values[[3, 1], 2:4].astype(np.float32))
    query: dict[str, str | int] = {"step": 0, "until": 4, "width": 2}
    answer = np.frombuffer(ask(server, f"run/done/numbers?{of_all(parent, width=2)}")[1], "<f4").reshape(3, 5, 3)
    np.testing.assert_array_equal(answer[0, :, 1], matrix.values[:, 2:4].min(axis=1).astype(np.float32))
    np.testing.assert_array_equal(answer[2, :, 1], matrix.values[:, 2:4].max(axis=1).astype(np.float32))
    np.testing.assert_array_equal(answer[1, :, 2], matrix.values[:, 4].astype(np.float32))
    query["names"] = '["nosuch", "loss"]'
    scalars = np.frombuffer(ask(server, f"run/done/scalars?{urlencode(query)}")[1], "<f4").reshape(3, 3, 3)
    np.testing.assert_array_equal(scalars[1, :2], [[np.nan] * 3, [0.5, 2.5, 4.0]])
    query = {"have": "{}", "column": 4, "step": 4, "until": 4, "width": 1}
    news = json.loads(ask(server, f"run/done/news?{urlencode(query)}")[1])
    assert news["columns"] is None
    query |= {"have": json.dumps(news["digests"]), "column": 2, "step": 2, "until": 2}
    later = json.loads(ask(server, f"run/done/news?{urlencode(query)}")[1])
    assert later["news"] == {}
    assert later["columns"]["from"] == 2
    assert later["columns"]["first"] == [2, 3, 4]
    query |= {"step": 77}  # of a run that was another one
    assert json.loads(ask(server, f"run/done/news?{urlencode(query)}")[1])["columns"]["from"] == 0
    exponents = json.loads(ask(server, f"run/done/exponents?{of_all(parent, series='0,1')}")[1])["exponents"]
    assert exponents["columns"] == 5
    assert list(exponents["stretches"]) == ["0", "1"]


def test_a_failure_is_told_once_for_each_place(
    server: RunServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("inner \x1b[31m")

    monkeypatch.setattr(followed_run.ScalarCurves, "reduce", fail)
    for _ in range(2):
        assert ask(server, "run/done/scalars?names=[]&step=0&until=4&width=1") == (500, b"This failed: KeyError.")
    said = capfd.readouterr().err
    assert said.count("an answer failed: KeyError at test_server.py:") == 1
    assert "\x1b" not in said


def test_a_part_that_was_merged_meanwhile_is_read_where_it_is_now(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run")
    try:
        for step, row in enumerate(make_steps(range(LIMITS.fan_in))):
            if step == LIMITS.fan_in - 1:
                run = FollowedRun(tmp_path / "run")
                run._run._files.keep_only([])  # as where too many files are open
                for part in run._run._parts.values():
                    part._held = None
            add_step(writer, row)
            writer.flush()
        columns, sites = ColumnRange(0, LIMITS.fan_in - 2, 1), run._scoped.sites
        answer = np.frombuffer(run.read_scalars(["loss"], columns), "<f4").reshape(3, 2, -1)
        np.testing.assert_array_equal(answer[1, 0], np.arange(LIMITS.fan_in - 1))
        chosen = ChosenSites(range(len(sites)), digest_of(sites))
        rms = np.frombuffer(run.read_numbers(["rms"], chosen, columns), "<f4")
        matrix = open_run(tmp_path / "run").history.matrix("rms")
        np.testing.assert_array_equal(rms.reshape(-1, LIMITS.fan_in - 1), matrix.values[:, :-1].astype(np.float32))
    finally:
        writer.close()


def test_a_run_that_takes_long_to_open_holds_up_no_other(server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    other, is_opening, may_open = server.served.find("done"), threading.Event(), threading.Event()

    def open_late(folder: Path) -> FollowedRun:
        is_opening.set()
        assert may_open.wait(60)
        return FollowedRun(folder)

    monkeypatch.setattr("retrograd.core.serving.server.FollowedRun", open_late)
    opened: list[FollowedRun] = []
    waiting = [
        threading.Thread(target=lambda: opened.append(server.served.find("<img src=x onerror=alert(1)>")))
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    assert is_opening.wait(60)
    assert server.served.find("done") is other
    may_open.set()
    for thread in waiting:
        thread.join()
    assert opened[0] is opened[1]


def test_a_run_that_is_awaited_is_shown_once_it_is_there(tmp_path: Path) -> None:
    with serving(tmp_path / "run", is_awaited=True) as server:
        assert b'http-equiv="refresh"' in ask(server, "")[1]
        write_run(tmp_path / "run", range(3))
        assert b'id="viewport"' in ask(server, "")[1]


def test_what_cannot_be_served_is_told(tmp_path: Path, server: RunServer) -> None:
    with pytest.raises(NotARunError):
        serve(tmp_path / "nosuch", 0, told=print)
    run = write_run(tmp_path / "one")
    with pytest.raises(LaunchError, match=f"Port {server.server_port}"):
        serve(run, server.server_port, told=print)
    with RunServer(Served(run)) as single:
        assert single.served.single == "one"
        assert single.address.startswith(f"http://127.0.0.1:{single.server_port}/")


def test_of_a_damaged_run_the_file_and_the_repair_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<run>")
    with serving(run) as server:
        for part in run.glob("rank*/statistics/*.parquet"):
            part.write_bytes(b"PAR1")
        status, told = ask(server, "")
    assert status == 409
    assert b".parquet" in told
    assert b"Try: " in told
    assert b"&lt;run&gt;" in told
    assert b"<run>" not in told


@pytest.mark.parametrize("phases", [("train",), ("train", "eval")])
def test_a_long_run_is_opened_by_its_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phases: tuple[Phase, ...]
) -> None:
    writer = open_writer(tmp_path / "run")
    writer.add_sites(["never:output"])
    for batch in make_steps(range(4)):
        for phase in phases:
            add_step(writer, replace(batch, moment=replace(batch.moment, phase=phase)))
        writer.flush()
    writer.close()
    short = FollowedRun(tmp_path / "run")._scoped
    monkeypatch.setattr(LIMITS, "explained_rows", 1)
    long = FollowedRun(tmp_path / "run")._scoped
    assert long.sites == short.sites
    assert long.elements == short.elements
    assert long.phase == short.phase
    np.testing.assert_array_equal(long.columns.steps, short.columns.steps)


def test_runs_of_the_folder_are_compared(server: RunServer, parent: Path) -> None:
    before = sorted(str(path) for path in parent.rglob("*"))
    hostile = "<img src=x onerror=alert(1)>"
    code, page = ask(server, f"compare?{urlencode([('run', 'done'), ('run', hostile)])}")
    assert code == 200
    assert b"<img" not in page
    assert b"connect-src" not in page
    assert b'"verdict":"identical"' in page
    assert ask(server, "compare?run=done")[0] == 400
    both = urlencode([("run", "done"), ("run", hostile)])
    state = ask(server, f"compare/state?{both}")
    assert state[0] == 200
    assert ask(server, f"compare/state?{both}") == state
    assert ask(server, "compare/state?run=done&run=..")[0] == 404
    assert ask(server, "compare/state?run=done&run=done")[0] == 400
    assert ask(server, f"compare/state?{both}", host="evil.example")[0] == 403
    assert ask(server, "compare?run=done&run=done")[0] == 400
    assert ask(server, "compare?run=done&run=..")[0] == 404
    assert sorted(str(path) for path in parent.rglob("*")) == before


def test_what_compared_runs_tell_changes_when_one_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path / "done", range(2))
    writer = open_writer(tmp_path / "going")
    add_step(writer, make_steps([0])[0])
    writer.flush()
    served = Served(tmp_path)
    before = served.tell_state(["done", "going"])
    assert served.tell_state(["done", "going"]) == before
    assert before in served.compare(["done", "going"], "/token/compare")
    add_step(writer, make_steps([1])[0])
    writer.flush()
    assert served.tell_state(["done", "going"]) != before
    writer.close()


def test_losses_are_told_once_and_again_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "done", range(4))
    writer = open_writer(tmp_path / "going")
    add_step(writer, make_steps([0])[0])
    writer.flush()
    read: list[str] = []
    usual = listed_runs.read_line
    monkeypatch.setattr(listed_runs, "read_line", lambda run: read.append(run.name) or usual(run))
    monkeypatch.setattr(LIMITS, "look_share", 1e9)
    with serving(tmp_path) as server:
        told = json.loads(ask(server, "losses?since=0")[1])
        assert told["losses"]["done"]["values"] == [0.0, 1.0, 2.0, 3.0]
        assert told["losses"]["done"]["final"] == 3.0
        assert (told["waiting"], told["until"]) == (0, 2)
        assert json.loads(ask(server, "losses?since=2")[1])["losses"] == {}
        ask(server, "runs")
        read.clear()
        add_step(writer, make_steps([1])[0])
        writer.flush()
        lines = json.loads(ask(server, "runs")[1])["runs"]
        assert {line["name"]: line["last_step"] for line in lines} == {"done": 3, "going": 1}
        assert read == ["going"]
        again = json.loads(ask(server, "losses?since=2")[1])
        assert {name: curve["values"] for name, curve in again["losses"].items()} == {"going": [0.0, 1.0]}
        monkeypatch.setattr(LIMITS, "list_seconds", -1.0)
        write_run(tmp_path / "new", range(1))
        assert json.loads(ask(server, "losses?since=3")[1]) == {"losses": {}, "until": 3, "waiting": 1}
        assert ask(server, "losses")[0] == 400
        assert ask(server, "losses?since=0", host="evil.example")[0] == 403
        shutil.rmtree(tmp_path / "done")
        assert "done" not in [line["name"] for line in json.loads(ask(server, "runs")[1])["runs"]]
    writer.close()


def connect(server: RunServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def test_many_idle_connections_shut_nobody_out(server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "connections", 8)
    before = threading.active_count()
    idle = [connect(server) for _ in range(100)]
    try:
        for _ in range(3):
            assert ask(server, "")[0] == 200
        assert idle[0].recv(1) == b"", "the oldest have given way"
        deadline = time.monotonic() + 20
        while threading.active_count() > before + 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before + 8
    finally:
        for each in idle:
            each.close()


def test_where_all_connections_are_answered_another_is_refused(
    server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "connections", 3)
    let_go, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> dict[str, object]:
        begun.release()
        assert let_go.wait(20)
        return {}

    monkeypatch.setattr(server.served.listed, "tell_lines", wait)
    found: list[int] = []
    asking = [threading.Thread(target=lambda: found.append(ask(server, "runs")[0])) for _ in range(3)]
    for each in asking:
        each.start()
    for _ in asking:
        assert begun.acquire(timeout=20)
    try:
        with connect(server) as another:
            assert another.recv(1) == b""
    finally:
        let_go.set()
        for each in asking:
            each.join(20)
    assert found == [200, 200, 200]


def test_few_answers_are_computed_at_one_time(server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def count() -> dict[str, object]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        return {}

    monkeypatch.setattr(server.served.listed, "tell_lines", count)
    asking = [threading.Thread(target=ask, args=(server, "runs")) for _ in range(40)]
    for each in asking:
        each.start()
    for each in asking:
        each.join(20)
    assert 1 < most <= LIMITS.answers_at_once


def test_an_answer_has_a_largest_size(server: RunServer, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = len(open_run(parent / "done").history.sites)
    monkeypatch.setattr(LIMITS, "answer_cells", 5 * sites)
    assert ask(server, f"run/done/numbers?{of_all(parent)}")[0] == 200
    twice = json.dumps(["rms", "rms"])
    assert ask(server, f"run/done/numbers?{of_all(parent, names=twice)}")[0] == 413
    assert ask(server, f"run/done/exponents?{of_all(parent)}")[0] == 413
    many = json.dumps(["loss"] * 5 * sites)
    assert ask(server, f"run/done/scalars?{of_all(parent, names=many)}")[0] == 413


def test_a_body_is_not_read_and_is_no_further_request(server: RunServer) -> None:
    inner = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
    outer = inner.replace("\r\n\r\n", f"\r\nContent-Length: {len(inner)}\r\n\r\n")
    assert say(server, (outer + inner).encode()).count(b"HTTP/1.1 200") == 1
    assert say(server, (inner + inner).encode()).count(b"HTTP/1.1 200") == 2
    assert say(server, outer.replace("GET", "POST", 1).encode()).startswith(b"HTTP/1.1 501")


def test_a_browser_is_given_a_file_that_only_its_user_reads(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And the file is gone when the server is; its name, which is on the command line of the browser, tells nothing."""
    seen: list[tuple[str, str, int]] = []

    def open_it(address: str) -> bool:
        path = Path(unquote(urlsplit(address).path))
        seen.append((address, path.read_text(), stat.S_IMODE(path.stat().st_mode)))
        return True

    def interrupt(server: RunServer, poll_interval: float = 0.5) -> None:
        raise KeyboardInterrupt

    (tmp_path / "temporary files").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary files"))
    monkeypatch.setattr("webbrowser.open", open_it)
    monkeypatch.setattr(RunServer, "serve_forever", interrupt)
    assert main(["serve", "--open", str(parent)]) == 0
    address = capsys.readouterr().out.strip()
    token = address.split("/")[3]
    [(opened, page, mode)] = seen
    assert opened.startswith("file://")
    assert token not in opened
    assert f'url={address}"' in page
    assert mode == 0o600
    assert list((tmp_path / "temporary files").iterdir()) == []
