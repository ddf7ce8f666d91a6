"""Messages with descriptors over SOCK_SEQPACKET: one JSON object per packet."""

from __future__ import annotations

import array
import json
import os
import socket
from contextlib import suppress
from typing import Any

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_DESCRIPTORS = 8

Message = dict[str, Any]


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep message borders."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
    return ours, theirs


def send(end: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """Send one message; raises OSError (EMSGSIZE when it is too long)."""
    data = json.dumps(message).encode()
    ancillary = []
    if descriptors:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    end.sendmsg([data], ancillary)


def receive(end: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one message and its descriptors, or None at the end of the stream."""
    size = array.array("i").itemsize
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * size)
    try:
        data, ancillary, _, _ = end.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights = array.array("i")
            rights.frombytes(payload[: len(payload) - len(payload) % size])
            descriptors.extend(rights)
    if not data:
        close_all(descriptors)
        return None
    message: Message = json.loads(data)
    return message, descriptors


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, those already closed included."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
