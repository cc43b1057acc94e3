"""Both ends of the channel between the engine's process and its front ends: ZeroMQ over an ipc
socket. Neither end ever waits for the other, and no message is dropped: queues have no limit, so
the engine's end counts what each front end has not taken in yet."""

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

import zmq

from plugins.server.messages import FromEngine, FromFront, Goodbye, Hello, Received

MAX_DRAINED = 64  # messages that a front end takes in at once before other work has its turn
ACKNOWLEDGE_EVERY = 256  # messages


class EngineEnd:
    """The engine's end. Front ends are known by their process id.

    watched: further file descriptors whose readiness ends `receive`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = _unbounded(self._context.socket(zmq.ROUTER))
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}

    @property
    def connected(self) -> set[int]:
        """Front ends that said hello and were not forgotten."""
        return set(self._sent)

    def watch(self, descriptor: int) -> None:
        """Let `receive` return when `descriptor` is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """No longer."""
        self._poller.unregister(descriptor)

    def receive(self, timeout_s: float) -> tuple[list[tuple[int, FromFront]], set[int]]:
        """(front end, message) of what came in, in order, and watched descriptors that are
        readable; waits up to `timeout_s` for the first of either."""
        ready = {key for key, _ in self._poller.poll(max(round(timeout_s * 1000), 0))}
        messages: list[tuple[int, FromFront]] = []
        while (came := self._next()) is not None:
            front, message = came
            if isinstance(message, Received):
                self._taken[front] = message.count
                continue
            if isinstance(message, Hello):
                self._sent[front] = self._taken[front] = 0
            messages.append(came)
        return messages, {key for key in ready if isinstance(key, int)}

    def send(self, front: int, message: FromEngine) -> None:
        """Queue a message. One for a front end that is not connected is dropped."""
        if front not in self._sent:
            return
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.send_multipart([_identity(front), body], zmq.NOBLOCK)
            self._sent[front] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.forget(front)

    def backlog(self, front: int) -> int:
        """Messages sent that the front end has not acknowledged; it does so for many at once."""
        return self._sent.get(front, 0) - self._taken.get(front, 0)

    def forget(self, front: int) -> None:
        """A front end is gone."""
        self._sent.pop(front, None)
        self._taken.pop(front, None)

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued for at most `linger_s`, then let go."""
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()

    def _next(self) -> tuple[int, FromFront] | None:
        try:
            identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return int.from_bytes(identity[1:], "big"), pickle.loads(body)


class FrontEnd:
    """A front end's end, in a running asyncio loop: `receive` is called with each message. front:
    the process id."""

    def __init__(self, address: str, receive: Callable[[FromEngine], None], front: int) -> None:
        self._receive = receive
        self._count = self._acknowledged = 0
        self._due = False
        self._last_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = _unbounded(self._context.socket(zmq.DEALER))
        self._socket.set(zmq.ROUTING_ID, _identity(front))
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self.send(Hello())

    def send(self, message: FromFront) -> None:
        """Queue a message."""
        self._socket.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), zmq.NOBLOCK)
        # The descriptor tells of changes alone, and sending may have seen to one.
        self._drain_soon()

    def close(self) -> None:
        """Let go; what is queued is sent if the engine still listens."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=200)
            self._context.term()

    def _drain(self) -> None:
        self._due = False
        for _ in range(MAX_DRAINED):
            try:
                body = None if self._socket.closed else self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                body = None
            if body is None:
                return
            self._count += 1
            message: Any = pickle.loads(body)
            self._receive(message)
            if not isinstance(message, Goodbye) and not self._socket.closed:
                self._acknowledge()
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._drain)

    def _acknowledge(self) -> None:
        now_s = time.monotonic()
        if self._count - self._acknowledged >= ACKNOWLEDGE_EVERY or now_s - self._last_s >= 0.2:
            self._acknowledged, self._last_s = self._count, now_s
            self.send(Received(self._count))


def _identity(front: int) -> bytes:
    return b"f" + front.to_bytes(8, "big")  # ZeroMQ keeps identities that begin with 0 for itself


def _unbounded(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    return socket
