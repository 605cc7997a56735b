"""Code that uses the module `forms`, run by the Python that sessions have, and what it shows as JSON.

One process imports everything and forks for each piece of code: starting Python and importing pypdf and lxml takes a
second.
"""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from belljar.environments import Environment
from belljar.inside import MODULES

LOOP = f"""
import json, os, sys, tempfile, traceback
sys.path.insert(0, {str(MODULES)!r})
import forms, forms.browser, forms.http, forms.pdf
import lxml.html, pypdf, urllib.request

def refused(call):
    try: call()
    except forms.FormError as error: return [type(error).__name__, str(error)]

def run(task, out):
    os.chdir(task['folder'])
    with tempfile.TemporaryFile() as said, open(os.devnull, 'wb') as nothing:
        said.write(task['said'].encode())
        said.seek(0)
        os.dup2(said.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        sys.stdin = open(0, closefd=False)
        def show(value): out.write(json.dumps(dict(shown=value)).encode())
        exec(task['code'], dict(forms=forms, refused=refused, show=show, os=os, sys=sys, __name__='__main__'))

for line in sys.stdin:
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if not child:
            try: run(json.loads(line), out)
            except BaseException: out.write(json.dumps(dict(failed=traceback.format_exc())).encode())
            out.flush()
            os._exit(0)
        os.waitpid(child, 0)
        out.seek(0)
        print((out.read() or b'{{}}').decode(), flush=True)
"""


@cache
def _process(python: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([str(python), "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(environment: Environment, folder: Path, code: str, said: str = "") -> Any:
    """What the code shows; `said` is what a person types."""
    process = _process(environment.python)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"folder": str(folder), "code": code, "said": said}) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert "shown" in answer, answer.get("failed")
    return answer["shown"]
