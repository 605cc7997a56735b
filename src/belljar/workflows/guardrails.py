"""The guardrails of workflows and steps: rules in the form of a policy file, which only add to the server's policy.

A call or code has to pass both. What a running session cannot be given later, memory and network, is refused here.
"""

from belljar.policy.guard import Guard, compile_policy
from belljar.policy.rules import CodeRule, Policy
from belljar.workflows.definition import Definition, Step, SubWorkflow
from belljar.workflows.library import reference_of


def guardrails_problem(policy: Policy) -> str:
    """Return what of a workflow's guardrails cannot be obeyed; empty when all can."""
    limits = policy.limits
    if (
        limits.max_memory_mb is not None
        or limits.allow_network_access is not None
        or limits.allowed_networks is not None
        or limits.max_gpus is not None
    ):
        return "guardrails of a workflow can limit max_execution_time, not memory, GPUs or network"
    return "guardrails of a workflow have no privacy rules" if policy.privacy else ""


class StepGuards:
    """The guards of one run. A step obeys its own guardrails and those of every step and workflow around it."""

    def __init__(self, definition: Definition) -> None:
        self._outermost = definition.form.guardrails
        self._policies: dict[int, Policy] = {}
        """By the identity of a step's form."""
        self._guards: dict[int, Guard] = {}
        self._collect(definition.steps, self._outermost, definition)

    def _collect(self, steps: tuple[Step, ...], around: Policy | None, definition: Definition) -> None:
        for step in steps:
            # A sub-workflow may be named twice; then its steps obey what is around both places.
            policy = _both(_both(around, step.form.guardrails), self._policies.get(id(step.form)))
            if policy is not None:
                self._policies[id(step.form)] = policy
            for block in step.blocks:
                self._collect(block, policy, definition)
            if isinstance(step.config, SubWorkflow):
                child = definition.children[reference_of(step.config)]
                self._collect(child.steps, _both(policy, child.form.guardrails), child)

    def _policy(self, step: Step) -> Policy | None:
        return self._policies.get(id(step.form), self._outermost)

    def of(self, step: Step) -> Guard | None:
        """Return the guard of a step; None where there are no guardrails for it."""
        policy = self._policy(step)
        if policy is None:
            return None
        # One for each set of rules, so that what is counted is counted over all attempts.
        return self._guards.setdefault(id(policy), Guard(compile_policy(policy)))

    def timeout_s(self, step: Step) -> float | None:
        """Return how long a step may take."""
        policy = self._policy(step)
        limit = policy.limits.max_execution_time if policy is not None else None
        return min((each for each in (limit, step.form.timeout_s) if each is not None), default=None)


_STRICTNESS = ("allow", "ask", "deny")


def _both(outer: Policy | None, inner: Policy | None) -> Policy | None:
    """Return a policy that is at least as strict as each of two."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    times = [each.limits.max_execution_time for each in (outer, inner)]
    shortest = min((each for each in times if each is not None), default=None)
    code: list[CodeRule] = [*outer.code, *inner.code]
    return inner.model_copy(
        update={
            "default": _stricter(outer.default, inner.default),
            "strict": outer.strict or inner.strict,
            "limits": inner.limits.model_copy(update={"max_execution_time": shortest}),
            "read_only": outer.read_only or inner.read_only,
            "destructive": _stricter(outer.destructive, inner.destructive),
            "other_kernels": _stricter(outer.other_kernels, inner.other_kernels),
            # Of several rules for a tool the first one that decides counts, so denials come first.
            "tools": sorted([*outer.tools, *inner.tools], key=lambda rule: -_rank(rule.decision)),
            "code": code,
            "output": [*outer.output, *inner.output],
        }
    )


def _stricter(one: str | None, other: str | None) -> str | None:
    known = [each for each in (one, other) if each is not None]
    return max(known, key=_rank, default=None)


def _rank(decision: str | None) -> int:
    return _STRICTNESS.index(decision) if decision is not None else -1
