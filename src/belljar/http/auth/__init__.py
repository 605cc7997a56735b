"""Authentication over HTTP: API keys, OAuth 2.1 bearer tokens, and the principal that sessions belong to.

`verification.py` checks API keys and makes the guard that runs before each request, `tokens.py` verifies bearer tokens
by their issuer's signatures, `principals.py` tells handlers which caller they serve. Keys are stored only as hashes and
tokens are discarded once they are verified, so what handlers can see of a caller holds no credential. Every refusal
looks the same from outside. Knows nothing of binds, paths or sessions.
"""

from belljar.http.auth.principals import current_principal, is_loopback
from belljar.http.auth.tokens import JwtVerifier
from belljar.http.auth.verification import AuthConfig, KeyVerifier, build_auth, check_oauth

__all__ = [
    "AuthConfig",
    "JwtVerifier",
    "KeyVerifier",
    "build_auth",
    "check_oauth",
    "current_principal",
    "is_loopback",
]
