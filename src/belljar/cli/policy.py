"""`belljar policy`: check a policy file, and show what it decides on a call or on code, without starting a server."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from belljar.errors import InvalidArgument, SettingsError
from belljar.facts import ToolCallFacts
from belljar.policy.guard import Guard, compile_policy
from belljar.policy.guardrails import LoadedPolicy, load_policy
from belljar.policy.rules import Policy
from belljar.privacy.rules import PrivacyRules

_EXAMPLE = """--call github.get_issue '{"number": 1}'"""

File = Annotated[Path, typer.Argument(help="The policy, a TOML file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_command(file: File, as_json: AsJson = False) -> None:
    """Check a policy file; exits with 2 and tells line and reason if it is not in order."""
    loaded = _load(file)
    policy = loaded.policy
    counts = {"tools": len(policy.tools), "code": len(policy.code), "output": len(policy.output)}
    rules = ", ".join(f"{number} for {name}" for name, number in counts.items())
    also = "".join(f", and {name}" for name in loaded.sections)
    print(json.dumps(counts) if as_json else f"{file} is in order: rules: {rules}{also}")


def try_command(
    file: File,
    call: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="SERVER.TOOL JSON", help="The call of a tool with these arguments."),
    ] = None,
    code: Annotated[Path | None, typer.Option(help="The code in this file, - for stdin.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="The tool says that it only reads.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="As with guardrails_strict.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a policy decides on a call or on code; exits with 0 for what is allowed, with 1 for the rest."""
    policy = _load(file).policy
    policy = policy.model_copy(update={"strict": policy.strict or strict})
    if (call is None) == (code is None):
        raise InvalidArgument("policy test takes either --call or --code", hint=f"Pass one of them, like {_EXAMPLE}")
    answer = _decide_call(policy, *call, read_only=read_only) if call else _decide_code(policy, code or Path("-"))
    print(json.dumps(answer, indent=2) if as_json else "\n".join(_lines(answer)))
    if answer["decision"] in ("deny", "ask"):
        raise typer.Exit(1)


def _load(file: Path) -> LoadedPolicy:
    try:
        return load_policy(file, {"privacy": PrivacyRules})
    except SettingsError as error:
        # Drop the hint, because it tells the person to run this very command.
        raise SettingsError(error.message) from None


def _decide_call(policy: Policy, name: str, text: str, *, read_only: bool) -> dict[str, Any]:
    server, _, tool = name.partition(".")
    try:
        arguments: object = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"the arguments are not JSON: {error}", hint=f"Write {_EXAMPLE}") from None
    if not tool or not isinstance(arguments, dict):
        raise InvalidArgument(f"{name!r} with {text[:80]!r} is no call", hint=f"Write {_EXAMPLE}")
    given = cast("dict[str, Any]", arguments)
    guard = Guard(compile_policy(policy))
    call = ToolCallFacts("", "", server, tool, given, read_only, destructive=not read_only)
    verdict = asyncio.run(guard.judge(call))
    return {"decision": verdict.decision, "rule": verdict.rule, "reason": verdict.reason}


def _decide_code(policy: Policy, path: Path) -> dict[str, Any]:
    try:
        code = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", hint="Name a file of Python") from None
    inspection = asyncio.run(Guard(compile_policy(policy)).examine(code, ""))
    findings = [
        {"line": finding.line, "column": finding.column, "what": finding.what, "rule": finding.rule, "reason": reason}
        for finding, reason in zip(inspection.findings, inspection.reasons, strict=True)
    ]
    return {"decision": inspection.decision, "findings": findings}


def _lines(answer: dict[str, Any]) -> list[str]:
    if "findings" not in answer:
        rule = f" ({answer['rule']})" if answer["rule"] and answer["decision"] != "deny" else ""
        return [f"{answer['decision']}{rule}{': ' + answer['reason'] if answer['reason'] else ''}"]
    found = [
        f"  line {each['line']}: {each['what']} ({each['rule']}{': ' + each['reason'] if each['reason'] else ''})"
        for each in answer["findings"]
    ]
    return [answer["decision"], *found]
