"""What `belljar doctor` says of the session pool: its address, our token, and the role that lets us use it.

Nothing is allocated: the pool is asked for a session that does not exist.
"""

import secrets
from urllib.parse import urlsplit

from belljar.errors import BelljarError
from belljar.kernels.azure.credentials import Credential, open_credential
from belljar.kernels.azure.data_plane import NEWER_VERSIONS, OLDER_VERSIONS
from belljar.kernels.azure.transport import PoolAnswer, PoolTransport, Unanswered, refused
from belljar.sandboxes.base import HostCheck
from belljar.settings import Settings
from belljar.settings.azure import pool_endpoint

ANSWER_S = 20.0
_ADDRESS_HINT = "Check azure_endpoint or AZURE_REGION, and that this machine may connect to it"


async def check_pool(settings: Settings) -> list[HostCheck]:
    """Return a line for each of address, token and role; a line that fails is the last one."""
    endpoint = pool_endpoint(settings)
    host = urlsplit(endpoint).netloc
    if (complaint := await _reach(endpoint)) is not None:
        return [HostCheck("address", False, f"{host} does not answer: {complaint}", _ADDRESS_HINT)]
    address = HostCheck("address", True, f"{host} answers")
    try:
        credential = open_credential(settings)
        await credential.bearer()
    except BelljarError as error:
        return [address, HostCheck("token", False, error.message, error.hint)]
    kind = "a key" if settings.azure_key.get_secret_value() else f"a token for {settings.azure_scope}"
    token = HostCheck("token", True, kind)
    return [address, token, await _check_role(endpoint, credential)]


async def _reach(endpoint: str) -> str | None:
    """Return why the endpoint cannot be reached; None if it answers anything at all."""
    transport = PoolTransport(endpoint, _Nobody(), answer_s=ANSWER_S)
    try:
        await transport.send(
            "GET", "/session", params={"api-version": NEWER_VERSIONS[0], "identifier": "belljar-doctor"}
        )
    except Unanswered as failure:
        return failure.reason
    except BelljarError as error:
        return error.message
    finally:
        await transport.aclose()
    return None


async def _check_role(endpoint: str, credential: Credential) -> HostCheck:
    transport = PoolTransport(endpoint, credential, answer_s=ANSWER_S)
    try:
        answer = PoolAnswer(0, {})
        for version in (*NEWER_VERSIONS, *OLDER_VERSIONS):
            params = {"api-version": version, "identifier": f"belljar-doctor-{secrets.token_hex(8)}"}
            # The older versions have no such route; what they say of the caller comes before that.
            answer = await transport.send_with_retries("GET", "/session", params=params, retry_for_s=ANSWER_S)
            if answer.status != 400:
                break
    except BelljarError as error:
        return HostCheck("role", False, error.message, error.hint)
    finally:
        await transport.aclose()
    if answer.is_ok or answer.status == 404 or answer.status == 400:
        return HostCheck("role", True, "sessions can be used")
    refusal = refused(answer)
    return HostCheck("role", False, refusal.message, refusal.hint)


class _Nobody:
    """A credential that is none, to ask only whether somebody answers."""

    async def bearer(self) -> str:
        return "none"

    def forget(self) -> None:
        pass
