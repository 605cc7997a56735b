"""The variables of `.env`, under the names of the article or under the sample's older ones."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from dotenv import load_dotenv

_NAMES = {
    "endpoint": ("FOUNDRY_PROJECT_ENDPOINT", "AZURE_AI_PROJECT_ENDPOINT"),
    "model": ("FOUNDRY_MODEL_DEPLOYMENT_NAME", "AZURE_AI_MODEL_DEPLOYMENT_NAME"),
    "mcp_url": ("MCP_SERVER_URL",),
    "connection_id": ("MCP_PROJECT_CONNECTION_ID", "AZURE_AI_CONNECTION_ID"),
}


@dataclass(frozen=True, slots=True)
class KitSettings:
    """Where the project, the model and the pool are."""

    endpoint: str
    model: str
    mcp_url: str
    connection_id: str


def read_settings() -> KitSettings:
    """Return the settings, or end with the names of those that are missing."""
    load_dotenv(Path(__file__).with_name(".env"))
    values = {field: next(filter(None, map(os.environ.get, names)), "") for field, names in _NAMES.items()}
    missing = [_NAMES[field][0] for field, value in values.items() if not value]
    if missing:
        sys.exit(f"not set: {', '.join(missing)}. Copy .env.sample to .env and fill in the deployment's outputs")
    return KitSettings(**values)
