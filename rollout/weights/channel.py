"""Messages between a sender and the receivers of its policies: JSON over a socket, file descriptors with it.

sender                         receiver
listen_locally / listen        connect_locally / connect        (by a path on one machine, by host and port elsewhere)
Rendezvous.join(7)  ◄───────►  greet(…, 7)                      both are at the same policy, or both raise
Channel             ◄───────►  Channel                          what the transport has to say
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.errors import TransportError

_HEADER = struct.Struct("!I")
_LONGEST_PATH = 107  # bytes that the kernel keeps of a Unix socket's path
_RETRY_SECONDS = 0.02
_BACKLOG = 64  # receivers that wait for their turn


def private_folder(folder: Path) -> Path:
    """Makes the folder, for this user alone, if it is not there. Raises `ValueError` where others could enter it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"folder={str(folder)!r} is not valid: it must belong to this user and to nobody else (chmod 700), since "
            "whoever reaches the socket in it can read and send weights"
        )
    return folder


def listen_locally(path: Path) -> socket.socket:
    """A socket that processes of this machine find at `path`. One that a dead process left there is replaced.

    Raises `ValueError` if a living process listens there, or the path is too long.
    """
    _check_length(path)
    if path.exists():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ValueError(f"{str(path)!r} is taken: another process sends from this folder")
        path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that is reached at `host`, an address of this machine; port 0 takes a free one."""
    return socket.create_server((host, port), backlog=_BACKLOG)


def connect_locally(path: Path, timeout: float) -> socket.socket:
    """Waits up to `timeout` seconds for somebody to listen at `path`. Raises `TransportError`."""
    _check_length(path)
    return _connect(socket.AF_UNIX, str(path), timeout)


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Waits up to `timeout` seconds for somebody to listen there. Raises `TransportError`."""
    connection = _connect(socket.AF_INET, (host, port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connect(family: socket.AddressFamily, address: str | tuple[str, int], timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(family)
        connection.settimeout(timeout)
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise TransportError(f"no sender came to {address!r} in {timeout} s") from error
            time.sleep(_RETRY_SECONDS)
        else:
            return connection


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(f"the path of the socket {str(path)!r} is too long: it must be {_LONGEST_PATH} bytes at most")


class Channel:
    """One end of a connection. An `{"error": ...}` from the other end, its silence and its end raise."""

    def __init__(self, connection: socket.socket, timeout: float, peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._timeout = timeout
        connection.settimeout(timeout)

    def send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Raises `TransportError`, with what the other end has to say where it said something before it went."""
        data = json.dumps(message).encode()
        try:
            header = _HEADER.pack(len(data))
            if descriptor is None:
                self._connection.sendall(header + data)
            else:
                socket.send_fds(self._connection, [header], [descriptor])
                self._connection.sendall(data)
        except OSError as error:
            failure = self._failure(error)
            with suppress(OSError):
                self._read()
            raise failure from error

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """The next message, and the file descriptor that came with it. Raises `TransportError`."""
        try:
            message, descriptor = self._read()
        except OSError as error:
            raise self._failure(error) from error
        return message, descriptor

    def is_closed(self) -> bool:
        """Whether the other end is gone, as far as the kernel knows."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def give_up(self, reason: str) -> None:
        """Tells the other end why, if it still listens, and closes."""
        with suppress(TransportError):
            self.send({"error": reason})
        self.close()

    def leave(self, ended: bool) -> None:
        """Closes the receiving end: after the whole policy, or telling the sender that its update failed, and why."""
        if ended:
            self.close()
        else:
            self.give_up(why_closed_early())

    def close(self) -> None:
        """A thread that waits in `receive` wakes up and raises."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> tuple[dict[str, Any], int | None]:
        header, descriptors, _, _ = socket.recv_fds(self._connection, _HEADER.size, 1)
        data = self._read_bytes(_HEADER.unpack(header + self._read_bytes(_HEADER.size - len(header)))[0])
        message = json.loads(data)
        if "error" in message:
            raise TransportError(f"{self.peer} gave up: {message['error']}")
        return message, descriptors[0] if descriptors else None

    def _read_bytes(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._connection.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            data += piece
        return bytes(data)

    def _failure(self, error: OSError) -> TransportError:
        if isinstance(error, TimeoutError):
            return TransportError(f"{self.peer} was silent for {self._timeout} s")
        return TransportError(f"{self.peer} went away in the middle of a policy ({type(error).__name__})")


def why_closed_early() -> str:
    """What a receiver that is closed before the end tells its sender: with the error that is being handled, if any."""
    error = sys.exception()
    return "the engine's policy update failed" + ("" if error is None else f": {type(error).__name__}: {error}")


class Rendezvous:
    """Where a sender meets the receivers of each policy, `num_receivers` of them. `timeout` is in seconds."""

    def __init__(self, listener: socket.socket, num_receivers: int, timeout: float) -> None:
        self._listener = listener
        self._num_receivers = num_receivers
        self._timeout = timeout

    def join(self, version: int, **expected: Any) -> list[Channel]:
        """Waits for the receivers of a policy.

        Raises `TransportError`, here and at every receiver that has come, where one of them wants another version or
        says something else than `expected` of itself, and where not all come in time.
        """
        deadline = time.monotonic() + self._timeout
        channels: list[Channel] = []
        try:
            while len(channels) < self._num_receivers:
                channel = Channel(self._accept(deadline, len(channels), version), self._timeout, "a receiver")
                if channel.is_closed():  # it gave up before its turn came
                    channel.close()
                    continue
                channels.append(channel)
                _check_hello(channel, {"version": version, **expected})
            for channel in channels:
                channel.send({"version": version})
        except BaseException as error:
            for channel in channels:
                channel.give_up(str(error))
            raise
        return channels

    def turn_away(self, reason: str) -> None:
        """Tells those who have come for a policy that it will not be sent."""
        self._listener.settimeout(0.001)
        with suppress(TimeoutError):
            while True:
                Channel(self._listener.accept()[0], self._timeout, "a receiver").give_up(reason)

    def close(self) -> None:
        self._listener.close()

    def _accept(self, deadline: float, num_joined: int, version: int) -> socket.socket:
        self._listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            return self._listener.accept()[0]
        except TimeoutError as error:
            raise TransportError(
                f"{num_joined} of {self._num_receivers} receivers came for policy {version} in {self._timeout} s"
            ) from error


def _check_hello(channel: Channel, expected: Mapping[str, Any]) -> None:
    hello, _ = channel.receive()
    channel.peer = f"the receiver in process {hello.get('process')}"
    for key, value in expected.items():
        if hello.get(key) != value:
            raise TransportError(f"the sender sends with {key} {value}, {channel.peer} expects {key} {hello.get(key)}")


def greet(connection: socket.socket, timeout: float, version: int | None, **about: Any) -> Channel:
    """The receiver's side of `Rendezvous.join`. Raises `TransportError` for another version than `version`."""
    channel = Channel(connection, timeout, "the sender")
    try:
        channel.send({"version": version, "process": os.getpid(), **about})
        sent, _ = channel.receive()
        if sent.get("version") != version:
            raise TransportError(f"the sender sends policy {sent.get('version')}, this update is to policy {version}")
    except BaseException:
        channel.close()
        raise
    return channel
