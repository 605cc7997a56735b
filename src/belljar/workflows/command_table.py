"""The table of `belljar workflow`'s commands, which lists of commands read without importing any of them."""

from belljar.cli import CommandEntry, CommandGroup

WORKFLOW = CommandGroup(
    "Lists of steps in YAML or JSON: run, validate, list, show, resume, answer, stop, graph.",
    {
        "run": CommandEntry(
            "belljar.workflows.commands:run_command",
            "Run a workflow: steps and their output go to stderr, the value of the last step to stdout.",
        ),
        "validate": CommandEntry(
            "belljar.workflows.commands:validate_command",
            "Check a workflow, or all of a file; exits with 2 and tells file, line and reason of what is wrong.",
        ),
        "schema": CommandEntry(
            "belljar.workflows.commands:schema_command", "Print the JSON Schema of workflow texts, for editors."
        ),
        "list": CommandEntry(
            "belljar.workflows.commands:list_command",
            "List the latest runs of workflows, and the workflows that have names.",
        ),
        "show": CommandEntry(
            "belljar.workflows.commands:show_command",
            "Show a run step by step: states, results, errors, and what it asks.",
        ),
        "resume": CommandEntry(
            "belljar.workflows.commands:resume_command",
            "Go on with a run that was interrupted, failed or was stopped; no finished step is run again.",
        ),
        "answer": CommandEntry(
            "belljar.workflows.commands:answer_command",
            "Answer the question of a run and go on with it; without fields it means yes.",
        ),
        "stop": CommandEntry(
            "belljar.workflows.commands:stop_command",
            "Stop a run: what runs of it is interrupted, and nothing more begins.",
        ),
        "graph": CommandEntry(
            "belljar.workflows.commands:graph_command", "Print the steps of a workflow as a Mermaid diagram."
        ),
    },
)
