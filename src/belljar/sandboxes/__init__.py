"""Lists the sandbox providers and opens the configured one. It never chooses another one silently."""

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
    """Return belljar's own providers by name, usable here or not, and an installed one if that is configured."""
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
    """Return the configured provider if all its checks pass; SandboxUnavailable names the first that does not."""
    provider = providers(settings)[settings.sandbox]
    for check in ask_checks(provider):
        if not check.is_ok:
            raise SandboxUnavailable(
                f"Sandbox {provider.name} cannot run here: {check.name}: {check.detail}", hint=check.hint
            )
    return provider
