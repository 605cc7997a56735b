"""A session on disk: put there before it would expire or with its server, and woken by the next call with its id.

Its folder stays where it is. Its variables are written by its own kernel, inside the sandbox, to a file that the host
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
from belljar.files.ownership import change_owner, disarm
from belljar.journal.session_records import SessionRecord
from belljar.kernels.base import Kernel, StatefulKernel, StateLoss, StateReport
from belljar.sandboxes.base import Identity
from belljar.sessions.folders import SessionFolders

NAME = "state"
SAVE_S = 30.0
LOAD_S = 60.0
GRACE_S = 5.0
_MOST_NAMED = 40


async def save(kernel: Kernel, folders: SessionFolders, *, limit_bytes: int) -> StateReport | None:
    """Have a kernel write its variables; None when it cannot or did not."""
    if not isinstance(kernel, StatefulKernel) or not kernel.is_alive():
        return None
    saving = kernel.save_state(f"{kernel.scratch}/{NAME}", limit_bytes=limit_bytes, limit_s=SAVE_S)
    report = await _bounded(kernel, saving, SAVE_S + GRACE_S)
    return report if report is not None and _take_away(folders.scratch / NAME, folders.state) else None


async def _bounded(
    kernel: StatefulKernel, work: Coroutine[Any, Any, StateReport], patience_s: float
) -> StateReport | None:
    """What the session's own code makes of it in that time; interrupted after it. None: it ignored that, or died."""
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


def _take_away(written: Path, kept: Path) -> bool:
    """Move the file to where no cell gets at it. What is there instead of a file is not ours to touch."""
    try:
        if not stat.S_ISREG(os.lstat(written).st_mode):
            return False
        written.replace(kept)
    except OSError:
        return False
    return True


class WakeReport:
    """One session on its way back from disk."""

    def __init__(self, folders: SessionFolders, entry: SessionRecord) -> None:
        self._folders = folders
        self._entry = entry

    async def prepare(self) -> None:
        """Make its files those of its new user."""
        # An earlier version may have put it to sleep as it was.
        await asyncio.to_thread(disarm, self._folders.own)
        if self._folders.identity is not None:
            await asyncio.to_thread(_hand_over, self._folders, self._folders.identity)

    async def load(self, kernel: Kernel) -> StateLossNotice:
        """Bring the variables back into a fresh kernel; what is missing afterwards is told."""
        folders, entry = self._folders, self._entry
        report = StateReport()
        # A server that was killed wrote none, and knows only the names that its last finished cell left.
        has_state = folders.state.exists() or not entry.executions
        if isinstance(kernel, StatefulKernel) and folders.state.exists():
            folders.state.replace(folders.scratch / NAME)
            loading = kernel.load_state(f"{kernel.scratch}/{NAME}")
            report = await _bounded(kernel, loading, LOAD_S) or StateReport()
            (folders.scratch / NAME).unlink(missing_ok=True)
        fact = f"The session was asleep on disk ({entry.end}) and is awake again"
        missing = [name for name in entry.variables if name not in report.kept]
        if not missing and not report.lost:
            if has_state:
                return StateLossNotice((), f"{fact}: files and variables are back", state="kept")
            return StateLossNotice((), f"{fact}, with a fresh kernel: imports and variables are gone, files are kept")
        reasons = [*entry.unkept, *map(in_words, report.lost)]
        told = [*reasons, *(name for name in missing if not any(reason.startswith(f"{name} (") for reason in reasons))]
        more = " …" if len(told) > _MOST_NAMED else ""
        counted = f"{len(report.kept)} of {len(entry.variables)} variables are back"
        return StateLossNotice(
            tuple(missing), f"{fact}: files are kept, {counted}. Not kept: {'; '.join(told[:_MOST_NAMED])}{more}"
        )


def in_words(loss: StateLoss) -> str:
    """What could not be kept, and why."""
    return f"{loss.name} ({loss.type}): {loss.reason}" if loss.type else f"{loss.name}: {loss.reason}"


def _hand_over(folders: SessionFolders, identity: Identity) -> None:
    """Make what is in a sleeping session's folders its new user's. Nobody is in there to put links in our way."""
    change_owner([*folders.own, folders.state], identity.uid, identity.gid)
