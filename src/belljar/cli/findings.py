"""The findings of `belljar doctor`, and how they are printed. Knows no check."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

_WIDEST_NAME = 28


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One row of the report."""

    section: str
    status: Literal["ok", "warn", "fail"]
    name: str
    detail: str
    """What this host gives."""
    hint: str = ""
    """The command that gets the rest, or what else to do."""
    cost: str = ""
    """What it costs not to have it."""


def print_findings(findings: Sequence[HostFinding], *, as_json: bool) -> int:
    """Print the findings, and on stderr what they come to; return the exit status."""
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else report(findings))
    failed = sum(finding.status == "fail" for finding in findings)
    if failed:
        print(f"{failed} of {len(findings)} checks failed that these settings need", file=sys.stderr)
        return 1
    print("everything that these settings need is there", file=sys.stderr)
    return 0


def report(findings: Sequence[HostFinding]) -> str:
    """Return the findings as a table: what this host gives, and below it what the lack of it costs and what gets it."""
    width = max((len(finding.name) for finding in findings), default=0)
    width = min(width, _WIDEST_NAME)
    lines = [f"{' ' * (width + 10)}what this host gives"]
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        indent = " " * (width + 10)
        lines.append(f"  {finding.status:<4}  {finding.name:<{width}}  {_indented(finding.detail, indent)}")
        if finding.cost:
            lines.append(f"{indent}without it: {_indented(finding.cost, indent)}")
        if finding.hint:
            lines.append(f"{indent}to get it: {_indented(finding.hint, indent)}")
    return "\n".join(lines)


def _indented(text: str, indent: str) -> str:
    return text.replace("\n", f"\n{indent}  ")
