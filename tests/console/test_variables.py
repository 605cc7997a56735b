"""Variables and packages of live sessions: what a person sees of them, and that looking runs and changes nothing."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import Caller, held, until_said
from consoles import Place, events, opened_place

from belljar.environments import Environment
from belljar.kernels.variables import MAX_LOOK_BYTES
from belljar.settings import hash_key

pytestmark = pytest.mark.anyio

BOB = "bob-" + "b" * 30


@dataclass
class Looker:
    """An agent's server, and an operator who looks at its sessions, signed in once."""

    place: Place
    operator: httpx.AsyncClient

    @property
    def agent(self) -> Caller:
        return self.place.agent

    async def get(self, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
        answer = await self.operator.get(f"/api/v1/sessions/{path}", params=query or None)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def listed(self, session_id: str) -> dict[str, dict[str, Any]]:
        return {item["name"]: item for item in (await self.get(f"{session_id}/variables"))["items"]}


@asynccontextmanager
async def looking(environment: Environment, folder: Path, **chosen: Any) -> AsyncGenerator[Looker]:
    async with opened_place(environment, folder, **chosen) as place, place.operator() as operator:
        yield Looker(place, operator)


@pytest.fixture(scope="module")
async def looker(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Looker]:
    folder = tmp_path_factory.mktemp("variables")
    async with looking(default_environment, folder, api_keys=[f"bob:sha256:{hash_key(BOB)}"]) as opened:
        yield opened


PLAIN = """
import numpy as np, pandas as pd, datetime, decimal, pyarrow
text, count, share, is_on, nothing, long = 'hello', 42, 0.5, True, None, 'x' * 100_000_000
numbers, mean = [1, 2, 3], np.float64(2.5)
frame = pd.DataFrame({
    'city': ['Oslo', None, 'Bern', 'Rome'],
    'people': pd.array([709_037, 5, None, 2_748_109], dtype='Int64'),
    'share': [0.25, float('nan'), 1.5, -3.0],
    'seen': pd.to_datetime(['2024-05-01 12:00:00', None, '2023-01-02 00:00:00', '2024-01-01 00:00:00']),
    'size': pd.Categorical(['S', 'L', 'S', None], categories=['L', 'S']),
    'price': [decimal.Decimal('1.10'), 2, [1, 2], datetime.date(2024, 1, 2)],
}, index=['a', 'b', 'c', 'd'])
series = pd.Series([3, 1, 2], name='rank')
deep = pd.DataFrame({'v': [1, 2]}, index=pd.MultiIndex.from_tuples([('x', 1), ('y', 2)]))
grid = np.arange(6).reshape(2, 3)
million = np.arange(10_000_000.0)
wide = pd.DataFrame(np.zeros((3, 10_000)))
escaped = [{f'{n:03}' + '\\0' * 900: '\\0' * 900 for n in range(100)}] * 3
records = [{'name': 'Ada', 'born': 1815}, {'name': 'Alan', 'city': 'London'}]
days = [datetime.datetime(2024, 5, 2), None, datetime.datetime(2024, 5, 1)]
arrow = pyarrow.table({'n': [2, None, 1], 't': ['b', 'a', None], 'd': days, 'l': [[1], [], None]})
"""


async def test_shows_variables_and_rows_sorted_and_paged_in_bounds(looker: Looker) -> None:
    ran = await looker.agent.execute(PLAIN)
    assert ran.success, ran.error
    session_id = ran.session_id
    shown = await looker.listed(session_id)
    values = {name: item["value"] for name, item in shown.items() if item["value"] is not None}
    assert values == {
        "text": "hello",
        "count": "42",
        "share": "0.5",
        "is_on": "True",
        "nothing": "None",
        "long": "x" * 200,
        "mean": "2.5",
    }
    assert (shown["long"]["length"], shown["long"]["is_cut"], shown["numbers"]["length"]) == (100_000_000, True, 3)
    assert (shown["frame"]["type"], shown["frame"]["shape"]) == ("DataFrame", [4, 6])
    assert (shown["deep"]["shape"], shown["arrow"]["shape"]) == ([2, 1], [3, 4])
    assert shown["million"]["size_bytes"] == 80_000_000
    tables = {"frame", "series", "deep", "grid", "million", "wide", "records", "escaped", "arrow"}
    assert {name for name, item in shown.items() if item["has_rows"]} == tables

    path = f"{session_id}/variables"
    frame = await looker.get(f"{path}/frame/rows")
    assert [(column["name"], column["kind"]) for column in frame["columns"]] == [
        ("city", "text"),
        ("people", "number"),
        ("share", "number"),
        ("seen", "time"),
        ("size", "text"),
        ("price", "object"),
    ]
    assert frame["labels"] == ["a", "b", "c", "d"]
    assert frame["rows"][0] == ["Oslo", "709037", "0.25", "2024-05-01T12:00:00", "S", "1.10"]
    assert frame["rows"][1] == [None, "5", "nan", None, "L", "2"]
    assert [row[5] for row in frame["rows"][2:]] == ["list of 2", "2024-01-02"]
    orders = {order: (await looker.get(f"{path}/frame/rows", order=order))["labels"] for order in SORTED}
    assert orders == SORTED
    assert (await looker.get(f"{path}/series/rows", order="0:asc"))["labels"] == ["1", "2", "0"]
    assert (await looker.get(f"{path}/deep/rows"))["labels"] == ["x, 1", "y, 2"]
    grid = await looker.get(f"{path}/grid/rows", columns="1:3")
    assert ([column["position"] for column in grid["columns"]], grid["rows"]) == ([1, 2], [["1", "2"], ["4", "5"]])
    end = await looker.get(f"{path}/million/rows", offset=9_999_998, limit=500)
    assert (end["rows"], end["total_rows"], end["next"]) == ([["9999998.0"], ["9999999.0"]], 10_000_000, None)
    wide = await looker.get(f"{path}/wide/rows", columns="9990:10000", limit=1)
    assert ([column["name"] for column in wide["columns"]][-1], wide["total_columns"]) == ("9999", 10_000)
    assert wide["next"] == 1
    records = await looker.get(f"{path}/records/rows", order="1:desc")
    assert records["rows"] == [["Ada", "1815", None], ["Alan", None, "London"]]
    arrow = await looker.get(f"{path}/arrow/rows", order="2:asc")
    assert [column["kind"] for column in arrow["columns"]] == ["number", "text", "time", "object"]
    assert arrow["rows"][0] == ["1", None, "2024-05-01T00:00:00", "<ListType>"]
    assert (arrow["rows"][1][:2], arrow["rows"][2][:3]) == (["2", "b"], [None, "a", None])
    escaped = await looker.get(f"{path}/escaped/rows", columns="0:100")
    assert (escaped["rows"], escaped["next"]) == ([["<long text>"] * 100], 1)
    for query, status in WRONG:
        await looker.get(f"{path}/{query}", status)


SORTED = {
    "0:asc": ["c", "a", "d", "b"],
    "1:desc": ["d", "a", "b", "c"],
    "2:asc": ["d", "a", "c", "b"],
    "2:desc": ["c", "a", "d", "b"],
    "3:asc": ["c", "d", "a", "b"],
    "4:asc": ["b", "a", "c", "d"],
}
WRONG = [
    ("frame/rows?limit=501", 400),
    ("frame/rows?columns=0:101", 400),
    ("frame/rows?columns=5", 400),
    ("frame/rows?order=city", 400),
    ("frame/rows?order=99:asc", 400),
    ("million/rows?order=0:asc", 400),
    ("count/rows", 400),
    ("nowhere/rows", 404),
]

# Every hook that Python has for code of a class, of a metaclass, of a key, of an array that a library holds; each says
# so in a file when it runs.
HOSTILE = """
import datetime, sys, numpy as np, pandas as pd, pyarrow as pa
def caught(what, answer=None):
    def act(*_, **__):
        open('ran.txt', 'a').write(what + '\\n')
        return answer
    return act
HOOKS = ('__len__ __repr__ __str__ __sizeof__ __class__ __getattribute__ __getattr__ __dict__ __iter__ __getitem__ '
    '__bool__ __eq__ __lt__ __hash__ __format__ __array__ __array_interface__ __array_struct__ __array_ufunc__ '
    '__array_function__ __deepcopy__ __copy__ __reduce_ex__ __reduce__ __float__ __int__ __index__ __dir__ '
    '__del__ __instancecheck__ shape dtype columns index values iloc _mgr nbytes tolist item').split()
PROPERTIES = '__class__ __dict__ shape dtype columns index values iloc _mgr nbytes'.split()
def hooks(name):
    return {hook: property(caught(name + hook)) if hook in PROPERTIES else caught(name + hook, 0) for hook in HOOKS}
def arm(kind, name):  # once there are objects of it in frames and arrays, which numpy and pandas ask for all of these
    for hook, value in hooks(name).items():
        if hook not in ('__class__', '__dict__'): type.__setattr__(kind, hook, value)
BODY = {hook: property(caught(hook)) for hook in ('__class__', '__dict__')}
class Meta(type):
    __name__ = __mro__ = property(caught('meta name'))
    __hash__ = caught('meta hash', 1)
    __eq__ = caught('meta eq', False)
    __instancecheck__ = __subclasscheck__ = __getattribute__ = __repr__ = caught('meta')
Thing, Plain, Text = Meta('Thing', (), dict(BODY)), type('Plain', (), dict(BODY)), type('MyText', (str,), dict(BODY))
thing, one, texts = type.__call__(Thing), Plain(), Text('abc')
lists = type('MyList', (list,), hooks('list'))([1, 2])
whole = type('MyInt', (int,), hooks('int'))(3)
array = np.arange(3).view(type('MyArray', (np.ndarray,), {h: v for h, v in hooks('array').items() if h in
    ('__len__', '__repr__', '__sizeof__', '__getitem__', 'tolist', '__array_finalize__', '__iter__', '__eq__')}))
class MyFrame(pd.DataFrame): pass
sub = MyFrame({'a': [1]})
for hook in ('__len__', '__repr__', '__sizeof__', '__getitem__', 'iloc', 'columns', 'index', 'shape', 'dtypes'):
    setattr(MyFrame, hook, property(caught('frame' + hook)))
cells = pd.DataFrame({'o': [one, thing, 7], 'p': np.array([thing, None, 'x'], dtype=object)})
cells.attrs = {'deep': one}
index = pd.Series([1, 2], index=pd.Index([one, 'b'], dtype=object), name=texts)
arm(Thing, 'thing'); arm(Plain, 'plain'); arm(Text, 'text')
from pandas.api.extensions import ExtensionArray, ExtensionDtype
OURS = {h: property(caught('column' + h)) if h in ('dtype', 'nbytes') else caught('column' + h, 0) for h in
    '__len__ __getitem__ __iter__ __eq__ __repr__ dtype nbytes isna take copy argsort view'.split()}
class Dtype(ExtensionDtype):
    name, type = 'ours', int
class Column(ExtensionArray):
    dtype, ndim, shape, nbytes = Dtype(), 1, (2,), 16
    def __len__(self): return 2
    def __getitem__(self, item): return 1 if isinstance(item, int) else self
    def copy(self): return self
    def view(self, dtype=None): return self
    def take(self, *_, **__): return self
columns = pd.DataFrame({'a': pd.Series(Column()), 'b': [2, 1]})
labels = pd.Series([1, 2], index=pd.Index(Column()))
for hook, value in OURS.items(): setattr(Column, hook, value)
class Arrow(pa.ExtensionType):
    __arrow_ext_deserialize__ = classmethod(caught('arrow from bytes'))
    def __arrow_ext_serialize__(self): return b''
    def __arrow_ext_scalar_class__(self): return caught('arrow scalar', pa.ExtensionScalar)()
    __str__ = __repr__ = caught('arrow', '')
arrow = pa.table({'a': pa.ExtensionArray.from_storage(Arrow(pa.int64(), 'a'), pa.array([1, 2])), 'b': ['x', None]})
Zone = type('Zone', (datetime.tzinfo,), {hook: caught(hook) for hook in ('utcoffset', 'tzname', '__repr__')})
zoned = [{'at': datetime.datetime(2024, 5, 1, tzinfo=Zone())}]
fake = type('DataFrame', (), {**hooks('fake'), '__module__': 'pandas'})()
faked = type('Series', (), {'__module__': 'pandas.core.series'})()
faked._mgr = one
class Key(str):
    __hash__ = lambda self: hash('born')
    __eq__ = caught('key eq', False)
keyed = [{Key('k'): 1, 'born': 2}]
globals()[Key('k')] = 3
class Same:
    def __init__(self, name): self.name = name
    def __hash__(self): return hash(self.name)
    __eq__ = caught('same eq', False)
for name in ('keyed', 'cells', 'one'): globals()[Same(name)] = 1
named = type('Named', (), {})
named.__name__ = type('Name', (str,), {'__str__': caught('name', 'x'), '__getitem__': caught('item', 'x')})('Shown')
named = named()
sized = type('Sized', (list,), {'__sizeof__': list.sort})([one, one])
class Loud:
    def __del__(self): open('ran.txt', 'a').write('del\\n')
"""
CHANGED = """
cycle = Loud(); cycle.me = cycle; del cycle
sys.setprofile(lambda frame, *_: frame.f_code.co_name in ('_entry', 'table_of', 'cell_text') and caught('profile')())
"""


async def test_rows_are_filtered_and_columns_tell_what_they_hold(looker: Looker) -> None:
    ran = await looker.agent.execute(
        "import numpy as np, pandas as pd\n"
        "many = pd.DataFrame({'n': np.arange(20_000.0), 'city': np.tile(['Oslo', 'Bern', 'Rome', None], 5_000),\n"
        "    'day': pd.date_range('2026-01-01', periods=20_000, freq='min')})\n"
        "many.loc[::1000, 'n'] = None\nlists = [{'a': i, 'b': str(i % 3)} for i in range(100)]"
    )
    rows = f"{ran.session_id}/variables/many/rows"

    async def found(where: str, **more: Any) -> tuple[int, list[Any]]:
        page = await looker.get(rows, where=where, **more)
        return page["matching"], [row[0] for row in page["rows"][:2]]

    assert await found("0:>= 19,998") == (2, ["19998.0", "19999.0"])
    assert await found("0:>= 19998", order="0:desc", limit=1) == (2, ["19999.0"])
    assert (await found("0:="))[0] == 20
    assert await found("1:OSL", offset=1) == (5_000, ["4.0", "8.0"])
    assert (await found("2:< 2026-01-01 00:10"))[0] == 10
    assert (await found("any:rome"))[0] == 5_000
    assert await found("1:nowhere") == (0, [])
    assert (await looker.get(f"{ran.session_id}/variables/lists/rows", where="1:= 2"))["matching"] == 33
    for bad in ("x", "9:x", "0:" + "x" * 201, ":x"):
        assert (await looker.get(rows, 400, where=bad))["error"]["code"] == "invalid-argument"

    columns = (await looker.get(rows, summaries=1))["columns"]
    numbers, cities, days = (column["summary"] for column in columns)
    assert (numbers["count"], len(numbers["bins"]), sum(numbers["bins"])) == (5_000, 12, 5_000 - numbers["missing"])
    assert {one["text"] for one in cities["frequent"]} == {"Oslo", "Bern", "Rome"}
    assert days["least"] == "2026-01-01T00:00:00"
    page = (await looker.operator.get(f"/console/sessions/{ran.session_id}/variables/many?in=1&q=oslo")).text
    assert "rows 1 to 50 of 5,000 that fit" in page
    assert "From 5,000 rows, spread evenly" in page
    assert "q=oslo&amp;in=1" in page  # links to other parts keep what is looked for
    assert "No row fits" in (await looker.operator.get(f"/console/sessions/{ran.session_id}/variables/many?q=qq")).text


async def test_looking_runs_no_code_of_the_session(looker: Looker) -> None:
    ran = await looker.agent.execute(HOSTILE)
    assert ran.success, ran.error
    session_id = ran.session_id
    ran = await looker.agent.execute(CHANGED, session_id)
    assert ran.success, ran.error
    await looker.agent.execute("open('ran.txt', 'w').close()", session_id)
    names = "sorted(k for k in globals() if type(k) is str and k[0] != '_')"
    before = (await looker.agent.execute(names, session_id)).result

    shown = await looker.listed(session_id)
    types = {name: shown[name]["type"] for name in ("thing", "one", "lists", "sub", "cells", "fake", "named")}
    assert types == {
        "thing": "Thing",
        "one": "Plain",
        "lists": "MyList",
        "sub": "MyFrame",
        "cells": "DataFrame",
        "fake": "DataFrame",
        "named": "Shown",
    }
    plain = ("thing", "one", "lists", "texts", "whole", "array", "sub")
    assert {(shown[name]["value"], shown[name]["length"], shown[name]["has_rows"]) for name in plain} == {
        (None, None, False)
    }
    path = f"{session_id}/variables"
    cells = await looker.get(f"{path}/cells/rows", order="0:asc")
    assert sorted(map(str, cells["rows"])) == ["['7', 'x']", "['<Plain>', '<Thing>']", "['<Thing>', None]"]
    index = await looker.get(f"{path}/index/rows")
    assert (index["labels"], index["columns"][0]["name"]) == (["<Plain>", "b"], "<MyText>")
    assert (await looker.get(f"{path}/keyed/rows"))["rows"] == [["<keys of other types>"]]
    assert (await looker.get(f"{path}/columns/rows", order="1:asc"))["rows"] == [["<Column>", "1"], ["<Column>", "2"]]
    assert (await looker.get(f"{path}/zoned/rows"))["rows"] == [["2024-05-01T00:00:00 Zone"]]
    for name in ("fake", "faked", "sub", "array", "thing", "labels", "arrow"):
        await looker.get(f"{path}/{name}/rows", 400)

    assert (await looker.agent.execute("open('ran.txt').read()", session_id)).result == "''"
    assert (await looker.agent.execute(names, session_id)).result == before
    # And the file is written when one of them does run.
    assert "thing__len__" in (await looker.agent.execute("len(thing); open('ran.txt').read()", session_id)).result


async def test_looking_neither_uses_wakes_nor_waits_for_a_session(looker: Looker) -> None:
    session_id = await looker.agent.new_session()
    fresh = await looker.get(f"{session_id}/variables")
    assert (fresh["state"] in ("not started", "live"), fresh["items"]) == (True, [])  # one may wait in the pool
    await looker.agent.execute("x = 1\nnames = globals()\nfor n in range(100_000): names[f'v{n}'] = n", session_id)
    session = looker.place.runtime.sessions.find_open(session_id)
    assert session is not None
    used_at, count = session.lease.used_at, session.count
    began = time.monotonic()
    first = await looker.get(f"{session_id}/variables", limit=1000)
    assert time.monotonic() - began < 10
    assert (first["total"], first["items"][0]["name"], first["next"]) == (100_003, "x", 1000)
    last = await looker.get(f"{session_id}/variables", offset=100_002)
    assert ([item["name"] for item in last["items"]], last["next"]) == (["v99999"], None)
    assert (session.lease.used_at, session.count, session.watchers) == (used_at, count, set())
    assert session.is_idle

    running = await looker.agent.execute(held("go"), session_id, wait_s=0)
    await until_said(looker.place.runtime, running.execution_id, "held")
    busy = await looker.get(f"{session_id}/variables")
    assert (busy["state"], busy["items"][0]["name"], busy["items"][0]["type"]) == ("busy", "x", "")
    assert "look again" in busy["note"]
    refused = await looker.get(f"{session_id}/variables/x/rows", 409)
    assert refused["error"]["code"] == "busy"
    await looker.agent.release(session_id, "go")
    await looker.agent.ended(running.execution_id)


async def test_a_sleeping_session_tells_its_names_and_sleeps_on(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("asleep")
    async with looking(default_environment, folder, hibernate=True) as looker:
        ran = await looker.agent.execute("kept = 1")
        session = looker.place.runtime.sessions.find_open(ran.session_id)
        assert session is not None
        await looker.place.runtime.sessions.endings.hibernate(session, "was idle")
        told = await looker.get(f"{ran.session_id}/variables")
        assert (told["state"], [item["name"] for item in told["items"]]) == ("asleep", ["kept"])
        assert "does not wake" in told["note"]
        assert (await looker.get(f"{ran.session_id}/variables/kept/rows", 409))["error"]["message"]
        assert (await looker.get(f"{ran.session_id}/packages"))["pins"] == []
        assert looker.place.runtime.sessions.find_open(ran.session_id) is None


async def test_a_runner_that_lies_about_variables_is_cut_off(looker: Looker) -> None:
    session_id = await looker.agent.new_session()
    lie = (
        "import sys\n"
        "runner = next(module for name, module in sys.modules.items() if name.endswith('runner.variables'))\n"
        "runner.answer_variables = lambda *_: {'type': 'variables', 'total': 1, 'items': "
        "[{'name': 'n' * 150, 'type': 't', 'value': 'v' * 900}] * 1000}"
    )
    await looker.agent.execute(lie, session_id)
    assert MAX_LOOK_BYTES < 1000 * 1000
    told = await looker.get(f"{session_id}/variables")
    assert told["state"] == "busy"
    after = await looker.agent.execute("1", session_id)
    assert after.success
    assert "bytes about variables" in "".join(after.output)


async def test_personal_data_stays_tokens(
    default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("private")
    policy = folder / "policy.toml"
    policy.write_text(
        '[privacy]\nhide = ["email"]\nwhere = ["outputs"]\n[[output]]\ntext = "s3cret"\nreplace = "[hidden]"\n'
    )
    async with looking(default_environment, folder, policy=str(policy)) as looker:
        rows = "rows = [{'who': 'x' * 190 + ' ada.lovelace@example.com'}]"
        code = f"mail = 'ada.lovelace@example.com'\n{rows}\nkey = 's3cret'"
        ran = await looker.agent.execute(code)
        assert ran.success, ran.error
        shown = await looker.listed(ran.session_id)
        assert "ada" not in str(shown)
        assert shown["key"]["value"] == "[hidden]"
        rows = await looker.get(f"{ran.session_id}/variables/rows/rows")
        assert "ada" not in str(rows)
        assert rows["rows"][0][0].startswith("x" * 190)
        again = await looker.agent.execute("rows = rows * 3", ran.session_id)
        assert again.success, again.error
        told = await looker.get(f"{ran.session_id}/variables/rows/rows", summaries=1)
        assert told["columns"][0]["summary"]["frequent"]
        assert "ada" not in str(told)
        # Whether a row fits would tell it.
        refused = await looker.get(f"{ran.session_id}/variables/rows/rows", 409, where="0:ada")
        assert "not filtered" in refused["error"]["message"]


async def test_packages_are_listed_and_installed_as_a_person(looker: Looker) -> None:
    ran = await looker.agent.execute("1")
    session_id = ran.session_id
    packages = await looker.get(f"{session_id}/packages")
    found = {(item["name"], item["origin"]) for item in packages["items"]}
    assert ("pandas", "environment") in found
    assert packages["pins"] == []
    browser, path = looker.operator, f"/api/v1/sessions/{session_id}/packages"
    for wrong in ([], ["--index-url=x"], ["git+https://x"], ["a; echo {x}"], ["pandas; os_name == '{1}'"]):
        assert (await browser.post(path, json={"packages": wrong})).status_code == 400, wrong
    queued = await browser.post(path, json={"packages": ["pandas>=2"]})
    assert queued.status_code == 202, queued.text
    execution_id = queued.json()["execution_id"]
    async with events(browser, f"/api/v1/sessions/{session_id}/events") as happened:
        async for event in happened:
            if event["event"] == "ended" and event["data"]["execution"]["execution_id"] == execution_id:
                break
    entry = (await browser.get(f"/api/v1/executions/{execution_id}")).json()
    assert entry["code"] == "%pip install 'pandas>=2'"
    assert entry["author"]
    told = await looker.agent.execute("2", session_id)
    assert f"{entry['author']} ran a cell" in "".join(told.output)


async def test_another_owner_gets_what_an_unknown_session_gives(looker: Looker) -> None:
    ran = await looker.agent.execute("x = 1")
    async with looker.place.person(BOB) as bob:
        for path in ("variables", "variables/x/rows", "packages"):
            answers = [await bob.get(f"/api/v1/sessions/{one}/{path}") for one in (ran.session_id, "0" * 17)]
            assert [answer.status_code for answer in answers] == [404, 404]
        answer = await bob.post(f"/api/v1/sessions/{ran.session_id}/packages", json={"packages": ["pandas"]})
        assert answer.status_code == 404
        for page in ("variables", "variables/x", "packages"):
            assert (await bob.get(f"/console/sessions/{ran.session_id}/{page}")).status_code == 404
