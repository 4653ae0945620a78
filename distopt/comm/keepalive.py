"""TCP connections that notice when the other end's machine, or the network, is gone."""

import socket

SECONDS = 5  # without a sign of life of the other end


def keep_alive(connection: socket.socket, seconds: int = SECONDS) -> None:
    """Make reads and writes of a TCP connection fail when the other end gives no sign of life."""
    # A machine that vanishes is noticed, whether there is something to send to it or not.
    # seconds: after the last sign of life, or after the first of what is sent then.
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds),
    ):
        connection.setsockopt(level, option, value)
