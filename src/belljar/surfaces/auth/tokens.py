"""OAuth 2.1 bearer tokens: verified against their issuer's keys, and then forgotten."""

import logging
from collections.abc import Mapping
from typing import Any, Final, cast

from mcp.server.auth.provider import AccessToken, TokenVerifier

from belljar.surfaces.auth.issuers import REFETCH_INTERVAL_S, IssuerKeys
from belljar.surfaces.auth.principals import WITHHELD

logger = logging.getLogger(__name__)

_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_CLOCK_SKEW_S: Final = 30


class JwtVerifier(TokenVerifier):
    """Accepts tokens that the issuer signed for this server (OAuth 2.1 resource server, RFC 9068 and 8707)."""

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        jwks_url: str | None = None,
        refetch_interval_s: float = REFETCH_INTERVAL_S,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = IssuerKeys(issuer, jwks_url, refetch_interval_s=refetch_interval_s)

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return what the token grants; None for any other token, whatever is wrong with it."""
        # 90 ms of import that a server with keys alone, or on stdio, never needs.
        import jwt

        try:
            claims = await self._verified_claims(token)
        except jwt.PyJWTError as error:
            logger.info("Refused a bearer token: %s", type(error).__name__)
            return None
        if not claims or not claims["sub"]:
            return None
        return AccessToken(
            token=WITHHELD,
            client_id=str(claims.get("client_id") or claims.get("azp") or claims["sub"]),
            subject=claims["sub"],
            scopes=_scopes(claims),
            expires_at=int(claims["exp"]),
            resource=self._audience,
            claims={"iss": self._issuer},
        )

    async def _verified_claims(self, token: str) -> dict[str, Any] | None:
        import jwt

        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in _ALGORITHMS:
            return None
        key = await self._keys.find(header.get("kid"))
        if key is None or key.get("alg", algorithm) != algorithm:
            return None
        # Clients spell a resource without a path both ways, and the SDK compares the two as equal.
        audience = self._audience.rstrip("/")
        return jwt.decode(
            token,
            jwt.PyJWK(key, algorithm),
            algorithms=_ALGORITHMS,
            audience=[audience, f"{audience}/"],
            issuer=self._issuer,
            # For tokens dated ahead of our clock; past `exp` the SDK's middleware gives no leeway.
            leeway=_CLOCK_SKEW_S,
            options={"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
        )


def _scopes(claims: Mapping[str, Any]) -> list[str]:
    granted: object = claims.get("scope") or claims.get("scp")
    if isinstance(granted, str):
        return granted.split()
    if isinstance(granted, list):
        return [scope for scope in cast("list[object]", granted) if isinstance(scope, str)]
    return []
