"""Makes a whole environment of packages of conda, on the host and as the operator's own; their scripts are not run."""

from collections.abc import Callable
from pathlib import Path

from anyio import to_thread

from belljar.environments.conda_installs import read_answer, write_request
from belljar.environments.ingredients import Ingredients
from belljar.environments.solver import Request
from belljar.environments.uv import check_rattler, run_solver
from belljar.errors import EnvironmentBroken
from belljar.files.removal import remove_tree

WORK = ".conda-"
"""Before the name of an environment: the folder with what is fetched for it, while it is made."""


async def make_prefix(
    root: Path, ingredients: Ingredients, tell: Callable[[str], None], *, lock: int, timeout_s: float
) -> None:
    """Solve and install into a folder that is not there yet; a child holds on to the lock."""
    check_rattler()
    request = Request(
        channels=[*ingredients.channels],
        wanted=[[spec] for spec in ingredients.specs],
        held="",
        own="",
        target=str(root),
        place="",
        python="",
    )
    # By the same name each time: one who was killed has left it, with all that it had fetched.
    work = root.with_name(f"{WORK}{root.name}")
    await to_thread.run_sync(remove_tree, work)
    work.mkdir(mode=0o700)
    await to_thread.run_sync(root.mkdir)
    try:
        told = await run_solver(
            write_request(work, request),
            directory=work,
            target=root,
            timeout_s=timeout_s,
            on_line=tell,
            pass_fds=(lock,),
        )
    finally:
        await to_thread.run_sync(remove_tree, work)
    answer = read_answer(told, len(ingredients.specs))
    # All have one reason where they were solved for together.
    if reasons := dict.fromkeys([*answer.unknown.values(), *answer.refused.values()]):
        raise EnvironmentBroken(
            f"the environment could not be made of packages of conda: {chr(10).join(reasons)}",
            hint="See that its channels can be reached and have the packages; CONDA_CHANNEL_ALIAS leads to a mirror",
        )
