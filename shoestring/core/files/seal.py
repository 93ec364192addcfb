"""Sealed JSON files, which show damage: the first entry is the SHA-256 of all other bytes.

    {
      "sha256": "<64 digits>",
      "job": ...

A file of ours without that entry is damaged; only files that people write and change, such as plans, may have none
(decisions/013). With a key the entry is an HMAC-SHA256, which nobody can make who lacks the key (measure/cache.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re

from shoestring.core.files.untrusted_json import parse_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

KEY = "sha256"
SEALED = re.compile(rb'\{\n  "sha256": "([0-9a-f]{64})",?\n')


class Damaged(ValueError):
    """A file does not have its original content."""


def seal(data: Mapping[str, Any], key: bytes = b"") -> bytes:
    """The bytes of a file that holds `data`."""
    assert KEY not in data, "the seal has this name"
    whole = json.dumps({KEY: "0" * 64} | dict(data), indent=2).encode()
    found = SEALED.match(whole)
    assert found is not None, "the seal comes first"
    return whole[: found.start(1)] + digest_but(whole, found, key).encode() + whole[found.end(1) :]


def digest_but(whole: bytes, found: re.Match[bytes], key: bytes = b"") -> str:
    """The digest of everything but the seal's digits."""
    before = whole[: found.start(1)]
    digest = hmac.new(key, before, "sha256") if key else hashlib.sha256(before)
    digest.update(whole[found.end(1) :])
    return digest.hexdigest()


def unseal(whole: bytes, ours: bool = True, key: bytes = b"") -> tuple[dict[str, Any], bool]:
    """The content of a file, and whether its seal is intact. A file without a seal was written by a person, if it need
    not be `ours`.

    >>> unseal(seal({"steps": 4}))
    ({'steps': 4}, True)
    >>> unseal(seal({"steps": 4}).replace(b": 4", b": 5"))
    Traceback (most recent call last):
    shoestring.core.files.seal.Damaged: its content does not match its SHA-256
    """
    found = SEALED.match(whole)
    if found is not None and not hmac.compare_digest(digest_but(whole, found, key).encode(), found[1]):
        raise Damaged("its content does not match its SHA-256")
    try:
        data = parse_json(whole)
    except ValueError as error:
        raise Damaged(f"it is not JSON that can be read: {str(error)[:80]}") from error
    if not isinstance(data, dict):
        raise Damaged("it is not a JSON object")
    if found is None and (ours or KEY in data):
        raise Damaged("its SHA-256 is missing or not where it was")
    data.pop(KEY, None)
    return data, found is not None
