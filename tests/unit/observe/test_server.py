"""headwise.observe.server: what each path answers, by a port of its own and mounted; who is refused; how it ends."""

from __future__ import annotations

import asyncio
import errno
import http.client
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.unit.observe.readings import layer, snapshot

from headwise.observe import server
from headwise.observe.prometheus import publish
from headwise.observe.server import asgi_app, serve, wsgi_app
from headwise.observe.snapshot import Snapshot

PAGE = b"<!doctype html>\r\n<script type='application/json'>1</script><script>\r\nlet a\r\n</script>"
PATHS = ("/", "/metrics", "/attention", "/attention/data.json", "/-/healthy")


def see() -> Snapshot:
    return snapshot(layer(0), layer(1))


class _Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


Ask = Callable[..., _Answer]


@pytest.fixture(autouse=True)
def _page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small page and a payload in place of the real ones, which have tests of their own."""
    live = types.ModuleType("headwise.observe.live")
    live.payload = lambda snapshot: {"model": snapshot.model, "layers": len(snapshot.layers)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, live.__name__, live)

    class Folder:
        def joinpath(self, name: str) -> Folder:
            assert name == "live.html"
            return self

        def read_bytes(self) -> bytes:
            return PAGE

    monkeypatch.setattr(server.resources, "files", lambda package: Folder())


def by_port(port: int) -> Ask:
    def ask(path: str, method: str = "GET", **headers: str) -> _Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        read = _Answer(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return read

    return ask


def by_wsgi(root: str = "") -> Ask:
    app = wsgi_app(see)

    def ask(path: str, method: str = "GET", **headers: str) -> _Answer:
        environ = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
        environ |= {"REQUEST_METHOD": method, "SCRIPT_NAME": root, "PATH_INFO": path, "wsgi.input": io.BytesIO()}
        begun: list[Any] = []
        body = b"".join(app(environ, lambda *args: begun.append(args)))
        return _Answer(int(begun[0][0].split()[0]), dict(begun[0][1]), body)

    return ask


def by_asgi(root: str = "", whole: bool = True) -> Ask:
    """`whole`: the path holds the mount's too, as the newer rule of ASGI says."""
    app = asgi_app(see)

    def ask(path: str, method: str = "GET", **headers: str) -> _Answer:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": (root if whole else "") + path, "headers": named}
        asyncio.run(app({**scope, "root_path": root}, receive, send))
        start, end = sent
        given = {name.decode().title(): value.decode() for name, value in start["headers"]}
        return _Answer(start["status"], given, end["body"])

    return ask


@pytest.fixture(params=["port", "wsgi", "mounted wsgi", "asgi", "mounted asgi", "mounted asgi, old"])
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    if request.param == "port":
        with serve(see, 0) as running:
            yield by_port(running.port)
    elif request.param.endswith("wsgi"):
        yield by_wsgi("/a/b" if "mounted" in request.param else "")
    else:
        yield by_asgi("/a/b" if "mounted" in request.param else "", whole="old" not in request.param)


# --- What is answered ---------------------------------------------------------------------------------------------


def test_every_path(ask: Ask) -> None:
    for path in PATHS:
        answer = ask(path)
        assert answer.status == 200, path
        headers = {name.title(): value for name, value in answer.headers.items()}
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert int(headers["Content-Length"]) == len(answer.body)
        bare = ask(path, "HEAD")
        assert (bare.status, bare.body) == (200, b"")
        assert {name.title(): value for name, value in bare.headers.items()}["Content-Length"] == str(len(answer.body))


def test_metrics(ask: Ask) -> None:
    answer = ask("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in parse(answer.body.decode())}
    assert {"attention_entropy_ratio", "attention_layer_info"} <= names
    answer = ask("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert any(family.name == "attention_layer" for family in parse_openmetrics(answer.body.decode()))


def test_the_page_and_its_data(ask: Ask) -> None:
    answer = ask("/attention")
    assert answer.body == PAGE
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    # of "1" and of "\nlet a\n": browsers read the page with line feeds alone
    policy = answer.headers["Content-Security-Policy"]
    assert "script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='" in policy
    assert policy.count("'sha256-") == 2
    assert "script-src 'unsafe" not in policy
    assert "connect-src 'self'" in policy
    answer = ask("/attention/data.json")
    assert answer.headers["Content-Type"] == "application/json"
    assert json.loads(answer.body) == {"model": "encoder", "layers": 2}


def test_index_links_below_a_mount(ask: Ask) -> None:
    body = ask("/").body.decode()
    assert 'href="attention"' in body
    assert 'href="metrics"' in body
    assert "encoder" in body


def test_a_mount_asked_without_its_slash() -> None:
    for ask in (by_wsgi("/a/b"), by_asgi("/a/b"), by_asgi("/a/b", whole=False)):
        answer = ask("")
        assert answer.status == 308
        assert answer.headers["Location"] == "b/"
    assert by_wsgi()("").status == 200


def test_a_path_that_only_begins_like_the_mount() -> None:
    app = by_asgi("/a", whole=False)
    assert app("/attention").status == 200


@pytest.mark.parametrize("path", ["/attention/", "/metrics/x", "/attention/../metrics", "/favicon.ico", "/%00"])
def test_other_paths(path: str, ask: Ask) -> None:
    answer = ask(path)
    assert answer.status == 404
    assert b"/attention" in answer.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods(method: str, ask: Ask) -> None:
    answer = ask("/metrics", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_a_name_is_escaped_in_the_index() -> None:
    with serve(lambda: snapshot(model="<script>\ud800"), 0) as running:
        body = by_port(running.port)("/").body.decode()
    assert "<script>" not in body
    assert "&lt;script&gt;\\ud800" in body


def test_an_error_is_answered_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(snapshot: Snapshot) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(sys.modules["headwise.observe.live"], "payload", fail)
    with serve(see, 0) as running:
        ask = by_port(running.port)
        answer = ask("/attention/data.json")
        assert answer.status == 500
        assert answer.body == b"RuntimeError; the log of the process says more\n"
        assert "a secret" in caplog.text
        assert ask("/metrics").status == 200


@pytest.mark.skipif(not resources.files("headwise.observe").joinpath("live.html").is_file(), reason="not written yet")
def test_the_real_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    page = resources.files("headwise.observe").joinpath("live.html").read_bytes()
    answer = by_wsgi()("/attention")
    assert answer.body == page
    assert "'sha256-" in answer.headers["Content-Security-Policy"]
    assert by_wsgi()("/attention/data.json").status == 200


def test_asgi_alone_in_a_server() -> None:
    app, sent = asgi_app(see), []

    async def run(*events: str) -> None:
        left = [{"type": event} for event in events]

        async def receive() -> dict[str, Any]:
            return left.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message["type"])

        await app({"type": events[0].partition(".")[0], "path": "/"}, receive, send)

    asyncio.run(run("lifespan.startup", "lifespan.shutdown"))
    asyncio.run(run("websocket.connect"))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


def test_asgi_of_another_kind() -> None:
    async def nothing(*message: Any) -> Any:
        raise AssertionError

    with pytest.raises(ValueError, match=r"^asgi_app: scope\['type'\] must be 'http', .*; got 'ftp'"):
        asyncio.run(asgi_app(see)({"type": "ftp"}, nothing, nothing))


@pytest.mark.parametrize(("root", "path"), [("/a/", "/a/metrics"), ("/a/", "/metrics"), ("/", "/metrics")])
def test_an_asgi_mount_with_a_slash(root: str, path: str) -> None:
    asked = by_asgi(root, whole=False)
    assert asked(path).status == 200
    assert asked("/nothing").status == 404


def test_the_loop_goes_on_while_an_answer_is_made() -> None:
    began, go = threading.Event(), threading.Event()

    def slow() -> Snapshot:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert go.wait(30)
        return see()

    app, sent = asgi_app(slow), []

    async def run() -> None:
        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        asked = asyncio.ensure_future(
            app({"type": "http", "method": "GET", "path": "/metrics", "headers": []}, receive, send)
        )
        while not began.is_set():
            await asyncio.sleep(0.001)
        go.set()
        await asked

    asyncio.run(run())
    assert sent[0]["status"] == 200


# --- Registries ---------------------------------------------------------------------------------------------------


def test_a_registry_of_the_callers() -> None:
    registry = CollectorRegistry()
    Counter("requests", "Of the service.", registry=registry).inc()
    publish(lambda: snapshot(layer(0), model="other"), registry)
    with serve(see, 0, registry=registry) as running:
        body = by_port(running.port)("/metrics").body.decode()
        assert wsgi_app(see, registry=registry)  # the same model by another door
    for expected in ("requests_total 1.0", 'model="other"', 'model="encoder"'):
        assert expected in body


def test_close_takes_the_metrics_out() -> None:
    registry = CollectorRegistry()
    serve(see, 0, registry=registry).close()
    assert list(registry.collect()) == []


# --- Ports and callers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", [-1, 65536, 1.5, "80", None, True])
def test_no_such_port(port: object) -> None:
    with pytest.raises(ValueError, match=r"^serve: port must be an int from 0, a free one, to 65535; got "):
        serve(see, port)


def test_a_taken_port() -> None:
    with serve(see, 0) as running:
        with pytest.raises(
            OSError, match=rf"^\[Errno \d+\] port {running.port} must be free; .*0 for any free one"
        ) as error:
            serve(see, running.port)
        assert error.value.errno == errno.EADDRINUSE
        assert by_port(running.port)("/-/healthy").status == 200


@pytest.mark.parametrize("host", ["nowhere.invalid", "203.0.113.1"])
def test_no_such_host(host: str) -> None:
    with pytest.raises(OSError, match=rf"^\[Errno -?\d+\] host '{host}' (and port 0 )?must "):
        serve(see, 0, host)


@pytest.mark.parametrize(
    "host",
    [None, "", "*", " ", 5, b"127.0.0.1", True, ["::"], "a" * 64, "a." * 200, "\ud800", "a\0b", "a..b", "[::1]", "a b"],
)
def test_no_host(host: object) -> None:
    with pytest.raises(ValueError, match=r'^serve: host must be an address or name .*"127\.0\.0\.1".*; got '):
        serve(see, 0, host)


@pytest.mark.parametrize("host", ["0", "0.0", "0x0", "00.0.0.0", "0:0:0:0:0:0:0:0"])
def test_all_addresses_are_asked_for_by_their_address(host: str) -> None:
    with pytest.raises((ValueError, OSError), match=r"host .*must be an address"):
        serve(see, 0, host)
    with serve(see, 0, "0.0.0.0") as running:
        assert running.host == "0.0.0.0"


class _NoFunction:
    def snapshot(self) -> Snapshot:
        return see()


@pytest.mark.parametrize("door", [wsgi_app, asgi_app, lambda given, **words: serve(given, 0, **words), publish])
def test_what_cannot_be_published(door: Callable[..., Any]) -> None:
    for wrong in (_NoFunction(), None, see(), 5):
        with pytest.raises(ValueError, match=r"^\w+: snapshot must be a function .*give monitor\.snapshot.*; got "):
            door(wrong)
    with pytest.raises(ValueError, match=r"^publish: snapshot must give a Snapshot.*; got NoneType"):
        door(lambda: None)
    for registry in (5, "x", {}, object()):
        with pytest.raises(ValueError, match=r"^\w+: registry must be a prometheus_client.CollectorRegistry.*; got "):
            door(see, registry=registry)


def test_a_refused_registry_frees_the_port() -> None:
    registry = CollectorRegistry()
    publish(lambda: see(), registry)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match="name"):
        serve(see, port, registry=registry)
    serve(see, port).close()


def test_the_port_is_free_after_close() -> None:
    running = serve(see, 0)
    by_port(running.port)("/metrics")
    running.close()
    running.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "headwise-observe"]
    with pytest.raises(ConnectionRefusedError):
        by_port(running.port)("/metrics")
    serve(see, running.port).close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:9464", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.", 403),
        ("", 403),
    ],
)
def test_other_names_are_refused_on_loopback(host: str, status: int) -> None:
    with serve(see, 0) as running:
        for path in (*PATHS, "/nothing"):
            answer = by_port(running.port)(path, Host=host)
            assert answer.status == (404 if status == 200 and path == "/nothing" else status)
            assert status == 200 or b"encoder" not in answer.body


def test_by_which_names_a_server_is_called() -> None:
    local = {"localhost", "127.0.0.1", "[::1]"}
    assert server._names("127.0.0.1") == server._names("::1") == local
    assert server._names("127.0.0.2") == local | {"127.0.0.2"}
    assert server._names("0.0.0.0") is server._names("::") is server._names("192.0.2.1") is None


def test_ipv6() -> None:
    try:
        running = serve(see, 0, "::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with running:
        connection = http.client.HTTPConnection("::1", running.port, timeout=30)
        connection.request("GET", "/-/healthy")
        assert connection.getresponse().status == 200
        connection.close()


def test_callers_that_leave_are_no_news(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with serve(see, 0) as running:
        for text in (
            b"",
            b"GET /met",
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\x16\x03\x01 TLS\r\n\r\n",
        ):
            for linger in (True, False):
                with socket.create_connection(("127.0.0.1", running.port), timeout=30) as caller:
                    if linger:  # closing sends a reset
                        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    caller.sendall(text)
        ask = by_port(running.port)
        assert ask("/-/healthy").status == 200
        while threading.active_count() > 2 and any("process_request" in each.name for each in threading.enumerate()):
            time.sleep(0.01)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_many_at_once() -> None:
    with serve(see, 0) as running:
        ask, found = by_port(running.port), []
        threads = [threading.Thread(target=lambda: found.append(ask("/metrics").status)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [200] * 16


def test_callers_who_do_not_ask_take_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CALLERS", 4)
    monkeypatch.setattr(server._Handler, "timeout", 0.5)
    with serve(see, 0) as running:
        callers = [socket.create_connection(("127.0.0.1", running.port), timeout=30) for _ in range(9)]
        most = 0
        for _ in range(30):
            most = max(most, sum("process_request" in each.name for each in threading.enumerate()))
            time.sleep(0.01)
        assert 1 <= most <= 4
        for caller in callers:
            caller.close()
        assert by_port(running.port)("/-/healthy").status == 200


FORK = """
import os
from headwise.observe.server import serve
from tests.unit.observe.readings import layer, snapshot

running = serve(lambda: snapshot(layer(0)), 0)
until, end = os.pipe()
if not os.fork():
    os.close(end)
    running.close()  # waits for no thread that is not there
    os.read(until, 1)  # outlives the parent's server
    os._exit(0)
running.close()
serve(lambda: snapshot(layer(0)), running.port).close()  # not held by the child
print("free")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_hold_the_port() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "free\n"), done.stderr
