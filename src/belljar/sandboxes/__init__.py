"""The rooms' door: which providers there are, and how the configured one is opened. None is ever chosen silently."""

from belljar.errors import SandboxUnavailable, SettingsError
from belljar.sandboxes.base import Provider
from belljar.sandboxes.namespace import NamespaceProvider
from belljar.sandboxes.process import ProcessProvider


def providers() -> dict[str, Provider]:
    """Every provider by name, whether or not this host can run it."""
    known: list[Provider] = [NamespaceProvider(), ProcessProvider()]
    return {provider.name: provider for provider in known}


def open_provider(name: str) -> Provider:
    """The provider of that name, once its checks have passed."""
    known = providers()
    if name not in known:
        raise SettingsError(f"Unknown sandbox: {name}", hint=f"Choose one of: {', '.join(known)}")
    provider = known[name]
    for check in provider.check():
        if not check.is_ok:
            raise SandboxUnavailable(f"Sandbox {name} cannot run here: {check.name}: {check.detail}", hint=check.hint)
    return provider
