"""A server in a thread that answers every POST with bytes of the test's choice."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Its URL. answer: gets the handler and the body of each POST; GETs find a model alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            text = json.dumps({"data": [{"id": "odd"}]} if known else {}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["headers"] = dict(self.headers)
            answer(self, body)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *_: Any) -> None:
            """The driver may leave first."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stream(handler: BaseHTTPRequestHandler, *events: Any) -> None:
    """Events as OpenAI sends them, the connection's end as the body's: strings as they are."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    handler.end_headers()
    for event in events:
        text = event if isinstance(event, str) else f"data: {json.dumps(event)}\r\n\r\n"
        handler.wfile.write(text.encode())


def refuse(handler: BaseHTTPRequestHandler, status: int, message: str) -> None:
    text = json.dumps({"error": {"message": message}}).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)
