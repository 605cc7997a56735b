"""Who is calling over HTTP: API keys, OAuth 2.1 bearer tokens, and the principal that sessions belong to.

`keys.py` and `tokens.py` say whose a credential is (`issuers.py`: by whose signatures), `guarding.py` asks them before
each request, `principals.py` tells handlers whom they serve. A key is known by its hash only, a token is verified and
then forgotten: what handlers can see of a caller holds no credential. Every refusal looks the same from outside. Knows
nothing of binds, paths or sessions.
"""

from belljar.surfaces.auth.principals import LOCAL_PRINCIPAL, current_principal, is_loopback
from belljar.surfaces.auth.tokens import JwtVerifier
from belljar.surfaces.auth.verification import AuthConfig, KeyVerifier, build_auth, check_oauth

__all__ = [
    "LOCAL_PRINCIPAL",
    "AuthConfig",
    "JwtVerifier",
    "KeyVerifier",
    "build_auth",
    "check_oauth",
    "current_principal",
    "is_loopback",
]
