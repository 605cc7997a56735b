"""An agent of Foundry that runs its Python in belljar: makes it, asks it one question, removes it again."""

import sys

from azure.ai.projects import AIProjectClient
from azure.ai.projects.models import MCPTool, PromptAgentDefinition
from azure.core.credentials import TokenCredential
from azure.identity import DefaultAzureCredential

from settings import KitSettings, read_settings

AGENT = "belljar-code-interpreter"
QUESTION = "Calculate the factorial of 10 using Python."
INSTRUCTIONS = (
    "You can run Python. Call launchShell once, keep its environmentId, and pass it to "
    "runPythonCodeInRemoteEnvironment. Variables and files stay between calls. Data comes in and goes out by URLs: "
    "data: URLs for small files, SAS URLs for large ones."
)


def ask(settings: KitSettings, question: str, credential: TokenCredential | None = None) -> str:
    """Make the agent, ask it a question, remove it, and return its answer."""
    interpreter = MCPTool(
        server_label="belljar",
        server_url=settings.mcp_url,
        project_connection_id=settings.connection_id,
        require_approval="never",
    )
    definition = PromptAgentDefinition(model=settings.model, instructions=INSTRUCTIONS, tools=[interpreter])
    with AIProjectClient(settings.endpoint, credential or DefaultAzureCredential()) as project:
        agent = project.agents.create_version(agent_name=AGENT, definition=definition)
        print(f"agent {agent.name}, version {agent.version}")
        try:
            with project.get_openai_client() as client:
                reference = {"name": agent.name, "version": agent.version, "type": "agent_reference"}
                response = client.responses.create(input=question, extra_body={"agent_reference": reference})
                return response.output_text
        finally:
            project.agents.delete_version(agent_name=agent.name, agent_version=agent.version)
            print("agent removed")


if __name__ == "__main__":
    print(ask(read_settings(), " ".join(sys.argv[1:]) or QUESTION))
