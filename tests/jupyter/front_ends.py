"""A front end as a test drives it, and kernels started from their kernelspecs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OnOutput = Callable[[dict[str, Any]], None]


class FrontEnd:
    """A client of a kernel, and what a cell made the kernel publish."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.questions: list[dict[str, Any]] = []

    def run(self, code: str, *, answer: str | None = "", on_output: OnOutput | None = None) -> "Ran":
        outputs: list[dict[str, Any]] = []

        def on_message(message: dict[str, Any]) -> None:
            outputs.append(message)
            if on_output is not None:
                on_output(message)

        def on_question(message: dict[str, Any]) -> None:
            self.questions.append(message["content"])
            if answer is not None:
                self.client.input(answer)

        reply = self.client.execute_interactive(code, output_hook=on_message, stdin_hook=on_question, timeout=60)
        return Ran(reply["content"], outputs)

    def ask(self, request: Callable[..., str], *arguments: Any) -> dict[str, Any]:
        message_id = request(*arguments)
        while True:
            reply = self.client.get_shell_msg(timeout=60)
            if reply["parent_header"]["msg_id"] == message_id:
                return reply["content"]


class Ran:
    """What came of a cell."""

    def __init__(self, reply: dict[str, Any], outputs: list[dict[str, Any]]) -> None:
        self.reply = reply
        self.outputs = outputs

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message["content"] for message in self.outputs if message["msg_type"] == kind]

    def text(self, name: str = "stdout") -> str:
        return "".join(content["text"] for content in self.of("stream") if content["name"] == name)

    @property
    def result(self) -> str:
        return self.of("execute_result")[0]["data"]["text/plain"]


@contextmanager
def started(name: str = "belljar", **options: Any) -> Iterator[tuple[FrontEnd, Any]]:
    """A kernel from its kernelspec: a front end, and the manager that started it."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name=name, startup_timeout=60, **options)
    try:
        yield FrontEnd(client), manager
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
