"""What front ends are told of the language that a session speaks."""

from typing import Any

from belljar.attachments import Attached

PYTHON: dict[str, Any] = {
    "name": "python",
    "mimetype": "text/x-python",
    "file_extension": ".py",
    "pygments_lexer": "ipython3",
    "codemirror_mode": {"name": "ipython", "version": 3},
    "nbconvert_exporter": "python",
    "version": "3",
}


def language_of(attached: Attached) -> dict[str, Any]:
    """Python, in the version that runs; of other kernels only their name is known."""
    if attached.environment.startswith("kernel:"):
        name = attached.environment.removeprefix("kernel:")
        return {"name": name, "mimetype": "text/plain", "file_extension": ".txt", "version": ""}
    return {**PYTHON, "version": attached.python_version or PYTHON["version"]}
