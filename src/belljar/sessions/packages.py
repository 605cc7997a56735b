"""Installs packages for a session: into its layer on the host, then imported in its kernel to prove that they work."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from belljar.environments.installed_check import modules_of
from belljar.environments.installs import InstallOutcome, OnStage, PackageChange, install, pip_line
from belljar.errors import BelljarError, KernelDied
from belljar.kernels.base import ImportProof, ImportProvingKernel
from belljar.provisioning.sandbox_specs import room_for
from belljar.provisioning.starter import KernelStarter
from belljar.sessions.session import Session

PROOF_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PackageInstallation:
    """The outcome of each requirement, and the packages that changed although the kernel has imported them."""

    outcomes: list[InstallOutcome]
    restart_needed: list[str]
    pinned: list[str]
    """Everything that was installed, dependencies included: NAME==VERSION, for conda NAME=VERSION=BUILD."""


async def install_packages(
    starter: KernelStarter, session: Session, requirements: Sequence[str], *, on_stage: OnStage | None = None
) -> PackageInstallation:
    """Install packages into the session's layer, then import the requested ones in its kernel.

    The journal has the installation as a cell, so that an exported notebook runs where the packages are missing.
    """
    environment = await starter.environments.for_packages(session.environment)
    changes: list[PackageChange] = []
    layer = session.folders.layer
    open_uv = starter.uv_sandbox.uv_for(session.id)
    outcomes = await install(
        environment,
        layer,
        requirements,
        on_change=changes.append,
        on_stage=on_stage,
        open_uv=open_uv,
        room=room_for(session.folders, session.settings),
    )
    there = [text for text, outcome in zip(requirements, outcomes, strict=True) if outcome.error is None]
    if there:
        session.journal.record_install(session.id, pip_line(there))
    pinned = sorted(change.pin for change in changes)
    installed = [outcome.name for outcome in outcomes if outcome.error is None]
    replaced = [change for change in changes if change.before is not None and change.before != change.after]
    names = [*installed, *(change.name for change in replaced)]
    modules = await asyncio.to_thread(modules_of, environment, layer, names) if names else {}
    wanted = [module for name in installed for module in modules[name]]
    watched = [module for change in replaced for module in modules[change.name]]
    if on_stage is not None and wanted:
        await on_stage(f"importing {', '.join(wanted)}")
    proof = await _proof(session, wanted, watched) if wanted or watched else None
    if proof is None:
        return PackageInstallation(outcomes, [], pinned)
    return PackageInstallation(
        [_proven(outcome, modules.get(outcome.name, []), proof) for outcome in outcomes],
        [_changed(change) for change in replaced if proof.loaded.intersection(modules[change.name])],
        pinned,
    )


async def _proof(session: Session, modules: list[str], watched: list[str]) -> ImportProof | None:
    """Import modules in the kernel and return what came of it; None where it runs a cell or cannot be asked."""
    if session.is_in_turn:
        return None
    async with session.turn:
        try:
            kernel = await session.session_kernel.ensure_started()
        except BelljarError:
            return None
        if not isinstance(kernel, ImportProvingKernel):
            return None
        proving = asyncio.get_running_loop().create_task(kernel.prove_imports(modules, watched=watched))
        try:
            done, _ = await asyncio.wait([proving], timeout=PROOF_TIMEOUT_S)
            if not done:
                await kernel.interrupt()
                done, _ = await asyncio.wait([proving], timeout=session.settings.interrupt_grace_s)
            if not done:
                await kernel.kill()
            return await proving
        except KernelDied as death:
            await session.session_kernel.on_death(f"importing {', '.join(modules)} ended the kernel: {death.message}")
            return ImportProof(errors=dict.fromkeys(modules, f"it ended the kernel: {death.message}"))
        finally:
            proving.cancel()


def _proven(outcome: InstallOutcome, modules: list[str], proof: ImportProof) -> InstallOutcome:
    if outcome.error is not None or not modules:
        return outcome
    faults = [f"{module}: {proof.errors[module]}" for module in modules if module in proof.errors]
    return replace(outcome, imported=not faults, import_error="; ".join(faults) or None)


def _changed(change: PackageChange) -> str:
    return f"{change.name} {change.before} → {change.after}"
