"""Jupyter's own tests for kernels, against ours."""

from pathlib import Path

import pytest

suite = pytest.importorskip("jupyter_kernel_test")


@pytest.fixture(scope="module", autouse=True)
def _kernel(installed: Path) -> None:
    """There before the first class is set up."""


class TestKernel(suite.KernelTests):
    kernel_name = "belljar"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples = ["1", "print('hello')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]
    code_generate_error = "raise ValueError"
    code_execute_result = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data = [
        {"code": "from IPython.display import HTML, display\ndisplay(HTML('<b>t</b>'))", "mime": "text/html"},
        {"code": "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()", "mime": "image/png"},
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
    # Help is printed in the cell: there is no pager in a session.
    test_pager = None
