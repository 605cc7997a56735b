"""Reads the certificates of public authorities once, and not for every HTTP client of the tests.

A client reads them all when it is made, even if it speaks to this machine without TLS: a tenth of a second of a
processor. `with_shared_certificates` gives all clients that name no authorities of their own one context. A test that
sets `SSL_CERT_FILE` or `SSL_CERT_DIR` has another.
"""

import os
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx._transports.default as httpx_transports
import httpx2._transports.default as httpx2_transports
import pytest


@contextmanager
def with_shared_certificates() -> Generator[None]:
    """Share contexts among the clients of httpx and httpx2 in this process, until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        for transports in (httpx_transports, httpx2_transports):
            name = "create_ssl_context"
            patch.setattr(transports, name, _sharing(getattr(transports, name)))
        yield


def _sharing(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    made: dict[tuple[object, ...], ssl.SSLContext] = {}

    def create_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return create(verify=verify, cert=cert, trust_env=trust_env)
        key = (trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        if key not in made:
            made[key] = create(verify=verify, cert=cert, trust_env=trust_env)
        return made[key]

    return create_once
