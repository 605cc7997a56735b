import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from belljar.errors import SettingsError
from belljar.http.auth import AuthConfig, JwtVerifier, KeyVerifier, build_auth, current_principal
from belljar.settings import Settings, hash_key

KEY = "k" * 40
OTHER_KEY = "o" * 40
AUDIENCE = "https://belljar.example/mcp"


@pytest.fixture(autouse=True)
def only_our_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


class Issuer:
    """An authorization server as far as we see one: documents at paths, and keys to sign with."""

    def __init__(self, url: str, documents: dict[str, object], requests: list[str]) -> None:
        self.url = url
        self.documents = documents
        self.requests = requests
        self.jwks_url = f"{url}/keys"

    def publish(self, **keys: Any) -> None:
        self.documents["/keys"] = {"keys": [public_jwk(key, kid) for kid, key in keys.items()]}

    def verifier(self, *, refetch_interval_s: float = 0, **options: Any) -> JwtVerifier:
        options = {"issuer": self.url, "audience": AUDIENCE, "jwks_url": self.jwks_url, **options}
        return JwtVerifier(refetch_interval_s=refetch_interval_s, **options)

    def claims(self, **changes: object) -> dict[str, object]:
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 600, **changes}
        return {name: value for name, value in claims.items() if value is not None}


def public_jwk(key: Any, kid: str) -> dict[str, Any]:
    algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
    jwk = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**jwk, "kid": kid, "use": "sig", "alg": algorithm}


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    documents: dict[str, object] = {}
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            found = self.path in documents
            body = json.dumps(documents.get(self.path)).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Issuer(f"http://127.0.0.1:{server.server_port}", documents, requests)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def old_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def signed(claims: dict[str, object], key: Any, kid: str | None = "old", algorithm: str = "RS256") -> str:
    return jwt.encode(claims, key, algorithm, headers={"kid": kid} if kid else None)


def unsafely_signed(claims: dict[str, object], algorithm: str, secret: bytes) -> str:
    """A token PyJWT itself refuses to make."""

    def part(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    header = json.dumps({"alg": algorithm, "typ": "JWT", "kid": "old"}).encode()
    signing_input = part(header) + b"." + part(json.dumps(claims).encode())
    signature = hmac.new(secret, signing_input, hashlib.sha256).digest() if algorithm == "HS256" else b""
    return (signing_input + b"." + part(signature)).decode()


# Keys


def keys(*entries: str, **options: Any) -> KeyVerifier:
    return KeyVerifier([SecretStr(entry) for entry in entries], **options)


@pytest.mark.anyio
async def test_a_key_stands_for_its_name_however_it_is_written() -> None:
    verifier = keys(KEY, f"bob:{OTHER_KEY}", f"carol:sha256:{hash_key('c' * 40).upper()}")

    names = []
    for key in (KEY, OTHER_KEY, "c" * 40):
        token = await verifier.verify_token(key)
        assert token is not None
        names.append(token.subject)

    assert names[1:] == ["bob", "carol"]
    assert names[0] is not None
    assert names[0].startswith(f"key-{hash_key(KEY)[:8]}")


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", ["", "k" * 39, "K" * 40, f"bob:{OTHER_KEY}", hash_key(OTHER_KEY), "é" * 40])
async def test_anything_but_a_key_is_refused(wrong: str) -> None:
    assert await keys(KEY, f"bob:sha256:{hash_key(OTHER_KEY)}").verify_token(wrong) is None


@pytest.mark.anyio
async def test_two_keys_of_one_name_are_one_principal_so_keys_can_be_rotated() -> None:
    verifier = keys(f"bob:{KEY}", f"bob:{OTHER_KEY}")

    assert await verifier.verify_token(KEY) == await verifier.verify_token(OTHER_KEY)


@pytest.mark.anyio
async def test_neither_the_verifier_nor_its_answer_holds_a_key() -> None:
    secret = "very-secret-0123456789"
    verifier = keys(f"bob:{secret}")
    token = await verifier.verify_token(secret)
    assert token is not None

    assert secret not in token.model_dump_json()
    assert secret not in repr(vars(verifier))


@pytest.mark.parametrize(
    ("entry", "fact"),
    [
        ("", "0 characters"),
        ("short", "5 characters"),
        ("bob:short", "5 characters"),
        ("bob:", "no key"),
        ("bob:sha256:beef", "64 hexadecimal"),
        (f"sha256:{hash_key(KEY)}", "no name"),
        (f"b b:{KEY}", "no name"),
        ("k" * 20 + " " + "k" * 20, "no HTTP header can carry"),
        ("ключ" * 8, "no HTTP header can carry"),
    ],
)
def test_an_unusable_key_is_refused_at_start_without_showing_it(entry: str, fact: str) -> None:
    with pytest.raises(SettingsError, match=fact) as raised:
        keys(KEY, entry)

    assert "API key 2" in raised.value.message
    assert "belljar key" in raised.value.hint
    secret = entry.rpartition(":")[2]
    assert not secret or secret not in str(raised.value)


def test_one_key_under_two_names_is_refused() -> None:
    with pytest.raises(SettingsError, match="another name"):
        keys(f"bob:{KEY}", f"carol:{KEY}")


# Tokens


@pytest.mark.anyio
async def test_a_good_token_names_its_subject_issuer_scopes_and_resource(
    issuer: Issuer, old_key: rsa.RSAPrivateKey
) -> None:
    issuer.publish(old=old_key)
    claims = issuer.claims(scope="run read", azp="app", aud=["https://elsewhere.example", AUDIENCE])

    token = await issuer.verifier().verify_token(signed(claims, old_key))

    assert token is not None
    assert token.model_dump() == {
        "token": "withheld",
        "client_id": "app",
        "scopes": ["run", "read"],
        "expires_at": claims["exp"],
        "resource": AUDIENCE,
        "subject": "ada",
        "claims": {"iss": issuer.url},
    }


@pytest.mark.anyio
async def test_scopes_may_come_as_a_list_and_a_key_may_be_elliptic_or_nameless(issuer: Issuer) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer.publish(only=key)

    token = await issuer.verifier().verify_token(signed(issuer.claims(scp=["run", 7]), key, None, "ES256"))

    assert token is not None
    assert token.scopes == ["run"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1},
        {"exp": None},
        {"aud": "https://elsewhere.example"},
        {"aud": None},
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
        {"nbf": 4102444800},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
async def test_a_token_with_a_wrong_or_missing_claim_is_refused(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, changes: dict[str, object]
) -> None:
    issuer.publish(old=old_key)
    claims = issuer.claims(**changes)
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    header = signed(issuer.claims(), old_key).split(".")[0]
    # PyJWT will not encode some of these claims, so the signature is made over the bare parts.
    signature = old_key.sign(f"{header}.{payload}".encode(), padding.PKCS1v15(), hashes.SHA256())
    token = f"{header}.{payload}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"

    assert await issuer.verifier().verify_token(token) is None
    assert await issuer.verifier().verify_token(signed(issuer.claims(), old_key)) is not None


@pytest.mark.anyio
async def test_a_token_signed_by_another_key_is_refused(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, new_key: rsa.RSAPrivateKey
) -> None:
    issuer.publish(old=old_key)

    assert await issuer.verifier().verify_token(signed(issuer.claims(), new_key, "old")) is None


@pytest.mark.anyio
async def test_unsigned_tokens_and_public_keys_used_as_secrets_are_refused(
    issuer: Issuer, old_key: rsa.RSAPrivateKey
) -> None:
    issuer.publish(old=old_key)
    public = old_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    verifier = issuer.verifier()

    assert await verifier.verify_token(unsafely_signed(issuer.claims(), "none", b"")) is None
    assert await verifier.verify_token(unsafely_signed(issuer.claims(), "HS256", public)) is None


@pytest.mark.anyio
async def test_a_symmetric_key_in_the_key_set_is_not_used(issuer: Issuer) -> None:
    secret = b"s" * 64
    encoded = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    issuer.documents["/keys"] = {"keys": [{"kty": "oct", "k": encoded, "kid": "old", "alg": "HS256"}]}

    assert await issuer.verifier().verify_token(unsafely_signed(issuer.claims(), "HS256", secret)) is None


@pytest.mark.anyio
@pytest.mark.parametrize("junk", ["", "x", "a.b.c", "é.é.é", "....", "W1tb" * 10_000 + ".e30.e30"])
async def test_what_is_no_token_is_refused_without_asking_the_issuer(issuer: Issuer, junk: str) -> None:
    assert await issuer.verifier().verify_token(junk) is None
    assert issuer.requests == []


@pytest.mark.anyio
async def test_an_unknown_key_id_is_refused_and_fetches_once_for_many(
    issuer: Issuer, old_key: rsa.RSAPrivateKey
) -> None:
    issuer.publish(old=old_key)
    verifier = issuer.verifier(refetch_interval_s=3600)

    for number in range(5):
        assert await verifier.verify_token(signed(issuer.claims(), old_key, f"invented-{number}")) is None

    assert issuer.requests == ["/keys"]
    assert await verifier.verify_token(signed(issuer.claims(), old_key)) is not None


@pytest.mark.anyio
async def test_a_rotated_key_is_found_by_one_more_fetch_and_the_old_one_is_dropped(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, new_key: rsa.RSAPrivateKey
) -> None:
    issuer.publish(old=old_key)
    verifier = issuer.verifier()
    assert await verifier.verify_token(signed(issuer.claims(), old_key)) is not None

    issuer.publish(new=new_key)

    assert await verifier.verify_token(signed(issuer.claims(), new_key, "new")) is not None
    assert issuer.requests == ["/keys", "/keys"]
    assert await verifier.verify_token(signed(issuer.claims(), old_key, "old")) is None


@pytest.mark.anyio
async def test_known_keys_go_on_working_while_the_issuer_is_out_of_order(
    issuer: Issuer, old_key: rsa.RSAPrivateKey
) -> None:
    issuer.publish(old=old_key)
    verifier = issuer.verifier()
    assert await verifier.verify_token(signed(issuer.claims(), old_key)) is not None

    issuer.documents["/keys"] = ["not a key set"]

    assert await verifier.verify_token(signed(issuer.claims(), old_key, "other")) is None
    assert await verifier.verify_token(signed(issuer.claims(), old_key)) is not None


@pytest.mark.anyio
@pytest.mark.parametrize(
    "place",
    [
        "/.well-known/oauth-authorization-server/tenant",
        "/.well-known/openid-configuration/tenant",
        "/tenant/.well-known/openid-configuration",
    ],
)
async def test_keys_are_found_through_the_issuers_metadata(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, place: str
) -> None:
    issuer.publish(old=old_key)
    tenant = f"{issuer.url}/tenant"
    issuer.documents[place] = {"issuer": tenant, "jwks_uri": issuer.jwks_url}
    token = signed(issuer.claims(iss=tenant), old_key)

    assert await issuer.verifier(issuer=tenant, jwks_url=None).verify_token(token) is not None


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", ["issuer", "jwks_uri"])
async def test_metadata_of_another_issuer_or_with_keys_over_plain_http_is_not_used(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, wrong: str
) -> None:
    issuer.publish(old=old_key)
    document = {"issuer": issuer.url, "jwks_uri": issuer.jwks_url}
    # Reaches the same server, but not by an address that only this machine has.
    document[wrong] = document[wrong].replace("127.0.0.1", "0.0.0.0")
    issuer.documents["/.well-known/oauth-authorization-server"] = document

    assert await issuer.verifier(jwks_url=None).verify_token(signed(issuer.claims(), old_key)) is None
    assert "/keys" not in issuer.requests


# Both, in front of an app


async def whoami(_: Request) -> PlainTextResponse:
    return PlainTextResponse(current_principal())


def client_of(auth: AuthConfig) -> httpx.AsyncClient:
    inner = Starlette(routes=[Route("/mcp", whoami)])
    app = Starlette(routes=[Route("/mcp", auth.require_credentials(inner)), *auth.metadata_routes()])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://belljar.test")


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def oauth(issuer: Issuer) -> Callable[..., AuthConfig]:
    def build(**settings: Any) -> AuthConfig:
        values = {"oauth_issuer": issuer.url, "oauth_jwks_url": issuer.jwks_url, "oauth_audience": AUDIENCE}
        auth = build_auth(Settings(**{**values, **settings}))
        assert auth is not None
        return auth

    return build


def test_without_credentials_there_is_no_auth_and_everyone_is_local() -> None:
    assert build_auth(Settings()) is None
    assert current_principal() == "local"


@pytest.mark.anyio
async def test_refusals_are_alike_whatever_was_sent() -> None:
    auth = build_auth(Settings(api_keys=[SecretStr(f"bob:{KEY}")]))
    assert auth is not None
    attempts = [{}, bearer("wrong" * 8), bearer(KEY[:-1]), bearer(""), {"authorization": f"Basic {KEY}"}]
    async with client_of(auth) as client:
        answers = [await client.get("/mcp", headers=headers) for headers in attempts]
        in_query = await client.get("/mcp", params={"access_token": KEY, "authorization": f"Bearer {KEY}"})

        assert {answer.status_code for answer in [*answers, in_query]} == {401}
        assert len({(answer.content, tuple(answer.headers.multi_items())) for answer in [*answers, in_query]}) == 1
        assert (await client.get("/mcp", headers=bearer(KEY))).text == "key:bob"


@pytest.mark.anyio
async def test_keys_alone_publish_no_oauth_metadata() -> None:
    auth = build_auth(Settings(api_keys=[SecretStr(KEY)]))
    assert auth is not None

    assert auth.metadata_routes() == []
    async with client_of(auth) as client:
        assert "resource_metadata" not in (await client.get("/mcp")).headers["www-authenticate"]


@pytest.mark.anyio
async def test_a_key_and_a_token_of_the_same_name_are_two_principals(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, oauth: Callable[..., AuthConfig]
) -> None:
    issuer.publish(old=old_key)
    auth = oauth(api_keys=[SecretStr(f"ada:{KEY}")], oauth_scopes=["run"])
    async with client_of(auth) as client:
        by_key = await client.get("/mcp", headers=bearer(KEY))
        by_token = await client.get("/mcp", headers=bearer(signed(issuer.claims(scope="run"), old_key)))

    assert (by_key.text, by_token.text) == ("key:ada", f"jwt:{issuer.url}#ada")


@pytest.mark.anyio
async def test_a_client_learns_where_to_get_a_token_and_which_scopes_to_ask_for(
    issuer: Issuer, oauth: Callable[..., AuthConfig]
) -> None:
    async with client_of(oauth(oauth_scopes=["run", "read"])) as client:
        challenge = (await client.get("/mcp")).headers["www-authenticate"]
        metadata = (await client.get("/.well-known/oauth-protected-resource/mcp")).json()

    assert 'resource_metadata="https://belljar.example/.well-known/oauth-protected-resource/mcp"' in challenge
    assert 'scope="run read"' in challenge
    assert metadata["resource"] == AUDIENCE
    assert metadata["authorization_servers"] == [issuer.url]
    assert metadata["scopes_supported"] == ["run", "read"]


@pytest.mark.anyio
async def test_a_token_without_the_scopes_is_told_so(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, oauth: Callable[..., AuthConfig]
) -> None:
    issuer.publish(old=old_key)
    async with client_of(oauth(oauth_scopes=["run"])) as client:
        answer = await client.get("/mcp", headers=bearer(signed(issuer.claims(scope="read"), old_key)))

    assert answer.status_code == 403
    assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]
    assert 'scope="run"' in answer.headers["www-authenticate"]


@pytest.mark.anyio
async def test_a_token_that_expired_a_second_ago_is_refused(
    issuer: Issuer, old_key: rsa.RSAPrivateKey, oauth: Callable[..., AuthConfig]
) -> None:
    issuer.publish(old=old_key)
    async with client_of(oauth()) as client:
        late = issuer.claims(exp=int(time.time()) - 1)
        assert (await client.get("/mcp", headers=bearer(signed(late, old_key)))).status_code == 401
        ahead = issuer.claims(iat=int(time.time()) + 10)
        assert (await client.get("/mcp", headers=bearer(signed(ahead, old_key)))).status_code == 200


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"oauth_issuer": "https://as.example"}, "BELLJAR_OAUTH_AUDIENCE"),
        ({"oauth_audience": AUDIENCE}, "BELLJAR_OAUTH_ISSUER"),
        ({"oauth_jwks_url": "https://as.example/keys"}, "BELLJAR_OAUTH_ISSUER and BELLJAR_OAUTH_AUDIENCE"),
        ({"oauth_scopes": ["run"]}, "BELLJAR_OAUTH_ISSUER and BELLJAR_OAUTH_AUDIENCE"),
        ({"oauth_issuer": "http://as.example", "oauth_audience": AUDIENCE}, "BELLJAR_OAUTH_ISSUER"),
        ({"oauth_issuer": "https://as.example", "oauth_audience": "api://belljar"}, "BELLJAR_OAUTH_AUDIENCE"),
    ],
)
def test_oauth_in_part_or_without_https_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        build_auth(Settings(**given, api_keys=[SecretStr(KEY)]))
