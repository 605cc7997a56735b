"""Forks a session: a new one gets its kernel's memory, a copy of its folder, and its installed packages."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from belljar.environments.conda.prefix import relocate
from belljar.errors import CopyRefused, TooLarge
from belljar.files.disk_usage import MAKE_ROOM, FolderUsage, files_within, usage
from belljar.files.fd_walk import remove_tree
from belljar.files.tree_copy import copy_tree
from belljar.kernels.base import Kernel
from belljar.provisioning.starter import KernelStarter
from belljar.sessions.folders import SessionFolders
from belljar.sessions.hibernation import loss_text, transfer_state
from belljar.sessions.session import Session
from belljar.settings import MEBIBYTE

_NO_LIMIT = 2**62
_Fork = TypeVar("_Fork")
BY_STATE = "everything but variables and imports, because a session with a GPU is forked by saving and loading those"


@dataclass(frozen=True, slots=True)
class ForkedKernel:
    """What the new session consists of, and what did not come along."""

    folders: SessionFolders
    kernel: Kernel
    variables: tuple[str, ...]
    lost: list[str]


async def fork_kernel(
    origin: Session, starter: KernelStarter, root: Path, *, at: str, reseed: bool, runs_nothing: bool = False
) -> ForkedKernel:
    """Fork the kernel of a session whose turn the caller has, or which `runs_nothing`; undo all of it when it fails."""
    kernel = await origin.session_kernel.ensure_started()
    checkpoint = origin.session_kernel.checkpoints.find(at, origin.undo_history.ids) if at else None
    session_id = origin.journal.new_id()
    folders = SessionFolders(session_id, root / session_id, origin.folders.identity, origin.principal)
    folders.make()
    try:
        lost = await asyncio.to_thread(_copy_files, origin, folders)
        if checkpoint is not None:
            lost += await origin.session_kernel.checkpoints.export_files(checkpoint, folders.workspace)
        if checkpoint is not None and checkpoint.is_fresh:
            starter.gpus.inherit(session_id, origin.id)
            forked, missing = await starter.start(origin.environment, folders), []
        else:
            process = checkpoint.process if checkpoint else None
            try:
                forked, missing = await starter.fork(
                    kernel, origin.folders, folders, checkpoint=process, reseed=reseed, runs_nothing=runs_nothing
                )
            except CopyRefused as error:
                if not starter.gpus.of(origin.id):
                    raise
                if process is not None:
                    hint = "Fork it as it is now, or rewind it and then fork it"
                    raise CopyRefused("a session with a GPU is not forked from an earlier state", hint=hint) from error
                # What is on a GPU comes back into the host's memory when it is saved, and goes out again when loaded.
                forked, missing = await _fork_by_state(origin, kernel, starter, folders, error)
    except BaseException:
        starter.gpus.release(session_id)
        await asyncio.to_thread(remove_tree, folders.root)
        raise
    variables = checkpoint.variables if checkpoint else origin.session_kernel.variables
    return ForkedKernel(folders, forked, variables, [*lost, *missing])


async def side_by_side(
    forks: Sequence[Coroutine[Any, Any, _Fork]], undo: Callable[[_Fork], Awaitable[None]]
) -> tuple[list[_Fork], Exception | None]:
    """Await several forks at once; return those that were made and why one was not, or raise where none was.

    Those that are made nevertheless when the caller is cancelled are undone.
    """
    tasks = [asyncio.ensure_future(fork) for fork in forks]
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                await undo(task.result())
        raise
    failures = [error for task in tasks if (error := task.exception()) is not None]
    made = [task.result() for task in tasks if task.exception() is None]
    expected = [error for error in failures if isinstance(error, Exception)]
    if failures and (not made or len(expected) < len(failures)):
        raise failures[0]
    return made, expected[0] if expected else None


async def _fork_by_state(
    origin: Session, kernel: Kernel, starter: KernelStarter, folders: SessionFolders, refusal: CopyRefused
) -> tuple[Kernel, list[str]]:
    """Start a new kernel with the saved variables of one that cannot be forked; also return what it lacks."""
    starter.gpus.inherit(folders.session_id, origin.id)
    forked = await starter.start(origin.environment, folders)
    try:
        losses = await transfer_state(kernel, origin.folders, forked, folders, limit_mb=origin.settings.disk_mb or 0)
    except BaseException:
        await forked.aclose()
        raise
    if losses is None:
        await forked.aclose()
        raise refusal
    return forked, [BY_STATE, *map(loss_text, losses)]


def _copy_files(origin: Session, folders: SessionFolders) -> list[str]:
    identity = folders.identity
    owner = (identity.uid, identity.gid) if identity else None
    limit_mb = origin.settings.disk_mb or 0
    limit = limit_mb * MEBIBYTE or _NO_LIMIT
    # Measured beforehand as the limit counts it, because `copy_tree` counts only the content of files.
    held = usage([origin.folders.workspace, origin.folders.layer]) if limit_mb else FolderUsage()
    if limit_mb and (held.size_bytes > limit or held.files > files_within(limit_mb)):
        raise TooLarge(
            f"disk_full: the files and packages of the session, which a fork has a copy of, take "
            f"{round(held.size_bytes / MEBIBYTE):,} MB in {held.files:,} files; "
            f"disk_mb = {limit_mb} has room for {limit_mb:,} MB in {files_within(limit_mb):,}",
            hint=MAKE_ROOM,
        )
    report = copy_tree(origin.folders.workspace, folders.workspace, owner=owner, limit_bytes=limit)
    # Limited again, because code of the session may add files meanwhile.
    left = max(0, limit - report.data_bytes)
    if copy_tree(origin.folders.layer, folders.layer, owner=None, limit_bytes=left).files:
        relocate(folders.layer, origin.folders.layer)
    return [f"file {omission.name}: {omission.reason}" for omission in report.skipped]
