"""Screens of plugins: what one of them fails to look through is withheld, and the server goes on."""

from collections.abc import Iterable, Sequence
from typing import cast

from belljar.facts import SessionFacts
from belljar.outputs.events import Event, Finished, InputRequest, Notice
from belljar.outputs.recorder import OutputScreen
from belljar.plugins import Implementation, PluginRecord, Plugins

SCREEN_HOOK = "screen_output"


def plugin_screens(plugins: Plugins, session: SessionFacts) -> list[OutputScreen]:
    """Return the screens of all plugins for one execution; of one that makes none, all output is withheld."""
    return [screen for each in plugins.implementations(SCREEN_HOOK) for screen in _screens_of(plugins, each, session)]


def _screens_of(plugins: Plugins, implementation: Implementation, session: SessionFacts) -> Sequence[OutputScreen]:
    try:
        made = implementation.bind({"session": session})()
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return [
            PluginScreen(plugins, implementation.plugin, None, plugins.fail(implementation.plugin, SCREEN_HOOK, error))
        ]
    if made is None:
        return ()
    screens = cast("Sequence[object]", made if isinstance(made, list | tuple) else [made])
    return [PluginScreen(plugins, implementation.plugin, cast("OutputScreen", screen)) for screen in screens]


class PluginScreen:
    """One screen of a plugin. After its first failure nothing more passes."""

    def __init__(self, plugins: Plugins, plugin: PluginRecord, inner: OutputScreen | None, failure: str = "") -> None:
        self._plugins = plugins
        self._plugin = plugin
        self._inner = inner
        self._failure = failure
        self._has_noted = False

    def screen(self, event: Event) -> Iterable[Event]:
        """See `OutputScreen`."""
        if isinstance(event, Notice):  # of another screen: plugins look through what the cell said
            return [*self.flush(), event]
        if self._inner is not None:
            try:
                return [*self._inner.screen(event)]
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything
                self._give_up(error)
        # The end of the cell and its questions are no output; without them the cell would wait for ever.
        return [*self._withheld_notice(), *([event] if isinstance(event, Finished | InputRequest) else [])]

    def flush(self) -> Iterable[Event]:
        """See `OutputScreen`."""
        if self._inner is not None:
            try:
                return [*self._inner.flush()]
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything
                self._give_up(error)
        return self._withheld_notice()

    def _give_up(self, error: Exception) -> None:
        self._inner = None
        self._failure = self._plugins.fail(self._plugin, SCREEN_HOOK, error)

    def _withheld_notice(self) -> list[Event]:
        if self._has_noted:
            return []
        self._has_noted = True
        text = f"the plugin {self._plugin.name} failed to look through the output, which is withheld: {self._failure}"
        return [Notice(text)]
