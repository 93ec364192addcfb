"""Access control of our servers: pure functions of a request's headers.

A foreign page can make the browser send requests to this server under the foreign page's own name (DNS rebinding), so
the Host header must name this server. Beyond this machine a token is needed too: once in the address, then kept as a
cookie.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64encode
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import parse_qs

LOCAL = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("", "0.0.0.0", "::")


def hash_of(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def headers(style: str, script: str) -> dict[str, str]:
    """Headers of every answer: a page may use this style and this script, call its own server, and nothing else."""
    return {
        "Content-Security-Policy": f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("")
    (True, True, False, False)
    """
    return host in LOCAL or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::[0-9]*)?")


def asked_host(header: str) -> str:
    """The name in a Host header; empty if it is anything but a name with an optional port.

    >>> asked_host("localhost:8000"), asked_host("[::1]:8000"), asked_host("EXAMPLE.com"), asked_host("[::1].example.com")
    ('localhost', '::1', 'example.com', '')
    """
    found = HOST.fullmatch(header.strip().lower())
    return (found[1] or found[2]) if found else ""


def is_own_host(header: str, bound: str, machine: str) -> bool:
    """Whether a Host header names this server. If it is bound to all addresses, any address and the machine's name are
    accepted.

    An address in the header is safe: rebinding needs a name.

    >>> is_own_host("127.0.0.1:80", "127.0.0.1", "box"), is_own_host("evil.example:80", "127.0.0.1", "box")
    (True, False)
    >>> is_own_host("192.168.0.7:80", "0.0.0.0", "box"), is_own_host("192.168.0.7:80", "127.0.0.1", "box")
    (True, False)
    """
    host = asked_host(header)
    if host in LOCAL or (host and host == bound.lower()):
        return True
    return bound in WILDCARDS and (is_address(host) or host == machine.lower())


def has_token(token: str, query: str, cookies: str, cookie: str) -> bool:
    """Whether the query or the cookie has the token.

    >>> has_token("s3", "token=s3", "", "c"), has_token("s3", "", "a=b; c=s3", "c"), has_token("s3", "token=", "c=no", "c")
    (True, True, False)
    """
    pairs = (part.strip().partition("=") for part in cookies.split(";"))
    given = [*parse_qs(query).get("token", ()), *(value for name, _, value in pairs if name == cookie)]
    return any(hmac.compare_digest(token.encode(), one.encode(errors="replace")) for one in given)
