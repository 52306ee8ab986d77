"""sd_notify(3) without a library: one datagram to $NOTIFY_SOCKET (the package sdnotify is unmaintained since 2017)."""

import logging
import os
import socket

log = logging.getLogger("rlhfd")


def notify(*lines: str) -> bool:
    """Tell the service manager, e.g. `READY=1`; False where there is none, or it does not listen (logged)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as manager:
        try:
            manager.connect(address)
            manager.sendall("\n".join(lines).encode())
        except OSError as error:  # its concern: a daemon that works must not end over it
            log.warning("the service manager at %s did not take %s: %s", address, lines[0], error)
            return False
    return True


def watchdog_seconds() -> float | None:
    """How often the manager wants to hear from us (half of its limit), or None."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2_000_000 if usec.isdigit() else None
