"""The pages of a watched model by HTTP: metrics for Prometheus, a live page for people. A port of its own, or mounted.

    /metrics               what Prometheus scrapes
    /attention             the live page, which fetches
    /attention/data.json   the last heatmaps and statistics
    /                      links to these
    /-/healthy             200 while the process answers

Nothing here asks who is calling: whoever reaches the port reads the statistics, and with `show_tokens=True` the text.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import functools
import hashlib
import html
import ipaddress
import json
import logging
import os
import re
import reprlib
import socket
import socketserver
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from headwise._checks import invalid, need
from headwise.observe.prometheus import MOST_SERIES, check, publish
from headwise.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

    from prometheus_client import CollectorRegistry

    Scope = dict[str, Any]
    Receive = Callable[[], Awaitable[dict[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]
    AsgiApplication = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = ["Server", "asgi_app", "serve", "wsgi_app"]

MOST_CALLERS = 32  # answered at the same time by a port of its own, a thread each
_PLAIN, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
_INDEX = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{model} - headwise</title>
<h1>{model}</h1>
<ul>
<li><a href="attention">attention</a>: heatmaps and statistics, live
<li><a href="metrics">metrics</a>: for Prometheus
</ul>
"""
_logger = logging.getLogger("headwise")


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    kind: str = _PLAIN
    scripts: tuple[str, ...] = ()  # hashes of the scripts that the page may run
    more: dict[str, str] = field(default_factory=dict)

    def headers(self) -> list[tuple[str, str]]:
        scripts = " ".join(f"'{each}'" for each in self.scripts) or "'none'"
        policy = (
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Type": self.kind,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return list({**headers, **self.more}.items())


def _said(status: HTTPStatus, text: str, **more: str) -> _Answer:
    return _Answer(status, f"{text}\n".encode(), more=more)


class _Site:
    """What each path answers, whoever asks."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        registry: CollectorRegistry | None,
        most_series: int,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self._snapshot, self._hosts = snapshot, hosts
        self.publication = publish(snapshot, registry, most_series=most_series)
        self._pages: dict[str, Callable[[str], _Answer]] = {
            "/": self._index,
            "/metrics": self._metrics,
            "/attention": self._attention,
            "/attention/data.json": self._data,
            "/-/healthy": lambda accept: _said(HTTPStatus.OK, "healthy"),
        }

    def answer(self, method: str, root: str, path: str, host: str, accept: str) -> _Answer:
        """Answer a request.

        Args:
            method: GET, HEAD or another.
            root: where the site is mounted, "" or "/something".
            path: below it.
            host: the header's value, "" if there is none.
            accept: likewise.

        Returns:
            The answer, an error's too. The body of HEAD is in it.
        """
        if self._hosts is not None and _hostname(host) not in self._hosts:
            # A page of another site whose name was made to point to this machine would else read what is here.
            return _said(HTTPStatus.FORBIDDEN, f"served to {', '.join(sorted(self._hosts))} only")
        if method not in ("GET", "HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", Allow="GET, HEAD")
        if not path and root:
            return _said(HTTPStatus.PERMANENT_REDIRECT, "one level deeper", Location=f"{root.rpartition('/')[2]}/")
        page = self._pages.get(path or "/")
        if page is None:
            return _said(HTTPStatus.NOT_FOUND, f"only {', '.join(self._pages)}")
        try:
            return page(accept)
        except Exception as error:
            _logger.exception("%s could not be answered", path)
            return _said(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}; the log of the process says more")

    def _index(self, accept: str) -> _Answer:
        model = html.escape(self._snapshot().model)
        return _Answer(HTTPStatus.OK, _INDEX.format(model=model).encode("utf-8", "backslashreplace"), _HTML)

    def _metrics(self, accept: str) -> _Answer:
        # Not compressed: that would cost the model's process more than the network saves.
        encode, kind = need("prometheus_client.exposition", "observe").choose_encoder(accept)
        return _Answer(HTTPStatus.OK, encode(self.publication.registry), kind)

    def _attention(self, accept: str) -> _Answer:
        page = resources.files("headwise.observe").joinpath("live.html").read_bytes()
        return _Answer(HTTPStatus.OK, page, _HTML, _hashes(page))

    def _data(self, accept: str) -> _Answer:
        from headwise.observe.live import payload

        body = json.dumps(payload(self._snapshot()), allow_nan=False, separators=(",", ":"))
        return _Answer(HTTPStatus.OK, body.encode(), "application/json")


@functools.cache
def _hashes(page: bytes) -> tuple[str, ...]:
    """Of the page's own scripts, so that the browser runs no other one, whatever text gets into the page."""
    scripts = re.findall(rb"<script\b[^>]*>(.*?)</script\s*>", page.replace(b"\r\n", b"\n"), re.DOTALL | re.IGNORECASE)
    return tuple(f"sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}" for script in scripts)


def _hostname(host: str) -> str:
    """The header's name without the port: "localhost:80" gives "localhost", "[::1]:80" gives "[::1]"."""
    return re.sub(r":\d*$", "", host).lower()


# --- Mounted in another server ------------------------------------------------------------------------------------


def wsgi_app(
    snapshot: Callable[[], Snapshot], *, registry: CollectorRegistry | None = None, most_series: int = MOST_SERIES
) -> WSGIApplication:
    """Make an application to mount in a WSGI server (Flask, Django), at any path.

    Unlike `serve`, it answers whatever name the server answers, and leaves it to the server who may call.

    Args:
        snapshot: `monitor.snapshot`, or another callable.
        registry: where to put the metrics, and what `/metrics` shows; None: a new one, of this model alone.
        most_series: as of `prometheus.Collector`.

    Returns:
        The application.

    Raises:
        ImportError, ValueError: as `prometheus.publish`.
    """
    check("wsgi_app", snapshot, registry)
    return _wsgi(_Site(snapshot, registry, most_series))


def _wsgi(site: _Site) -> WSGIApplication:
    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        method, root, path = environ["REQUEST_METHOD"], environ.get("SCRIPT_NAME", ""), environ.get("PATH_INFO", "")
        answer = site.answer(method, root, path, environ.get("HTTP_HOST", ""), environ.get("HTTP_ACCEPT", ""))
        start_response(f"{answer.status.value} {answer.status.phrase}", answer.headers())
        return [] if method == "HEAD" else [answer.body]

    return app


def asgi_app(
    snapshot: Callable[[], Snapshot], *, registry: CollectorRegistry | None = None, most_series: int = MOST_SERIES
) -> AsgiApplication:
    """Make an application to mount in an ASGI server (FastAPI, Starlette), at any path.

    Args and errors are those of `wsgi_app`.

        api.mount("/observe", asgi_app(monitor.snapshot))

    Returns:
        The application. Answers are made in a thread, so that the server's loop goes on meanwhile.
    """
    check("asgi_app", snapshot, registry)
    site = _Site(snapshot, registry, most_series)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
        elif scope["type"] != "http":
            raise invalid("asgi_app", "scope['type']", "be 'http', 'lifespan' or 'websocket'", repr(scope["type"]))
        else:
            root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
            # Since 2024 the path holds the mount's too; servers that go by the older rule leave it out.
            path = path[len(root) :] if root and (path + "/").startswith(root + "/") else path
            named = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            asked = scope["method"], root, path, named.get(b"host", ""), named.get(b"accept", "")
            answer = await _in_thread(lambda: site.answer(*asked))
            headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer.headers()]
            await send({"type": "http.response.start", "status": answer.status.value, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if asked[0] == "HEAD" else answer.body})

    return app


async def _lifespan(receive: Receive, send: Send) -> None:
    """Of a server that runs this application alone."""
    while True:
        event = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{event}.complete"})
        if event == "shutdown":
            return


async def _in_thread(job: Callable[[], _Answer]) -> _Answer:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # another loop than asyncio's, trio's for instance
        return job()
    return await asyncio.to_thread(job)


# --- A port of its own --------------------------------------------------------------------------------------------


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds that a caller may take to ask; a thread waits as long

    def log_message(self, *args: Any, **named: Any) -> None:
        """Not a line on stderr for each scrape."""


class _Http(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = threading.BoundedSemaphore(MOST_CALLERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, of so many at most: who calls while all wait for their callers is sent away."""
        if not self._free.acquire(timeout=0.1):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there was no thread to be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What that thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        """Without the question for the machine's full name, which may wait long for an answer from the network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong, unless the caller just left."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            _logger.exception("a request could not be answered")


_running: weakref.WeakSet[_Http] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked process must not hold the port: a worker that outlives its parent would keep it and never answer."""
    for http in list(_running):
        http.socket.close()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Server:
    """A running server, until `close()` or the end of the process.

    Attributes:
        port: where it listens.
        host: likewise.
    """

    def __init__(self, http: _Http, site: _Site) -> None:
        self.host, self.port = str(http.server_address[0]), int(http.server_address[1])
        self._http, self._site, self._process = http, site, os.getpid()
        self._thread = threading.Thread(target=http.serve_forever, args=(0.1,), name="headwise-observe", daemon=True)
        self._lock, self._open = threading.Lock(), True
        _running.add(http)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; the second time does nothing."""
        with self._lock:
            if not self._open or self._process != os.getpid():
                return
            self._open = False
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
            self._site.publication.close()
            _running.discard(self._http)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(
    snapshot: Callable[[], Snapshot],
    port: int,
    host: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
    *,
    most_series: int = MOST_SERIES,
) -> Server:
    """Serve the pages from a daemon thread.

    On a loopback address only this machine can call, and only by the names localhost, 127.0.0.1 and [::1]: the pages of
    other sites in a browser on this machine stay out. On another address everybody who reaches it can.

    Args:
        snapshot: `monitor.snapshot`, or another callable.
        port: 0 to 65535; 0: a free one.
        host: the address to listen at, or a name of it; all of IPv4 only by "0.0.0.0", all of IPv6 only by "::".
        registry: where to put the metrics, and what `/metrics` shows; None: a new one, of this model alone.
        most_series: as of `prometheus.Collector`.

    Returns:
        The server, with its `port`.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: no such port, no address or name, or as `prometheus.publish`.
        OSError: the port is taken or not allowed, or the machine has no such address.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise invalid("serve", "port", "be an int from 0, a free one, to 65535", repr(port))
    check("serve", snapshot, registry)
    family, address = _address(host, port)

    class Http(_Http):
        address_family = family

    try:
        http = Http((address, port), _Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} must be free; it is in use: pass another one, or 0 for any free one"
        else:
            text = f"host {host!r} and port {port} must be open to this process; {error.strerror}"
        raise OSError(error.errno, text) from error
    try:
        site = _Site(snapshot, registry, most_series, _names(address))
    except BaseException:
        http.server_close()
        raise
    http.set_app(_wsgi(site))
    return Server(http, site)


def _address(host: object, port: int) -> tuple[socket.AddressFamily, str]:
    """Where to listen. All addresses of the machine only if they were asked for by their address: "0" is none."""
    rule = 'be an address or name of this machine, such as "127.0.0.1"; all of its addresses are "0.0.0.0"'
    wrong = invalid("serve", "host", rule, reprlib.repr(host))
    if not isinstance(host, str) or not re.fullmatch(r"[\w.:%-]{1,253}", host):
        raise wrong
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except ValueError:  # no such name is possible
        raise wrong from None
    except OSError as error:
        raise OSError(error.errno, f"host {host!r} must be an address of this machine; {error.strerror}") from error
    address = str(found[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified and host not in ("0.0.0.0", "::"):
        raise wrong
    return family, address


def _names(address: str) -> frozenset[str] | None:
    """By which names a server at this address may be called; None: by any."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return frozenset({"localhost", "127.0.0.1", "[::1]", f"[{address}]" if ":" in address else address})
