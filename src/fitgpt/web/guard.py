"""Whose requests are answered: those that come from this page, on this machine, or with the token.

A web page from anywhere can make a browser send requests to 127.0.0.1, and a name of a stranger's can be made to lead
there: so the Host must be ours, and an Origin, where there is one, the same.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import NamedTuple

# What a browser may call an address that only this machine reaches, besides that address itself.
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
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


class Refusal(NamedTuple):
    status: int
    what: str
    fix: str = ""


class Door(NamedTuple):
    """Where the server listens, and the token that opens it to others; empty: only this machine can reach it."""

    port: int
    token: str = ""
    host: str = "127.0.0.1"

    @property
    def name(self) -> str:
        """As it stands in an address."""
        return f"[{ip_address(self.host).compressed}]" if ":" in self.host else self.host

    @property
    def cookie(self) -> str:
        return f"fitgpt-{self.port}"  # cookies know no ports: two servers would share one


def refusal(door: Door, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    """Why a request is not answered; None: it is. The token itself is looked at by `has_token`."""
    hosts = _all(headers, b"host")
    if len(hosts) != 1 or not (named := _HOST.fullmatch(hosts[0])):
        return Refusal(400, "A request names one host, and this one does not.")
    if not door.token and (named[1].lower() not in (*OWN_NAMES, door.name) or int(named[2] or 80) != door.port):
        return Refusal(421, f"This server is http://{door.name}:{door.port}, and was asked as {hosts[0]!r}.",
                       f"http://{door.name}:{door.port}/")
    origins, sites = _all(headers, b"origin"), _all(headers, b"sec-fetch-site")
    if any(origin != f"http://{hosts[0]}" for origin in origins):
        return Refusal(403, "Another site's page asked for this.")
    if path != "/" and any(site not in ("same-origin", "none") for site in sites):
        return Refusal(403, "Another site's page asked for this.")
    return None


def has_token(door: Door, headers: Sequence[tuple[bytes, bytes]], given: str = "") -> bool:
    """By the cookie that the address with the token sets, or by that address itself."""
    if not door.token or same(given, door.token):
        return True
    try:
        cookies = SimpleCookie("; ".join(_all(headers, b"cookie")))
    except CookieError:
        return False
    return door.cookie in cookies and same(cookies[door.cookie].value, door.token)


def same(given: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _all(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]
