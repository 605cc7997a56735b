"""Lists the sandbox providers and opens the configured one. It never chooses another one silently."""

import tempfile
from collections.abc import Callable, Mapping

from belljar.errors import SandboxUnavailable
from belljar.facts import hookimpl
from belljar.plugins import Plugins
from belljar.sandboxes.base import Provider
from belljar.sandboxes.installed import ask_checks, load_provider, make_provider
from belljar.settings import Settings
from belljar.settings.sandboxes import PLUGIN_PREFIX


class OwnProviders:
    """belljar's own providers, as a plugin."""

    @hookimpl
    def sandbox_providers(self, settings: Settings) -> Mapping[str, Callable[[], Provider]]:
        """Return what makes them, by name."""
        # Not at the top, because other systems lack modules that these need, and have use for the rest of the package.
        from belljar.sandboxes.container.provider import ContainerProvider
        from belljar.sandboxes.data_path import DataPath
        from belljar.sandboxes.gvisor.provider import GVisorProvider
        from belljar.sandboxes.limits.enforcement import Enforcer
        from belljar.sandboxes.microvm import MicroVMProvider
        from belljar.sandboxes.namespace.provider import NamespaceProvider
        from belljar.sandboxes.process import ProcessProvider

        enforcer = Enforcer(asks_systemd=settings.systemd_scope)
        return {
            "namespace": lambda: NamespaceProvider(enforcer),
            "process": lambda: ProcessProvider(enforcer, DataPath(is_for_one=settings.max_sessions == 1)),
            "container": lambda: ContainerProvider(settings.container_engine, settings.container_image),
            "gvisor": lambda: GVisorProvider(settings.runsc, enforcer),
            "microvm": lambda: MicroVMProvider(settings.start_timeout_s),
        }


def providers(settings: Settings, plugins: Plugins | None = None) -> dict[str, Provider]:
    """Return belljar's own providers by name, usable here or not, and another one if that is configured."""
    own = OwnProviders().sandbox_providers(settings)
    known = {name: make() for name, make in own.items()}
    if (chosen := settings.sandbox).startswith(PLUGIN_PREFIX):
        known[chosen] = _of_plugin(chosen.removeprefix(PLUGIN_PREFIX), settings, plugins or Plugins())
    elif chosen not in known:
        known[chosen] = load_provider(chosen)
    return known


def _of_plugin(name: str, settings: Settings, plugins: Plugins) -> Provider:
    brought = plugins.named("sandbox_providers", settings=settings)
    if name not in brought:
        others = ", ".join(sorted({*brought} - {*OwnProviders().sandbox_providers(settings)}))
        raise SandboxUnavailable(
            f"No plugin brings a sandbox {name}{f', only {others}' if others else ''}",
            hint="See `belljar plugins` for those that failed",
        )
    return make_provider(brought[name], name, "a plugin")


def open_provider(settings: Settings, plugins: Plugins | None = None) -> Provider:
    """Return the configured provider if all its checks pass; SandboxUnavailable names the first that does not."""
    _check_temporary_folder()
    provider = providers(settings, plugins)[settings.sandbox]
    for check in ask_checks(provider):
        if not check.is_ok:
            raise SandboxUnavailable(
                f"Sandbox {provider.name} cannot run here: {check.name}: {check.detail}", hint=check.hint
            )
    return provider


def _check_temporary_folder() -> None:
    """Refuse a host on which no temporary file can be made, such as a container with a read-only root."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise SandboxUnavailable(
            f"No sandbox can be made, because there is no folder for temporary files: {error.strerror}",
            hint="Mount one (`docker run --tmpfs /tmp`), or set TMPDIR to a folder that can be written",
        ) from error
