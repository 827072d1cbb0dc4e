"""`fitgpt serve`: listens on this machine, says where, opens a browser there, and ends with Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..config.command_options import ServeOptions
from ..core.errors import SystemFault, UsageError
from ..web.guard import Door

if TYPE_CHECKING:
    from uvicorn import Server

PORTS_TRIED = 20
ANSWER_SECONDS = 40.0   # the longest that one answer may take
PATIENCE_SECONDS = 60.0 # the longest that a connection may go without completing one: longer than any answer
MOST_CONNECTIONS = 256
LONGEST_HEAD = 16 * 1024
_TAKEN = {errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEADDRINUSE", errno.EADDRINUSE)}


def serve(options: ServeOptions) -> int:
    from ..web.serving import make_server  # before anything is said: a missing package is

    listening = listen(options.host, options.port)
    host, port = listening.getsockname()[:2]
    door = Door(port, "" if _is_loopback(host) else secrets.token_urlsafe(18), host)
    with suppress(KeyboardInterrupt):
        address = _announced(options, door)
        if options.browser and _has_screen():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        asyncio.run(_run(make_server, door, options.run, listening))
    return 0


def _announced(options: ServeOptions, door: Door) -> str:
    """The address, once it is said."""
    if options.port and door.port != options.port:
        print(f"Port {options.port} is taken: {door.port} it is.")
    address = address_of(door)
    print(f"The planner is at {address}\nCtrl-C ends it.", flush=True)
    if door.token:
        print("Whoever has this address can open it, and it goes over the network in plain text. Safer: fitgpt serve "
              f"without --host, and from elsewhere\n  ssh -L {door.port}:127.0.0.1:{door.port} THIS_MACHINE",
              flush=True)
    return address


async def _run(make_server: Any, door: Door, run: str, listening: socket.socket) -> None:
    from ..web.lanes import Lanes

    lanes = Lanes(ANSWER_SECONDS, run)
    server: Server = make_server(door, lanes, connections=MOST_CONNECTIONS, head=LONGEST_HEAD,
                                 patience=PATIENCE_SECONDS)
    warming = asyncio.ensure_future(lanes.warm())
    try:
        await server.serve(sockets=[listening])
    finally:
        warming.cancel()
        await lanes.close()


def listen(host: str, port: int) -> socket.socket:
    """The port asked for, or one of the next few if it is taken; 0 is any that is free."""
    last = min(port + PORTS_TRIED, 65536) if port else 1
    for candidate in range(port, last):
        try:
            return _bound(host, candidate)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise SystemFault(f"Cannot listen on {host}, port {candidate}: {error.strerror}.",
                                  "fitgpt serve listens on 127.0.0.1, which every machine has.") from error
    raise UsageError(f"Ports {port} to {last - 1} are all taken.", "fitgpt serve --port=0 takes any that is free.")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    # Connections inherit it. Else an answer's body waits until its headers are acknowledged: 40 ms. (asyncio sets it
    # by itself only on sockets made with the protocol's name.)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if os.name == "posix":  # a port that was ours a minute ago is free; on Windows this would share it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1" if host == "localhost" else host, port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def address_of(door: Door) -> str:
    """One that can be opened: 0.0.0.0 is every address of this machine, and its name is one of them."""
    name = socket.gethostname() if ipaddress.ip_address(door.host).is_unspecified else door.name
    return f"http://{name}:{door.port}/" + (f"?token={door.token}" if door.token else "")


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _has_screen() -> bool:
    """Where there is none, a browser would open in the terminal, or fail with words of its own."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
