"""Which requests are answered: those of the page itself, from this machine or with the token.

Any web page can make a browser send requests to 127.0.0.1, and DNS rebinding can point a foreign name there. So the
Host must be ours, and an Origin, if there is one, must equal it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import NamedTuple

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class ServerAddress(NamedTuple):
    """Where the server listens. `token` is empty if only this machine can reach it, else every request needs it."""

    port: int
    token: str = ""
    host: str = "127.0.0.1"

    @property
    def name(self) -> str:
        """The host as it is written in a URL."""
        return f"[{ip_address(self.host).compressed}]" if ":" in self.host else self.host

    @property
    def cookie(self) -> str:
        """With the port in its name: browsers send a cookie to every port of a host."""
        return f"fitgpt-{self.port}"


class Rejection(NamedTuple):
    """The HTTP status and text for a request that is not answered."""

    status: int
    what: str
    fix: str = ""


def check_source(address: ServerAddress, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Rejection | None:
    """Why a request's Host or Origin is not accepted; None if both are. `has_token` checks the token."""
    hosts = _values(headers, b"host")
    if len(hosts) != 1 or not (parts := _HOST.fullmatch(hosts[0])):
        return Rejection(400, "A request must have exactly one valid Host header.")
    url = f"http://{address.name}:{address.port}"
    if not address.token and (
            parts[1].lower() not in (*LOOPBACK_NAMES, address.name) or int(parts[2] or 80) != address.port):
        return Rejection(421, f"This server is {url}, but the request is for {hosts[0]!r}.", f"{url}/")
    if any(origin != f"http://{hosts[0]}" for origin in _values(headers, b"origin")):
        return Rejection(403, "Requests from pages of other sites are not answered.")
    sites = _values(headers, b"sec-fetch-site")
    if path != "/" and any(site not in ("same-origin", "none") for site in sites):
        return Rejection(403, "Requests from pages of other sites are not answered.")
    return None


def has_token(address: ServerAddress, headers: Sequence[tuple[bytes, bytes]], given: str = "") -> bool:
    """Whether the token is right, from the URL (`given`) or from the cookie that this URL sets."""
    if not address.token or _equal(given, address.token):
        return True
    try:
        cookies = SimpleCookie("; ".join(_values(headers, b"cookie")))
    except CookieError:
        return False
    return address.cookie in cookies and _equal(cookies[address.cookie].value, address.token)


def _equal(given: str, token: str) -> bool:
    """In constant time, so that timing does not reveal how many characters are right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]
