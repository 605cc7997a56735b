"""The variables of a session on disk: saved before it would expire or with its server, loaded when it is used again.

The session's folder stays where it is. Its own kernel writes the variables, inside the sandbox, to a file that the host
then moves out of the cells' reach; the host never loads a byte of it.
"""

import asyncio
import os
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError
from belljar.executions.outcome import StateLossNotice
from belljar.files.fd_walk import change_owner, disarm
from belljar.journal.session_records import SessionRecord
from belljar.kernels.base import Kernel, StatefulKernel, StateLoss, StateReport
from belljar.sandboxes.base import Identity
from belljar.sessions.folders import SessionFolders
from belljar.settings import MEBIBYTE

NAME = "state"
SAVE_S = 30.0
LOAD_S = 60.0
GRACE_S = 5.0
UNLIMITED_MB = 1024 * 1024
_MAX_NAMED = 40


async def save(
    kernel: Kernel, folders: SessionFolders, *, limit_bytes: int, target: Path | None = None
) -> StateReport | None:
    """Have a kernel write its variables to a file, and move that away; return None when it cannot or did not.

    The file goes to `target`, where it is given, instead of where a session that wakes looks for it.
    """
    if not isinstance(kernel, StatefulKernel) or not kernel.is_alive():
        return None
    saving = kernel.save_state(f"{kernel.scratch}/{NAME}", limit_bytes=limit_bytes, limit_s=SAVE_S)
    report = await _run_bounded(kernel, saving, SAVE_S + GRACE_S)
    return report if report is not None and _move_out(folders.scratch / NAME, target or folders.state) else None


async def _run_bounded(
    kernel: StatefulKernel, work: Coroutine[Any, Any, StateReport], patience_s: float
) -> StateReport | None:
    """Wait for work of the kernel, and interrupt it after `patience_s`; return None if it ignored that or died.

    The work runs code of the session, so it may take any time.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        done, _ = await asyncio.wait([task], timeout=patience_s)
        if not done:
            await kernel.interrupt()
            done, _ = await asyncio.wait([task], timeout=GRACE_S)
        return task.result() if done else None
    except BelljarError:
        return None
    finally:
        task.cancel()


def _move_out(written: Path, target: Path) -> bool:
    """Move the file to where no cell can reach it; return False if it is not a regular file, and leave it alone."""
    try:
        if not stat.S_ISREG(os.lstat(written).st_mode):
            return False
        written.replace(target)
    except OSError:
        return False
    return True


class SavedStateLoader:
    """Brings one session back from disk."""

    def __init__(self, folders: SessionFolders, entry: SessionRecord) -> None:
        self._folders = folders
        self._entry = entry
        self.is_rewound = False
        """Whether it was awake since at a server that was lost, and what ran there is not in it."""

    async def prepare(self) -> None:
        """Give its files to its new user."""
        # An earlier version of belljar may have hibernated it without this.
        await asyncio.to_thread(disarm, self._folders.own)
        if self._folders.identity is not None:
            await asyncio.to_thread(_change_owner, self._folders, self._folders.identity)

    async def load(self, kernel: Kernel) -> StateLossNotice:
        """Load the variables into a fresh kernel; return a notice that says what is missing."""
        folders, entry = self._folders, self._entry
        report = StateReport()
        # A server that was killed wrote no state, and recorded only the names of the variables after the last cell.
        has_state = folders.state.exists() or not entry.executions
        if isinstance(kernel, StatefulKernel) and folders.state.exists():
            folders.state.replace(folders.scratch / NAME)
            loading = kernel.load_state(f"{kernel.scratch}/{NAME}")
            report = await _run_bounded(kernel, loading, LOAD_S) or StateReport()
            (folders.scratch / NAME).unlink(missing_ok=True)
        fact = f"The session was asleep on disk ({entry.end}) and is awake again"
        if self.is_rewound:
            fact = f"The machine of this session was lost, and it is as it was when it last fell asleep ({entry.end})"
        missing = [name for name in entry.variables if name not in report.kept]
        if not missing and not report.lost:
            if has_state:
                state = "rewound" if self.is_rewound else "kept"
                return StateLossNotice((), f"{fact}: files and variables are back", state=state)
            return StateLossNotice((), f"{fact}, with a fresh kernel: imports and variables are gone, files are kept")
        reasons = [*entry.unkept, *map(loss_text, report.lost)]
        not_kept = [
            *reasons,
            *(name for name in missing if not any(reason.startswith(f"{name} (") for reason in reasons)),
        ]
        more = " …" if len(not_kept) > _MAX_NAMED else ""
        counted = f"{len(entry.variables) - len(missing)} of {len(entry.variables)} variables are back"
        return StateLossNotice(
            tuple(missing), f"{fact}: files are kept, {counted}. Not kept: {'; '.join(not_kept[:_MAX_NAMED])}{more}"
        )


async def transfer_state(
    kernel: Kernel, folders: SessionFolders, to: Kernel, to_folders: SessionFolders, *, limit_mb: int
) -> list[StateLoss] | None:
    """Load the variables of one kernel into another; return what could not be, or None if nothing was saved."""
    if not isinstance(to, StatefulKernel):
        return None
    limit_bytes = (limit_mb or UNLIMITED_MB) * MEBIBYTE
    saved = await save(kernel, folders, limit_bytes=limit_bytes, target=to_folders.scratch / NAME)
    if saved is None:
        return None
    loaded = await _run_bounded(to, to.load_state(f"{to.scratch}/{NAME}"), LOAD_S)
    (to_folders.scratch / NAME).unlink(missing_ok=True)
    if loaded is None:
        return None
    named = {loss.name for loss in (*saved.lost, *loaded.lost)}
    missing = [name for name in saved.kept if name not in loaded.kept and name not in named]
    return [*saved.lost, *loaded.lost, *(StateLoss(name, "", "it was saved and did not load") for name in missing)]


def loss_text(loss: StateLoss) -> str:
    """Return what could not be saved or loaded, and why, in words."""
    return f"{loss.name} ({loss.type}): {loss.reason}" if loss.type else f"{loss.name}: {loss.reason}"


def _change_owner(folders: SessionFolders, identity: Identity) -> None:
    """Give a sleeping session's files to its new user; safe, because no process of the session can plant links now."""
    change_owner([*folders.own, folders.state], identity.uid, identity.gid)
