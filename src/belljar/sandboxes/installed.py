"""Imports the provider that an installed package brings, and refuses one that does not fulfil the contract.

Everything here runs other people's code, so each of its errors becomes a SandboxUnavailable that names the package.
`belljar.settings.sandboxes` finds which packages bring one; docs/guides/sandbox-providers.md is for their authors.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from belljar.errors import BelljarError, SandboxUnavailable
from belljar.sandboxes.base import CONTRACT, HostCheck, InstalledProvider, Provider
from belljar.settings.sandboxes import find_installed

_ATTRIBUTES = {"name": str, "isolates": bool, "warning": str}
_METHODS = ("check", "take_identity", "release_identity", "open")

log = logging.getLogger(__name__)


def load_provider(name: str) -> InstalledProvider:
    """Import the package that brings this provider, and return the provider."""
    try:
        installed = find_installed(name)
    except ValueError as error:
        raise SandboxUnavailable(f"There is no sandbox {name}: {error}") from None
    # The entry point is a class or a function; called without arguments, it returns the provider.
    return make_provider(lambda: installed.entry_point.load()(), name, f"the package {installed.package}")


def make_provider(make: Callable[[], Any], name: str, source: str) -> InstalledProvider:
    """Make another's provider and return it; SandboxUnavailable names the source of one that breaks the contract."""
    try:
        provider = make()
        breaches = list(_breaches(provider, name))
    except Exception as error:
        raise _refusal(name, source, f"it does not load: {type(error).__name__}: {error}") from error
    if breaches:
        raise _refusal(name, source, "; ".join(breaches))
    log.info("sandbox %s is made by %s, not by belljar", name, source)
    return provider


def _breaches(provider: Any, name: str) -> Iterator[str]:
    """Yield what a provider lacks of the contract, as far as that can be told before a sandbox is opened."""
    contract = getattr(provider, "contract", None)
    if contract is None:
        yield f"it does not say which version of the contract it was written for: it needs `contract = {CONTRACT}`"
        return
    if contract != CONTRACT:
        yield f"it was written for version {contract!r} of the contract, and this belljar has version {CONTRACT}"
        return
    for attribute, kind in _ATTRIBUTES.items():
        if not isinstance(getattr(provider, attribute, None), kind):
            yield f"it has no `{attribute}` that is a {kind.__name__}"
    for method in _METHODS:
        if not callable(getattr(provider, method, None)):
            yield f"it has no method `{method}`"
    if isinstance(own := getattr(provider, "name", None), str) and own != name:
        yield f"it calls itself {own!r}"


def _refusal(name: str, source: str, reason: str) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"Sandbox {name} of {source} cannot be used: {reason}",
        hint="Install a version of it that fits this belljar, or choose another sandbox",
    )


def ask_checks(provider: Provider) -> list[HostCheck]:
    """Return a provider's checks of this host; a provider that raises has failed its check."""
    try:
        return provider.check()
    except BelljarError:
        raise
    except Exception as error:  # noqa: BLE001 - a provider may be another package's
        return [HostCheck("check", is_ok=False, detail=f"it raised {type(error).__name__}: {error}")]
