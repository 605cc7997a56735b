"""A workflow with a step type of your own, and a guardrail of your own that stops one of its calls.

Both are plugins, single files in `examples/plugins`: `csv_profile_step.py` and `mail_domain.py`.
"""

import json
import os
import sys
from pathlib import Path

from belljar.cli import main as belljar

HERE = Path(__file__).parent


def main() -> None:
    """Run the workflow with the plugins and a mail server."""
    server = {"mail": {"command": sys.executable, "args": [str(HERE / "mail_server.py")]}}
    os.environ["BELLJAR_PLUGINS_DIRECTORY"] = str(HERE / "plugins")
    os.environ["BELLJAR_MCP_SERVERS"] = json.dumps(server)
    belljar(["workflow", "run", str(HERE / "11_custom_workflow.yaml")])


if __name__ == "__main__":
    main()
