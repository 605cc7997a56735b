"""What workflows and policies take their time with, none of which other callers of the server may feel."""

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import httpx
import pytest
from calls import text_of
from served import Served
from workflow_texts import code, condition, loop, workflow

from belljar.environments import Environment
from waiting import until

pytestmark = pytest.mark.anyio
# A second on a machine that does nothing else; what froze a server kept it for nine at the least.
HEALTH_S = 4.0
TEXTS = {
    "a value for each of many": (
        workflow(
            condition("c", "{{ size(items.map(i, '" + "A" * 9_000 + "')) > 0 }}", []),
            variables={"items": [0] * 20_000},
        ),
        "has no value: it takes more than",
    ),
    "a long sum of long texts": (
        workflow(condition("c", "{{ size(" + "+".join(["v"] * 4_000) + ") > 0 }}", []), variables={"v": "v" * 200_000}),
        "has no value: it takes more than",
    ),
    "magics in long code": (
        workflow(code("c", "\n".join(["!ls", *["1," * 20] * 5] * 300))),
        "so many magics in so long a cell take too long to read",
    ),
}


@pytest.fixture
async def served(default_environment: Environment, tmp_path: Path) -> AsyncGenerator[Served]:
    tmp_path.chmod(0o755)
    served = Served(default_environment, tmp_path, BELLJAR_WORKFLOWS="on", BELLJAR_CHECKPOINTS="0")
    served.start()
    try:
        yield served
    finally:
        await served.aclose()


@pytest.mark.parametrize(("text", "told"), TEXTS.values(), ids=[*TEXTS])
async def test_the_server_answers_others_while_a_step_takes_its_time(served: Served, text: str, told: str):
    answers: list[str] = []

    async def run() -> None:
        async with served.client() as caller:
            answers.append(text_of(await caller.call("run_workflow", definition=text, wait_s=120)))

    async with httpx.AsyncClient(timeout=HEALTH_S) as http, anyio.create_task_group() as tasks:
        tasks.start_soon(run)

        async def is_over() -> bool:
            assert (await http.get(f"{served.url}/health")).status_code == 200
            return bool(answers)

        await until(is_over, limit_s=150)
    assert told in answers[0]


async def test_the_server_answers_others_while_a_loop_has_ten_thousand_empty_rounds(served: Served):
    text = workflow(loop("l", "{{ items }}", [condition("c", "true", [])]), variables={"items": [0] * 10_000})
    async with httpx.AsyncClient(timeout=HEALTH_S) as http, served.client() as caller:
        run = (await caller.call("run_workflow", definition=text, wait_s=0)).structured_content
        assert run is not None

        async def has_come_far() -> bool:
            assert (await http.get(f"{served.url}/health")).status_code == 200
            now = (await caller.call("run_workflow", run_id=run["run"], wait_s=0)).structured_content
            assert now is not None
            return now["left_out"] > 500

        await until(has_come_far)
