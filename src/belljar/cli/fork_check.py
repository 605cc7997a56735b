"""Whether sessions start as forks here: tried with the configured sandbox and environment, and timed.

Makes a process that everything is imported in, forks one session from it, and asks that session what it finds. Changes
nothing: an environment that is not there yet is not made for it.
"""

import asyncio
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.errors import BelljarError
from belljar.sandboxes.base import Branching, Check, Provider

if TYPE_CHECKING:
    from belljar.kernels.base import Kernel
    from belljar.kernels.starting import KernelStarter
    from belljar.settings import Settings

_NAME = "sessions"
_COLD = "they start cold, which takes about half a second and the imports of each"
_PRELOAD_HINT = "Take what does not import out of preload, or install it into the environment"
_WARM_HINT = "See whether it does with fewer modules in preload"
_ASK = "import sys; print(*[name for name in {names!r} if name not in sys.modules], sep='\\n')"


def check_forks(settings: "Settings", provider: Provider) -> list[Check]:
    """What there is to say; one that is not ok costs time, never a session."""
    if not settings.fork_start:
        return [Check(_NAME, True, f"not forked, as fork_start says: {_COLD}")]
    if settings.environment.startswith("kernel:"):
        return [Check(_NAME, True, f"those of Jupyter kernels are not forked: {_COLD}")]
    if not isinstance(provider, Branching):
        return [Check(_NAME, False, f"the sandbox {provider.name} cannot fork them: {_COLD}")]
    if any(not check.is_ok for check in provider.check()):
        return [Check(_NAME, False, "not tried: the sandbox does not work")]
    if gap := provider.branching_gap():
        return [Check(_NAME, False, f"{gap}: {_COLD}", "`fork_start = false` saves trying")]
    if not _is_prepared(settings):
        return [Check(_NAME, True, "forking works; not timed, because the environment is not prepared yet")]
    with tempfile.TemporaryDirectory(prefix="belljar-doctor-") as folder:
        return asyncio.run(_try(settings, provider, _grounds(Path(folder))))


def _grounds(folder: Path) -> Path:
    """Closed to others from above, and open below, as a server's are: the users of sessions pass through it."""
    grounds = folder / "sessions"
    grounds.mkdir()
    grounds.chmod(0o711)
    return grounds


def _is_prepared(settings: "Settings") -> bool:
    from belljar.environments.selection import is_prepared

    try:
        return is_prepared(settings, settings.environment)
    except BelljarError:
        return True  # what is wrong with it is said when it is tried


async def _try(settings: "Settings", provider: Provider, folder: Path) -> list[Check]:
    from belljar.kernels.starting import KernelStarter

    starter = KernelStarter(settings, provider, folder)
    logging.disable(logging.WARNING)  # what it would warn of is in the findings
    try:
        nursery = await starter.nurseries.of(await starter.environments.get(settings.environment))
        began = time.monotonic()
        if nursery is None or not await nursery.warm():
            why = nursery.complaint if nursery is not None else "no zygote"
            return [Check(_NAME, False, f"the process to fork from does not get ready ({why}): {_COLD}", _WARM_HINT)]
        warm_s = time.monotonic() - began
        fork_s, missing = await _fork_one(settings, starter, folder)
    except (BelljarError, TimeoutError) as error:
        return [Check(_NAME, False, f"none could be started: {error or 'no answer'}")]
    finally:
        await starter.aclose()
        logging.disable(logging.NOTSET)
    detail = f"forked: one is ready after {fork_s * 1000:.0f} ms; warming up took {warm_s:.1f} s, once a server"
    return [Check(_NAME, True, detail), _check_preload(settings, missing, nursery.complaint)]


def _check_preload(settings: "Settings", missing: list[str], complaint: str) -> Check:
    """What of it is not there in a fork. Not installed is worth a warning where it was asked for by name."""
    absent = [name for name in missing if f"{name} does not import" not in complaint]
    loaded = ", ".join(name for name in settings.preload if name not in missing) or "nothing"
    said = [loaded, *([complaint] if complaint else []), *(f"{name} is not installed" for name in absent)]
    is_ok = not complaint and (not absent or "preload" not in settings.model_fields_set)
    return Check("preload", is_ok, "; ".join(said), "" if is_ok else _PRELOAD_HINT)


async def _fork_one(settings: "Settings", starter: "KernelStarter", folder: Path) -> tuple[float, list[str]]:
    """How long a session takes to be there, and what of `preload` it lacks."""
    from belljar.sessions.pool import new_folders

    folders = new_folders(folder, starter)
    try:
        began = time.monotonic()
        kernel = await starter.start(settings.environment, folders)
        took_s = time.monotonic() - began
        try:
            return took_s, await _lacking(kernel, settings.preload)
        finally:
            await kernel.aclose()
    finally:
        if folders.identity is not None:
            starter.provider.release_identity(folders.identity)


async def _lacking(kernel: "Kernel", names: list[str]) -> list[str]:
    from belljar.outputs.events import Stream

    said = [
        event.text
        async for event in kernel.execute(_ASK.format(names=names), allow_input=False)
        if isinstance(event, Stream) and event.name == "stdout"
    ]
    return [name for name in "".join(said).split() if name in names]
