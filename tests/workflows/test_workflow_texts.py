"""What is wrong with a workflow is told before anything runs, with its line; hostile texts do no harm."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from workflow_texts import code, condition, form, loop, parallel, tool, workflow

from belljar import hooks
from belljar.errors import BelljarError, InvalidArgument, WorkflowInvalid
from belljar.plugins import load_plugins
from belljar.policy.guard import Guard, compile_policy
from belljar.policy.rules import Policy
from belljar.toolbox.base import Catalogue, ServerCatalogue, ToolDefinition
from belljar.workflows import PRODUCT
from belljar.workflows.checks import Checker
from belljar.workflows.definition import OWN_TYPES, Definition, json_schema, step_types
from belljar.workflows.graph import as_mermaid, as_svg
from belljar.workflows.library import Library, digest_of, first_difference, texts_of
from belljar.workflows.source_text import read_text
from belljar.workflows.templates import TemplateFailed, rendered
from hostile_texts import slow_texts

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples"
ADD = ToolDefinition(
    "files",
    "read",
    input_schema={
        "type": "object",
        "properties": {"path": {"type": "string"}, "most": {"type": "integer"}},
        "required": ["path"],
    },
)


class Tools:
    async def catalogue(self, server: str = "", tool: str = "") -> Catalogue:
        return Catalogue({"files": ServerCatalogue("files", (ADD,))})


def library(folder: Path | None = None) -> Library:
    return Library(folder, {kind.name: kind for kind in OWN_TYPES})


async def checked(text: str, policy: Mapping[str, Any] = {}, folder: Path | None = None) -> Definition:
    definition = library(folder).from_text(text)
    guard = Guard(compile_policy(Policy.model_validate(policy)))
    await Checker(guard, "default", Tools()).check(definition)
    return definition


async def refusal(text: str, policy: Mapping[str, Any] = {}, folder: Path | None = None) -> str:
    with pytest.raises(WorkflowInvalid) as caught:
        await checked(text, policy, folder)
    return caught.value.message


# In order


async def test_the_format_of_the_guide_is_read_with_all_step_types():
    text = workflow(
        code("load", "total = 10\ntotal", retry={"times": 3, "delay_s": 1, "on": ["error", "timeout"]}, timeout_s=60),
        tool("look", "read", "files", path="{{ region }}.txt"),
        form("sure", "Send {{ load.result }} to {{ region }}?"),
        condition("decide", "{{ int(load.result) > threshold }}", [code("a", "1")], [code("b", "2")]),
        loop("each", "{{ [1, 2, 3] }}", [code("c", "item")]),
        parallel("both", [code("d", "1")], [code("e", "2")]),
        variables={"threshold": 2, "region": "north"},
        description="what a person reads",
    )
    definition = await checked(text)
    assert [step.name for step in definition.walk()] == [
        "load",
        "look",
        "sure",
        "decide",
        *"ab",
        "each",
        "c",
        "both",
        *"de",
    ]
    assert as_mermaid(definition).count("-->") == 15
    assert as_svg(definition).count("<rect") == 11


async def test_the_forms_of_the_original_are_read():
    text = """
workflows:
  - name: old
    version: "1.0"
    variables: {a: 1}
    guardrails: {read_only: true}
    steps:
      - {name: one, type: code_execution, config: {code: "1"}, on_error: skip, retry: {max_attempts: 3, delay: 2}}
"""
    (step,) = (await checked(text)).steps
    assert step.retry is not None
    assert (step.retry.times, step.retry.delay_s, step.form.on_error) == (2, 2, "skip")


async def test_the_examples_fit_the_published_schema():
    plugins = load_plugins(hooks, str(EXAMPLES / "plugins"), with_packages=False)
    plugins.add("workflows", PRODUCT.plugin())
    validator = Draft202012Validator(json_schema(step_types(plugins)))
    for path in EXAMPLES.glob("*.yaml"):
        assert [error.message for error in validator.iter_errors(read_text(path.read_text()).data)] == []
    wrong = {"name": "x", "steps": [{"name": "a", "type": "loop", "config": {"for": [1], "steps": [{"name": "b"}]}}]}
    assert not validator.is_valid(wrong)


async def test_a_key_named_on_is_no_boolean():
    text = "name: x\nsteps:\n- name: a\n  type: code_execution\n  config: {code: '1'}\n  retry: {times: 1, on: [error]}"
    (step,) = (await checked(text)).steps
    assert step.retry is not None
    assert step.retry.on == ["error"]


# Not in order


async def test_every_problem_is_told_with_its_line_and_a_hint():
    text = """name: faulty
variables: {limit: 1}
steps:
  - name: load
    type: code_execution
    config: {code: "x = ("}
  - name: load
    type: code_execution
    config: {code: "1"}
    on_error: {goto: nowhere}
  - name: decide
    type: condition
    config:
      if: "{{ lod.result > limit }}"
      then:
        - {name: inner, type: tool_call, config: {server: files, tool: raed, arguments: {}}}
  - name: again
    type: tool_call
    config: {server: files, tool: read, arguments: {pth: x}}
  - name: typo
    type: form
    config: {message: "{{ load.reslt }}"}
"""
    lines = (await refusal(text)).split("\n")
    assert [line.split(":")[1] for line in lines] == ["6", "7", "10", "14", "16", "19", "22"]
    assert "line 1 of its code is no Python" in lines[0]
    assert "load is the name of a step (line 4) already" in lines[1]
    assert "goto nowhere is no later step" in lines[2]
    assert "names 'lod'" in lines[3]
    assert "Did you mean load?" in lines[3]
    assert "did you mean 'read'?" in lines[4]
    assert "there is no parameter 'pth', did you mean 'path'?" in lines[5]
    assert "load has no 'reslt'" in lines[6]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: x\nsteps: []", "workflow:2: steps"),
        ("name: x\nsteps:\n- {name: a, type: code_exec, config: {code: '1'}}", "Did you mean code_execution?"),
        ("name: x\nsteps:\n- {name: a, type: code_execution, confg: {}}", "there is no key 'confg' here"),
        ("name: x\nsteps:\n- {name: a b, type: code_execution, config: {code: '1'}}", "name is 'a b'"),
        ("name: x\nsteps:\n- {name: for, type: code_execution, config: {code: '1'}}", "for is a word of the language"),
        ("name: x\nsteps:\n- {name: a, type: loop, config: {steps: []}}", "workflow:3"),
        ("name: x\nsteps:\n- {name: a, type: form, config: {}}", "a form needs a message"),
        ("- a\n- b", "a workflow is a mapping"),
        ("name: x\nsteps: [", "this is no YAML"),
        ("name: x\nname: y", "the key 'name' is there twice"),
        ("name: !!python/object:os.system x", "is not allowed here"),
        ("name: x\nvariables: {steps: 1}\nsteps:\n- {name: a, type: code_execution, config: {code: '1'}}", "steps is"),
    ],
)
async def test_a_text_that_does_not_fit_is_refused(text: str, problem: str):
    assert problem in await refusal(text)


async def test_code_is_no_template():
    found = await refusal(workflow(code("a", "1"), code("b", "print('{{ a.result }}')")))
    assert "code is no template" in found
    assert 'steps["a"]["result"]' in found


async def test_what_the_policy_denies_is_told_before_anything_runs():
    found = await refusal(workflow(code("a", "import socket")), {"code": [{"imports": ["socket"]}]})
    assert "the policy does not allow its code" in found
    found = await refusal(workflow(tool("a", "read", "files", path="x")), {"default": "deny"})
    assert "the policy does not allow it" in found


# Hostile


async def test_anchors_that_explode_are_counted_for_what_they_stand_for():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "values, those that aliases stand for included" in await refusal("\n".join(lines))
    assert "is part of itself" in await refusal("a: &a [*a]")


async def test_depth_and_size_are_bounded():
    assert "nested more than 64 deep" in await refusal("[" * 100_000)
    assert "bytes, the limit is" in await refusal("x" * 5_000_000)
    steps = "\n".join(f"- {{name: s{i}, type: code_execution, config: {{code: '1'}}}}" for i in range(10_001))
    assert "more than 10,000 steps" in await refusal(f"name: x\nsteps:\n{steps}")
    inner = [code("a", "1")]
    for level in range(10):
        inner = [loop(f"l{level}", [1], inner)]
    assert "steps are nested more than 8 deep" in await refusal(workflow(*inner))


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("[0,1,2,3,4,5,6,7,8,9].map(x, " * 8 + "1" + ")" * 8, "more than 2 s"),
        ("size(items.map(i, '" + "A" * 9_000 + "')) > 0", "more than 2 s"),
        ("+".join(["v"] * 4_000), "more than"),  # seconds or megabytes, whatever comes first
    ],
)
async def test_an_expression_that_takes_too_much_is_an_error_of_that_expression(expression: str, told: str):
    values = {"items": [*range(20_000)], "v": "v" * 200_000}
    with pytest.raises(TemplateFailed, match=told):
        await rendered(f"{{{{ {expression} }}}}", values)
    assert await rendered("{{ items.filter(i, i > 19998) }}", {"items": [1, 19_999]}) == [19_999]


async def test_the_values_of_a_text_are_bounded_together():
    with pytest.raises(TemplateFailed, match="262,144 bytes together"):
        await rendered(["{{ long }}"] * 1_000, {"long": "v" * 1_000})


async def test_expressions_give_plain_values():
    with pytest.raises(TemplateFailed, match="104,857,600 bytes"):
        await rendered("{{ load.result }}", {"load": {"result_bytes": 100 * 1024 * 1024}})
    assert await rendered("{{ {'a': {'b': '}}'}}['a']['b'] }}", {}) == "}}"
    assert await rendered("{{ n }} of {{ l }}", {"n": 1, "l": [1, "a"]}) == '1 of [1, "a"]'
    assert await rendered({"x": ["{{ n + 1 }}"]}, {"n": 1}) == {"x": [2]}
    # The same from the process that evaluates what is not small.
    times = "{{ l.map(x, [duration('90s'), timestamp('2026-01-02T03:04:05Z'), x]) }}"
    assert await rendered(times, {"l": [1.5]}) == [[90.0, "2026-01-02T03:04:05+00:00", 1.5]]
    with pytest.raises(TemplateFailed, match="no value under 'nothing'"):
        await rendered("{{ l.map(x, x.nothing) }}", {"l": [{}]})


async def test_sub_workflows_are_found_beside_their_file_and_nowhere_else(tmp_path: Path):
    (tmp_path / "inner.yaml").write_text(workflow(code("a", "1"), name="inner", variables={"region": "x"}))
    outer = {"name": "sub", "type": "workflow", "config": {"file": "inner.yaml", "variables": {"region": "y"}}}
    (tmp_path / "outer.yaml").write_text(workflow(outer))
    definition = library().file(tmp_path / "outer.yaml")
    assert [*texts_of(definition)] == [">file:inner.yaml"]
    again = library().from_record(definition.source.text, "", texts_of(definition))
    assert digest_of(again) == digest_of(definition)
    assert "cannot be named here" in await refusal(workflow(outer))
    for place in ("../outer.yaml", "/etc/passwd"):
        escaping = {"name": "sub", "type": "workflow", "config": {"file": place}}
        (tmp_path / "escaping.yaml").write_text(workflow(escaping))
        with pytest.raises(WorkflowInvalid, match="not beside its workflow"):
            library().file(tmp_path / "escaping.yaml")


async def test_a_cycle_of_sub_workflows_is_refused(tmp_path: Path):
    for name, other in (("one", "two"), ("two", "one")):
        step = {"name": "sub", "type": "workflow", "config": {"workflow": other}}
        (tmp_path / f"{name}.yaml").write_text(workflow(step, name=name))
    with pytest.raises(WorkflowInvalid, match="is a cycle"):
        library(tmp_path).by_name("one")
    with pytest.raises(InvalidArgument, match="did you mean 'one'"):
        library(tmp_path).by_name("onee")


def test_the_step_that_differs_is_named():
    before = library().from_text(workflow(code("a", "1"), code("b", "2")))
    assert first_difference(before, library().from_text(workflow(code("a", "1"), code("b", "3")))).startswith(
        "step b (line"
    )
    assert "step c" in first_difference(before, library().from_text(workflow(code("a", "1"), code("c", "2"))))
    assert first_difference(before, library().from_text(workflow(code("a", "1")))) == "step b is gone"


def test_json_is_read_as_it_is():
    assert read_text(json.dumps({"a": ["é\n\t/", 1.5, None, True, -3]})).data == {"a": ["é\n\t/", 1.5, None, True, -3]}


@pytest.mark.parametrize("before", ["", "name: a\nsteps: "], ids=["whole", "steps"])
def test_a_text_takes_no_more_than_three_times_as_long_for_twice_the_length(before: str) -> None:
    def parse(text: str) -> None:
        with suppress(BelljarError):
            read_text(f"{before}{text}")

    assert not slow_texts(parse)
