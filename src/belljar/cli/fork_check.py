"""The check of `belljar doctor` whether sessions start as forks on this host, and how long that takes.

It starts a zygote with the configured sandbox and environment, forks one session from it, and asks that session which
modules are imported. It changes nothing: an environment that does not exist yet is not made for it.
"""

import asyncio
import logging
import tempfile
import time
from pathlib import Path

from belljar.environments.selection import is_prepared
from belljar.errors import BelljarError
from belljar.kernels.base import Kernel
from belljar.outputs.events import Stream
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes.base import ForkableProvider, HostCheck, Provider
from belljar.sessions.pool import new_folders
from belljar.settings import Settings
from belljar.settings.azure import AZURE

_NAME = "sessions"
_COLD = "they start cold, which takes about half a second and the imports of each"
_PRELOAD_HINT = "Take what does not import out of preload, or install it into the environment"
_WARM_HINT = "See whether it does with fewer modules in preload"
_ASK = "import sys; print(*[name for name in {names!r} if name not in sys.modules], sep='\\n')"


def check_forks(settings: Settings, provider: Provider) -> list[HostCheck]:
    """Return the checks; one that is not ok makes sessions start more slowly, and never prevents one."""
    if not settings.fork_start:
        return [HostCheck(_NAME, True, f"not forked, as fork_start says: {_COLD}")]
    if settings.environment.startswith("kernel:"):
        return [HostCheck(_NAME, True, f"those of Jupyter kernels are not forked: {_COLD}")]
    if settings.environment == AZURE:
        return [HostCheck(_NAME, True, "those in an Azure pool are not forked: the pool allocates them")]
    if not isinstance(provider, ForkableProvider):
        return [HostCheck(_NAME, False, f"the sandbox {provider.name} cannot fork them: {_COLD}")]
    if any(not check.is_ok for check in provider.check()):
        return [HostCheck(_NAME, False, "not tried: the sandbox does not work")]
    if reason := provider.no_nesting_reason():
        return [HostCheck(_NAME, False, f"{reason}: {_COLD}", "`fork_start = false` saves trying")]
    if not _is_prepared(settings):
        return [HostCheck(_NAME, True, "forking works; not timed, because the environment is not prepared yet")]
    with tempfile.TemporaryDirectory(prefix="belljar-doctor-") as folder:
        return asyncio.run(_time_fork(settings, provider, _sessions_folder(Path(folder))))


def _sessions_folder(folder: Path) -> Path:
    """Make a folder for sessions with the permissions of a server's, which the users of sessions must pass through."""
    sessions = folder / "sessions"
    sessions.mkdir()
    sessions.chmod(0o711)
    return sessions


def _is_prepared(settings: Settings) -> bool:
    try:
        return is_prepared(settings, settings.environment)
    except BelljarError:
        return True  # starting a session will report what is wrong with it


async def _time_fork(settings: Settings, provider: Provider, folder: Path) -> list[HostCheck]:
    starter = KernelStarter(settings, provider, folder)
    logging.disable(logging.WARNING)  # the checks report what it would warn of
    try:
        zygote = await starter.zygotes.of(await starter.environments.get(settings.environment))
        started_s = time.monotonic()
        if zygote is None or not await zygote.warm():
            why = zygote.complaint if zygote is not None else "no zygote"
            return [
                HostCheck(_NAME, False, f"the process to fork from does not get ready ({why}): {_COLD}", _WARM_HINT)
            ]
        warm_s = time.monotonic() - started_s
        fork_s, missing = await _fork_one(settings, starter, folder)
    except (BelljarError, TimeoutError) as error:
        return [HostCheck(_NAME, False, f"none could be started: {error or 'no answer'}")]
    finally:
        await starter.aclose()
        logging.disable(logging.NOTSET)
    detail = f"forked: one is ready after {fork_s * 1000:.0f} ms; warming up took {warm_s:.1f} s, once a server"
    return [HostCheck(_NAME, True, detail), _check_preload(settings, missing, zygote.complaint)]


def _check_preload(settings: Settings, missing: list[str], complaint: str) -> HostCheck:
    """Check which modules of `preload` a fork has; one that is not installed counts only if `preload` was set."""
    absent = [name for name in missing if f"{name} does not import" not in complaint]
    loaded = ", ".join(name for name in settings.preload if name not in missing) or "nothing"
    details = [loaded, *([complaint] if complaint else []), *(f"{name} is not installed" for name in absent)]
    is_ok = not complaint and (not absent or "preload" not in settings.model_fields_set)
    return HostCheck("preload", is_ok, "; ".join(details), "" if is_ok else _PRELOAD_HINT)


async def _fork_one(settings: Settings, starter: KernelStarter, folder: Path) -> tuple[float, list[str]]:
    """Start one session; return the seconds that took, and the modules of `preload` that it lacks."""
    folders = new_folders(folder, starter)
    try:
        started_s = time.monotonic()
        kernel = await starter.start(settings.environment, folders)
        took_s = time.monotonic() - started_s
        try:
            return took_s, await _missing_modules(kernel, settings.preload)
        finally:
            await kernel.aclose()
    finally:
        if folders.identity is not None:
            starter.provider.release_identity(folders.identity)


async def _missing_modules(kernel: Kernel, names: list[str]) -> list[str]:
    printed = [
        event.text
        async for event in kernel.execute(_ASK.format(names=names), allow_input=False)
        if isinstance(event, Stream) and event.name == "stdout"
    ]
    return [name for name in "".join(printed).split() if name in names]
