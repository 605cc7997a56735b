"""Which sandbox providers there are, and how the configured one is opened. None is ever chosen silently."""

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Provider
from belljar.sandboxes.container.provider import ContainerProvider
from belljar.sandboxes.gvisor.provider import GVisorProvider
from belljar.sandboxes.installed import ask_checks, load_provider
from belljar.sandboxes.microvm import MicroVMProvider
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.sandboxes.process import ProcessProvider
from belljar.settings import Settings


def providers(settings: Settings) -> dict[str, Provider]:
    """Return ours by name, whether or not this host can run them, and a package's if that is the configured one."""
    known: list[Provider] = [
        NamespaceProvider(),
        ProcessProvider(),
        ContainerProvider(settings.container_engine, settings.container_image),
        GVisorProvider(settings.runsc),
        MicroVMProvider(),
    ]
    if all(provider.name != settings.sandbox for provider in known):
        known.append(load_provider(settings.sandbox))
    return {provider.name: provider for provider in known}


def open_provider(settings: Settings) -> Provider:
    """The configured provider, once its checks have passed."""
    provider = providers(settings)[settings.sandbox]
    for check in ask_checks(provider):
        if not check.is_ok:
            raise SandboxUnavailable(
                f"Sandbox {provider.name} cannot run here: {check.name}: {check.detail}", hint=check.hint
            )
    return provider
