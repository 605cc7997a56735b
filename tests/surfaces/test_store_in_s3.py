"""Sessions in a bucket of S3: moto answers as S3 does, and obstore asks it."""

import asyncio
import urllib.request
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from test_stored_sessions import LOOK, MAKE, put, server, stored

from belljar.environments import Environment
from belljar.errors import TooLarge
from belljar.sessions.store import ObjectMissing, StoreFailed, open_store
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def bucket() -> Generator[str]:
    """The URL of a bucket; the variables are those that S3's own tools read."""
    # Imported here, because it takes a second.
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name, value in {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
            patch.setenv(f"AWS_{name}", value)
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        yield "s3://bucket/belljar"
        server.stop()


async def test_a_session_moves_through_a_bucket_and_back(
    default_environment: Environment, tmp_path: Path, bucket: str
) -> None:
    async with AsyncExitStack() as stack:
        opened = [server(default_environment, tmp_path / name, bucket) for name in ("one", "two")]
        (one, caller), (other, elsewhere) = [await stack.enter_async_context(each) for each in opened]
        made = await caller.execute(MAKE + "\nimport os\nnoise = os.urandom(12_000_000)")
        await put(one)
        results = await asyncio.gather(*(each.execute(LOOK, made.session_id) for each in (caller, elsewhere)))
        assert sorted(result.status for result in results) == ["ok", "rejected"]
        winner, loser = (caller, elsewhere) if results[0].status == "ok" else (elsewhere, caller)
        await winner.execute("numbers.append(100)", made.session_id)
        await put(one if winner is caller else other)
        woken = await loser.execute("(double(), len(noise))", made.session_id)
        assert woken.result == "(290, 12000000)"
        await loser.call("clear_session", session_id=made.session_id)
        at_loser = stored(other if loser is elsewhere else one)
        await until(lambda: not any(at_loser.waiting().values()))
        await at_loser.settle()
        assert [each.name[-5:] for each in at_loser.store.list(f"sessions/{made.session_id}")] == ["owner"]
        assert (await winner.execute(LOOK, made.session_id)).status == "rejected"


def test_an_upload_that_breaks_off_leaves_no_object_and_other_failures_say_what_is_wrong(bucket: str) -> None:
    store = open_store(bucket)

    def breaks_off() -> Generator[bytes]:
        yield bytes(12 * 1024 * 1024)
        raise TooLarge("it is too large")

    with pytest.raises(TooLarge):
        store.put("sessions/a/1.bundle", breaks_off())
    assert store.list("sessions/a") == []
    with pytest.raises(ObjectMissing):
        [*store.read("sessions/a/1.bundle", 100)]
    store.put("sessions/a/2.bundle", [bytes(200)])
    with pytest.raises(StoreFailed, match="at most 100 are read"):
        [*store.read("sessions/a/2.bundle", 100)]
    store.delete(["sessions/a/2.bundle", "sessions/a/none"])
    with pytest.raises(StoreFailed, match=r"cannot be used|no such object"):
        open_store("s3://no-such-bucket/x").put_new("name", b"")
