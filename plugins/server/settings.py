"""Settings of the server: what `conf/server/sse.yaml` holds."""

from dataclasses import dataclass, field

from core.config import require
from plugins.server.limits import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the server, known to every front end.

    host, port: where it listens; port 0 = a free one. workers: front-end processes. max_queue:
    requests that may wait for admission before new ones get 429, counted from the engine's latest
    word: with several workers a burst may exceed it. max_body_bytes: of an HTTP body. limits: of
    one call. request_timeout_s: a request's longest life. keepalive_s: silence after which a stream
    gets a comment line. drain_s: what running requests have after SIGTERM. stuck_s: /ready turns
    red when work is pending and nothing has moved for so long. api_key: bearer token, None = none
    asked for. access_log: a line a call."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_queue: int = 1024
    max_body_bytes: int = 8 << 20
    limits: Limits = field(default_factory=Limits)
    request_timeout_s: float = 3600.0
    keepalive_s: float = 5.0
    drain_s: float = 30.0
    stuck_s: float = 10.0
    api_key: str | None = None
    access_log: bool = False

    def __post_init__(self) -> None:
        require(self.host != "", "server.host", "not empty", self.host)
        require(0 <= self.port <= 65535, "server.port", "in [0, 65535]", self.port)
        require(1 <= self.workers <= 64, "server.workers", "in [1, 64]", self.workers)
        require(self.max_queue >= 0, "server.max_queue", ">= 0", self.max_queue)
        require(self.max_body_bytes >= 1, "server.max_body_bytes", ">= 1", self.max_body_bytes)
        for name in ("request_timeout_s", "keepalive_s", "stuck_s"):
            value = getattr(self, name)
            require(value > 0, f"server.{name}", "> 0", value)
        require(self.drain_s >= 0, "server.drain_s", ">= 0", self.drain_s)
        require(self.api_key != "", "server.api_key", "null or not empty", self.api_key)
