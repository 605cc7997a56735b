"""Hooks are plain functions: test them as such, and once as belljar calls them."""

import asyncio

import belljar_template

from belljar import hooks
from belljar.hooks import CellFacts, ToolCallFacts
from belljar.plugins import Plugins


def test_recursive_deletion_is_refused():
    call = ToolCallFacts("session", "me", "files", "delete_folder", {"path": "a", "recursive": True})
    assert belljar_template.judge_tool_call(call).decision == "deny"
    assert belljar_template.judge_tool_call(ToolCallFacts("session", "me", "files", "read", {})) is None


def test_belljar_accepts_it():
    plugins = Plugins(hooks)
    record = plugins.add("template", belljar_template, "a test")
    assert not record.error
    verdicts = asyncio.run(plugins.judge_code(CellFacts("session", "me", "execution", "#" * 200_000)))
    assert [verdict.decision for verdict in verdicts] == ["warn"]
