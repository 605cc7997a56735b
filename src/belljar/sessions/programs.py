"""Runs one caller's code files as programs: their folder, their packages, and the processes.

Programs take slots like executions and obey the same policy and limits, but have no session. Knows nothing of MCP.
"""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from belljar.environments import Environment
from belljar.environments.installs import InstallOutcome, OnStage, install
from belljar.errors import TooLarge
from belljar.executions.policy_check import ask_nobody, check_policy
from belljar.facts import CellFacts, SessionFacts
from belljar.files.disk_usage import DiskQuota
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_folder, way_mode
from belljar.outputs.events import Notice, Stream
from belljar.outputs.plugin_screens import plugin_screens
from belljar.outputs.recorder import Screens
from belljar.privacy.redaction import RedactionScreen
from belljar.provisioning.code_files import CodeFiles
from belljar.provisioning.program_process import OUTPUT_CAP_BYTES, ProgramEnd, program_arguments, run_program
from belljar.provisioning.sandbox_specs import room_for
from belljar.provisioning.starter import KernelStarter
from belljar.sandboxes.base import Identity
from belljar.sandboxes.host_users import make_layer
from belljar.sessions.registry import Registry

CODE_PREFIX = "settled-"
_LEFTOVER_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ProgramFolders:
    """The folders of one program; it shares the working directory and the packages with the caller's other programs."""

    session_id: str
    workspace: Path
    scratch: Path
    home: Path
    layer: Path
    identity: Identity | None
    principal: str

    @property
    def skills(self) -> Path:
        """Return the folder for skills, which programs do not see."""
        return self.scratch.parent / "skills"

    def make(self) -> None:
        """Create the missing folders."""
        # The program's user must be able to pass through this folder to its own.
        make_folder(self.scratch.parent, way_mode())
        for folder in (self.scratch, self.home):
            make_folder(folder)
            if self.identity is not None:
                os.chown(folder, self.identity.uid, self.identity.gid)
        make_layer(self.layer, self.identity)


class ProgramRunner:
    """Runs the programs of one caller."""

    def __init__(self, starter: KernelStarter, sessions: Registry, principal: str, storage: Path, root: Path) -> None:
        settings = sessions.settings
        self._starter = starter
        self._settings = settings
        self._root = root
        self._identity = starter.provider.take_identity()
        self.storage = CodeFiles(storage, self._identity)
        self._name = f"executor-{root.name}"
        self._plugins = sessions.plugins
        self._guard, self._redactor = sessions.guard(self._name, principal, root)
        self._admission = sessions.admission
        self._principal = principal
        self._is_open = False

    async def open(self) -> None:
        """Open the folder of code files and remove leftovers, if that was not done yet."""
        if not self._is_open:
            await asyncio.to_thread(self.storage.open)
            await asyncio.to_thread(self._tidy)
            self._is_open = True

    def _tidy(self) -> None:
        """Remove the code of programs whose server was killed; a younger folder may be of another server that runs."""
        for code_folder in self._root.glob(f"{CODE_PREFIX}*"):
            with suppress(OSError):
                if code_folder.stat().st_mtime < time.time() - _LEFTOVER_S:
                    remove_tree(code_folder)

    def room_for(self, environment: Environment, size: int) -> AbstractAsyncContextManager[None]:
        """Let a block write `size` bytes of code, or refuse them if they would not fit; one block at a time."""
        return self._quota(self.layer(environment)).room_for(size)

    def layer(self, environment: Environment) -> Path:
        """Return the folder of packages that were installed for this caller's code in an environment."""
        digest = hashlib.sha256(str(environment.python).encode()).hexdigest()[:16]
        return self._root / f"packages-{digest}"

    def _quota(self, layer: Path) -> DiskQuota:
        return DiskQuota([self.storage.folder, layer], self._settings.disk_mb or 0)

    def _folders(self, environment: Environment) -> ProgramFolders:
        folders = ProgramFolders(
            session_id=secrets.token_hex(16),
            workspace=self.storage.folder,
            scratch=self._root / "scratch",
            home=self._root / "home",
            layer=self.layer(environment),
            identity=self._identity,
            principal=self._principal,
        )
        folders.make()
        return folders

    async def run(self, environment: Environment, name: str) -> ProgramEnd:
        """Run a code file to its end, in a process of its own, if the policy allows it."""
        # Read once, because another program of this caller may change the file while the policy is checked.
        code = await asyncio.to_thread(self.storage.read, name)
        cell = CellFacts(self._name, self._principal, name, code, environment.name)
        warnings = (await check_policy(self._plugins, self._guard, cell, ask_nobody)).warnings
        warnings += await self._plugins.tell("before_execution", cell=cell)
        end = await self._run(environment, name, code)
        return await self._screen(replace(end, notices=tuple(warnings)))

    async def _screen(self, end: ProgramEnd) -> ProgramEnd:
        """Return the end of a program with only the output that callers may see."""
        redaction = [RedactionScreen(self._redactor)] if self._redactor.redacts_outputs else []
        facts = SessionFacts(self._name, self._principal)
        screens = Screens([*redaction, *self._guard.screens(), *plugin_screens(self._plugins, facts)])
        passed = [*await screens.apply(Stream("stdout", end.stdout)), *screens.flush()]
        passed += [*await screens.apply(Stream("stderr", end.stderr)), *screens.flush()]
        said = {
            name: "".join(event.text for event in passed if isinstance(event, Stream) and event.name == name)
            for name in ("stdout", "stderr")
        }
        notices = (event.text for event in passed if isinstance(event, Notice))
        return replace(end, **said, notices=(*end.notices, *notices))

    async def _run(self, environment: Environment, name: str, code: str) -> ProgramEnd:
        self._admission.check_queue(self._principal)
        async with self._admission.slot(self._principal):
            self._admission.check_memory()
            folders = self._folders(environment)
            quota = self._quota(folders.layer)
            await quota.check_room(0)
            with TemporaryDirectory(prefix=CODE_PREFIX, dir=self._root) as code_folder:
                arguments = program_arguments(code, name, Path(code_folder))
                return await self._run_watched(environment, folders, arguments, Path(code_folder), quota)

    async def _run_watched(
        self,
        environment: Environment,
        folders: ProgramFolders,
        arguments: Sequence[str],
        code_folder: Path,
        quota: DiskQuota,
    ) -> ProgramEnd:
        """Run the program, and end it when it fills the disk."""
        loop = asyncio.get_running_loop()
        # The output is in memory until the program ends, unlike a cell's: the settings' full cap could cost gigabytes.
        cap = min(self._settings.output_cap_bytes, OUTPUT_CAP_BYTES)
        program = loop.create_task(
            run_program(
                self._starter,
                environment,
                folders,
                arguments,
                timeout_s=self._settings.execution_timeout_s,
                output_cap_bytes=cap,
                readable=[code_folder],
            )
        )

        def end() -> None:
            program.cancel()

        watch = loop.create_task(quota.watch(is_busy=lambda: True, on_growth=end))
        try:
            return await program
        except asyncio.CancelledError:
            if quota.is_over:
                raise TooLarge(
                    f"disk_full: the folder of code files {quota.detail}; the program was ended",
                    hint="Delete files there first, with code such as os.remove(name)",
                ) from None
            raise
        finally:
            program.cancel()
            watch.cancel()
            await asyncio.gather(program, watch, return_exceptions=True)

    async def install(
        self, environment: Environment, packages: Sequence[str], on_stage: OnStage | None
    ) -> list[InstallOutcome]:
        """Install packages for this caller's code; the environment itself is not changed."""
        folders = self._folders(environment)
        open_uv = self._starter.uv_sandbox.uv_for(folders.session_id)
        room = room_for(folders, self._settings)
        return await install(environment, folders.layer, packages, on_stage=on_stage, open_uv=open_uv, room=room)
