"""A guardrail: mail goes only to addresses of our own domain.

Put this file into `plugins_directory`. The tool `send` of the server `mail` then refuses any other recipient, whatever
code a model writes, and asks the person before one call reaches more than ten people.
"""

from belljar.hooks import ToolCallFacts, Verdict, hookimpl

DOMAIN = "example.com"
MAX_UNASKED = 10


@hookimpl
def judge_tool_call(call: ToolCallFacts) -> Verdict | None:
    """Decide on a call of mail.send; None for any other tool, on which this plugin has no say."""
    if (call.server, call.tool) != ("mail", "send"):
        return None
    to = call.arguments.get("to", [])
    recipients = [to] if isinstance(to, str) else [*to]
    # A privacy token like [EMAIL_1] stands for an address; the question comes again with the address itself.
    others = [one for one in recipients if not one.endswith(f"@{DOMAIN}") and (call.has_values or one[:1] != "[")]
    if others:
        return Verdict("deny", f"{len(others)} of the recipients are not @{DOMAIN}: send it to colleagues only")
    if len(recipients) > MAX_UNASKED:
        return Verdict("ask", f"it goes to {len(recipients)} people")
    return None
