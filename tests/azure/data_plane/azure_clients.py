"""Azure's own clients against one data plane: run by the Python of an environment that has them, and prints JSON.

Only the endpoint and the token provider are changed; the rest is as their documentation has it.
"""

import json
import sys
from pathlib import Path


def langchain(endpoint: str, key: str, folder: Path) -> dict[str, object]:
    from langchain_azure_dynamic_sessions import SessionsPythonREPLTool

    tool = SessionsPythonREPLTool(pool_management_endpoint=endpoint, access_token_provider=lambda: key)
    (folder / "local.csv").write_text("a,b\n1,2\n")
    told: dict[str, object] = {
        "value": tool.invoke("```python\n6 * 7\n```"),
        "failed": tool.invoke("1 / 0"),
        "figure": tool.invoke("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"),
    }
    uploaded = tool.upload_file(local_file_path=str(folder / "local.csv"), remote_file_path="sub/remote.csv")
    told["uploaded"] = [uploaded.filename, uploaded.size_in_bytes, uploaded.full_path]
    told["read"] = tool.invoke("print(open('/mnt/data/sub/remote.csv').read())")
    told["listed"] = [each.filename for each in tool.list_files()]
    told["downloaded"] = tool.download_file(remote_file_path="sub/remote.csv").read().decode()
    return told


def llama(endpoint: str, key: str, folder: Path) -> dict[str, object]:
    from llama_index.tools.azure_code_interpreter import AzureCodeInterpreterToolSpec

    spec = AzureCodeInterpreterToolSpec(pool_management_endpoint=endpoint, local_save_path=str(folder))
    spec.access_token_provider = lambda: key
    (folder / "local.csv").write_text("a,b\n1,2\n")
    (uploaded,) = spec.upload_file(local_file_path=str(folder / "local.csv"))
    figure = spec.code_interpreter("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    return {
        "value": spec.code_interpreter("6 * 7")["properties"]["result"],
        "failed": spec.code_interpreter("1 / 0")["properties"]["stderr"],
        "figure": figure["properties"]["result"],
        "saved": [path.suffix for path in folder.glob("*.png")],
        "uploaded": [uploaded.filename, uploaded.size_in_bytes, uploaded.file_full_path],
        "listed": [each.filename for each in spec.list_files()],
        "downloaded": spec.download_file_to_local("/mnt/data/local.csv").read().decode(),
    }


if __name__ == "__main__":
    name, endpoint, key, folder = sys.argv[1:]
    print(json.dumps({"langchain": langchain, "llama": llama}[name](endpoint, key, Path(folder))))
