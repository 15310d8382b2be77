"""An OpenAI-compatible server in a thread: it answers what a function says, and remembers what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = dict[str, Any]
# A body to answer 200 with; or (status, body) or (status, body, headers); None breaks the connection off.
Answer = JSON | bytes | tuple[Any, ...] | None


@dataclass
class FakeServer:
    """`asked` holds (path, body, headers) in the order of arrival."""

    url: str
    asked: list[tuple[str, JSON, dict[str, str]]] = field(default_factory=list)

    def bodies(self, path: str) -> list[JSON]:
        return [body for where, body, _ in self.asked if where == path]


@contextmanager
def serving(answer: Callable[[str, JSON], Answer]) -> Iterator[FakeServer]:
    """Serve `answer(path, body)` on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: JSON) -> None:
            fake.asked.append((self.path, body, dict(self.headers)))
            found = answer(self.path, body)
            status, content, headers = (*found, {})[:3] if isinstance(found, tuple) else (200, found, {})
            if content is None:
                self.close_connection = True
                return
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that stopped listening is part of some tests."""

    httpd = Quiet(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    fake = FakeServer(f"http://127.0.0.1:{httpd.server_port}/v1")
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
