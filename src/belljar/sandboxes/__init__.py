"""Lists the sandbox providers and opens the configured one. It never chooses another one silently.

A provider that an installed package or a plugin brings is other people's code: each of its errors becomes a
SandboxUnavailable that names where it is from, and one that does not fulfil the contract is refused.
`belljar.settings.sandboxes` finds which packages bring one; docs/guides/sandbox-providers.md is for their authors.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from belljar.errors import BelljarError, SandboxUnavailable
from belljar.facts import hookimpl
from belljar.plugins import Plugins
from belljar.sandboxes.base import CONTRACT, HostCheck, InstalledProvider, Provider
from belljar.settings import Settings
from belljar.settings.sandboxes import PLUGIN_PREFIX, find_installed

_ATTRIBUTES = {"name": str, "isolates": bool, "warning": str}
_METHODS = ("check", "take_identity", "release_identity", "open")

log = logging.getLogger(__name__)


class BuiltinProviders:
    """belljar's own providers, as a plugin."""

    @hookimpl
    def sandbox_providers(self, settings: Settings) -> Mapping[str, Callable[[], Provider]]:
        """Return what makes them, by name; each imports its module, because a server has one of them."""
        # Not at the top, because other systems lack modules that these need, and have use for the rest of the package.
        from belljar.sandboxes.limits.enforcement import Enforcer

        enforcer = Enforcer(asks_systemd=settings.systemd_scope)

        def namespace() -> Provider:
            from belljar.sandboxes.namespace.provider import NamespaceProvider

            return NamespaceProvider(enforcer)

        def process() -> Provider:
            from belljar.sandboxes.data_path import DataPath
            from belljar.sandboxes.process import ProcessProvider

            return ProcessProvider(enforcer, DataPath(is_for_one=settings.max_sessions == 1))

        def container() -> Provider:
            from belljar.sandboxes.container.provider import ContainerProvider

            return ContainerProvider(settings.container_engine, settings.container_image)

        def gvisor() -> Provider:
            from belljar.sandboxes.gvisor import GVisorProvider

            return GVisorProvider(settings.runsc, enforcer)

        def microvm() -> Provider:
            from belljar.sandboxes.microvm import MicroVMProvider

            return MicroVMProvider(settings.start_timeout_s)

        return {
            "namespace": namespace,
            "process": process,
            "container": container,
            "gvisor": gvisor,
            "microvm": microvm,
        }


def providers(settings: Settings, plugins: Plugins | None = None) -> dict[str, Provider]:
    """Return belljar's own providers by name, usable here or not, and another one if that is configured."""
    own = BuiltinProviders().sandbox_providers(settings)
    known = {name: make() for name, make in own.items()}
    if settings.sandbox not in known:
        known[settings.sandbox] = _configured(settings, plugins)
    return known


def _configured(settings: Settings, plugins: Plugins | None) -> Provider:
    own, chosen = BuiltinProviders().sandbox_providers(settings), settings.sandbox
    if chosen in own:
        return own[chosen]()
    if chosen.startswith(PLUGIN_PREFIX):
        return _of_plugin(chosen.removeprefix(PLUGIN_PREFIX), settings, plugins or Plugins())
    return load_provider(chosen)


def _of_plugin(name: str, settings: Settings, plugins: Plugins) -> Provider:
    brought = plugins.named("sandbox_providers", settings=settings)
    if name not in brought:
        others = ", ".join(sorted({*brought} - {*BuiltinProviders().sandbox_providers(settings)}))
        raise SandboxUnavailable(
            f"No plugin brings a sandbox {name}{f', only {others}' if others else ''}",
            hint="See `belljar plugins` for those that failed",
        )
    return make_provider(brought[name], name, "a plugin")


def open_provider(settings: Settings, plugins: Plugins | None = None) -> Provider:
    """Return the configured provider if all its checks pass; SandboxUnavailable names the first that does not."""
    _check_temporary_folder()
    provider = _configured(settings, plugins)
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


# Providers of others


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
