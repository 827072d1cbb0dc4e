"""`fitgpt serve`: listens, prints the address, opens a browser there, and runs the server until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from contextlib import suppress
from typing import TYPE_CHECKING

from ..config.command_options import ServeOptions
from ..core.errors import SystemFault, UsageError
from ..runs.watch import named_run

if TYPE_CHECKING:
    from ..web.app import ServerAddress

PORTS_TRIED = 20
_TAKEN = {errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEADDRINUSE", errno.EADDRINUSE)}


def serve(options: ServeOptions) -> int:
    # First: a missing package must be reported before an address is printed.
    from ..web.app import ServerAddress, run_server

    if options.run:
        named_run(options.run, "fitgpt serve, without RUN, shows the newest run in this folder or in runs/")
    listening = listen(options.host, options.port)
    host, port = listening.getsockname()[:2]
    address = ServerAddress(port, "" if ipaddress.ip_address(host).is_loopback else secrets.token_urlsafe(18), host)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers, too, as Ctrl-C does
    with suppress(KeyboardInterrupt):
        if options.port and address.port != options.port:
            print(f"Port {options.port} is in use; using {address.port}.")
        print(f"The planner is at {url_of(address)}\nCtrl-C stops it.", flush=True)
        if address.token:
            print("Anyone with this address can open the page, and the connection is not encrypted. Safer: fitgpt "
                  "serve without --host, and on the other machine\n"
                  f"  ssh -L {address.port}:127.0.0.1:{address.port} THIS_MACHINE", flush=True)
        if options.browser and _has_screen():
            threading.Thread(target=webbrowser.open, args=(url_of(address),), daemon=True).start()
        asyncio.run(run_server(address, listening, options.run))
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A socket on the port, or on one of the next few if it is in use; 0 takes any free port."""
    last = min(port + PORTS_TRIED, 65536) if port else 1
    for candidate in range(port, last):
        # With the protocol named, asyncio sets TCP_NODELAY on connections. Without it a response takes 40 ms more.
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # reuse a port that was closed a minute ago; on Windows it would share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1" if host == "localhost" else host, candidate))
            sock.listen(128)
            return sock
        except OSError as error:
            sock.close()
            if error.errno not in _TAKEN:
                raise SystemFault(f"Cannot listen on {host}, port {candidate}: {error.strerror}.",
                                  "Without --host, fitgpt serve listens on 127.0.0.1, which every machine has.",
                                  ) from error
    raise UsageError(f"Ports {port} to {last - 1} are all in use.", "fitgpt serve --port=0 takes any free port.")


def url_of(address: ServerAddress) -> str:
    """A URL that can be opened, with the token. 0.0.0.0 is every address of this machine: its host name is used."""
    name = socket.gethostname() if ipaddress.ip_address(address.host).is_unspecified else address.name
    return f"http://{name}:{address.port}/" + (f"?token={address.token}" if address.token else "")


def _has_screen() -> bool:
    """Whether a browser can open a window. Without one it would open in the terminal, or print an error."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
