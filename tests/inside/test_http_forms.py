"""Forms on pages that are fetched over HTTP, filled in and sent by the module that sessions import."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import form_pages
import pytest
from form_code import run
from form_pages import Site

from belljar.environments import Environment

GOOD = {"name": "Ada", "mail": "ada@example.com", "country": "Norway", "terms": True}


@pytest.fixture
def site() -> Generator[Site]:
    with form_pages.served() as site:
        yield site


def opened(site: Site, more: str = "") -> str:
    return f"form = forms.open({site.url + '/moved'!r}, form='signup')\n{more}"


def test_a_page_says_what_it_asks_for(default_environment: Environment, tmp_path: Path, site: Site) -> None:
    schema, values, source = run(
        default_environment, tmp_path, opened(site, "show([form.schema, form.values, form.source])")
    )
    fields: dict[str, Any] = schema["properties"]
    assert schema["required"] == ["name", "mail", "country", "terms"]
    assert fields["name"] == {"type": "string", "title": "Full name", "minLength": 2, "maxLength": 40}
    assert fields["mail"] == {"type": "string", "title": "E-mail", "format": "email"}
    assert fields["age"] == {"type": "integer", "title": "Age", "minimum": 18, "maximum": 120}
    assert fields["born"] == {"type": "string", "title": "Born", "format": "date"}
    assert fields["secret"] == {"type": "string", "title": "Password", "writeOnly": True}
    assert fields["country"]["oneOf"] == [{"const": "NO", "title": "Norway"}, {"const": "IT", "title": "Italy"}]
    assert fields["langs"] == {"type": "array", "items": {"type": "string", "enum": ["no", "en", "it"]}}
    assert [each["title"] for each in fields["plan"]["oneOf"]] == ["Basic", "Pro"]
    assert [each["const"] for each in fields["news"]["items"]["anyOf"]] == ["daily", "weekly"]
    assert fields["terms"] == {"type": "boolean", "title": "I agree", "const": True}
    assert fields["cv"]["description"] == "the path of a file in the session; it takes .txt"
    assert fields["code"]["pattern"] == "^(?:[A-Z]{3})$"
    assert "outside" in fields
    assert not {"token", "fixed", "off", "do"} & fields.keys()
    assert values["plan"] == "basic"
    assert values["about"] == "first line"
    assert source == f"{site.url}/signup"


def test_a_form_is_sent_as_a_browser_sends_it_with_a_fresh_token_and_the_site_s_cookie(
    default_environment: Environment, tmp_path: Path, site: Site
) -> None:
    (tmp_path / "cv.txt").write_text("my life")
    more = {"age": "36", "langs": ["no", "it"], "plan": "Pro", "news": ["weekly"], "about": "a\nb", "cv": "cv.txt"}
    code = opened(
        site, f"form.fill({GOOD | more | {'secret': 'pw', 'code': 'ABC'}!r})\nshow(form.submit(button='Send'))"
    )
    receipt = run(default_environment, tmp_path, code)
    assert site.reads == 2
    (entries,) = site.sent
    token = dict(entries).pop("token")
    assert [entry for entry in entries if entry != ("token", token)] == [
        ("name", "Ada"),
        ("mail", "ada@example.com"),
        ("age", "36"),
        ("born", ""),
        ("secret", "pw"),
        ("country", "NO"),
        ("langs", "no"),
        ("langs", "it"),
        ("plan", "pro"),
        ("news", "weekly"),
        ("terms", "on"),
        ("about", "a\r\nb"),
        ("cv", ["cv.txt", "my life"]),
        ("code", "ABC"),
        ("fixed", "stays"),
        ("do", "send"),
        ("outside", "here"),
    ]
    assert receipt["outcome"] == "sent"
    assert receipt["answer"] == {
        "status": 200,
        "url": f"{site.url}/done",
        "redirects": [f"303 {site.url}/done"],
        "title": "Done",
        "text": "Thank you\nNumber 17",
    }
    assert receipt["fields"]["secret"] == {"value": "•••", "by": "code"}
    assert receipt["fields"]["plan"] == {"value": "pro", "by": "code"}
    assert receipt["fields"]["outside"] == {"value": "here", "by": "the form"}
    assert site.headers[0]["Referer"] == f"{site.url}/signup"
    assert site.headers[0]["Origin"] == site.url


def test_a_dry_run_sends_nothing_and_a_form_is_never_sent_twice_by_mistake(
    default_environment: Environment, tmp_path: Path, site: Site
) -> None:
    code = f"""
form.fill({GOOD!r})
dry = form.submit(dry_run=True)
first = form.submit()
show([dry, first['outcome'], refused(form.submit), form.submit(again=True)['outcome']])
"""
    dry, first, second, again = run(default_environment, tmp_path, opened(site, code))
    assert dry["outcome"] == "dry run"
    assert dry["would_send"]["url"] == f"{site.url}/signup?step=1"
    assert ["name", "Ada"] in dry["would_send"]["entries"]
    assert ["cv", "no file"] in dry["would_send"]["entries"]
    assert first == again == "sent"
    assert "already sent" in second[1]
    assert len(site.sent) == 2


def test_what_is_missing_or_wrong_is_told_and_nothing_is_sent(
    default_environment: Environment, tmp_path: Path, site: Site
) -> None:
    code = """
wrong = {'name': 'A', 'mail': 'ada', 'age': 17, 'born': '1.2.1990', 'code': 'abc', 'country': 'XX', 'terms': False}
try: form.fill(wrong)
except forms.InvalidValues as error: faults = error.faults
show([faults, form.missing(), refused(form.submit), refused(lambda: form.fill({'cv': 'none.txt'})),
      refused(lambda: form.fill({'token': 'mine'}))])
"""
    faults, missing, refusal, no_file, hidden = run(default_environment, tmp_path, opened(site, code))
    assert faults == {
        "name": "it has 1 characters, the least is 2",
        "mail": "'ada' is not an e-mail address",
        "age": "17 is less than 18",
        "born": "'1.2.1990' is not a date as YYYY-MM-DD",
        "code": "'abc' does not have the form three capitals",
        "country": "'XX' is not one of 'NO', 'IT'",
        "terms": "has to be ticked",
    }
    assert set(missing) == {"name", "mail", "country", "terms"}
    assert refusal[0] == "InvalidValues"
    assert no_file[1] == "none.txt cannot be read: No such file or directory"
    assert "'token' is not in the form" in hidden[1]
    assert site.sent == []


def test_a_page_that_has_changed_since_it_was_read_gets_nothing(
    default_environment: Environment, tmp_path: Path, site: Site
) -> None:
    first = opened(site, f"import pickle\npickle.dump(form.fill({GOOD!r}), open('form', 'wb'))\nshow(None)")
    run(default_environment, tmp_path, first)
    site.more = '<input name="salary" required>'
    again = "import pickle\nshow(refused(pickle.load(open('form', 'rb')).submit))"
    kind, said = run(default_environment, tmp_path, again)
    assert kind == "FormChanged"
    assert "has changed since it was read (new: salary); nothing was sent" in said
    assert site.sent == []


def test_what_the_site_answers_is_told_apart(default_environment: Environment, tmp_path: Path, site: Site) -> None:
    filled = f"form.fill({GOOD!r})\n"
    site.answer = "again"
    shown = run(default_environment, tmp_path, opened(site, f"{filled}show(form.submit())"))
    assert shown["outcome"] == "shown again"
    assert "That name is taken" in shown["answer"]["text"]

    # The token of another visitor is refused by the site.
    code = f"{filled}form._can_reread = False\nform._form.controls[0].value = 'forged'\n"
    code += (
        "try: form.submit()\nexcept forms.FormRefused as error: show([str(error), error.receipt['answer']['status']])"
    )
    said, status = run(default_environment, tmp_path, opened(site, code))
    assert status == 403
    assert "answered 403: Forbidden\nCSRF token missing or wrong" in said

    site.answer = "elsewhere"
    said = run(default_environment, tmp_path, opened(site, f"{filled}show(refused(form.submit))"))[1]
    assert "wants the form sent on to http://127.0.0.2:9; it was not" in said

    site.answer = "hang up"
    code = f"{filled}first = refused(form.submit)\nshow([first, refused(form.submit)])"
    first, second = run(default_environment, tmp_path, opened(site, code))
    assert first[0] == "FateUnknown"
    assert "already sent" in second[1]


def test_pages_without_the_one_form_are_refused_with_words(
    default_environment: Environment, tmp_path: Path, site: Site
) -> None:
    code = f"""
url = {site.url!r}
show([refused(lambda: forms.open(url + '/signup'))[1], refused(lambda: forms.open(url + '/signup', form='x'))[1],
      refused(lambda: forms.open(url + '/scripted'))[1], refused(lambda: forms.open(url + '/none'))[1],
      refused(lambda: forms.open('http://127.0.0.1:9/'))[1], refused(lambda: forms.open('ftp://x/y'))[1],
      refused(lambda: forms.open('no such file'))[1], refused(lambda: forms.open(3))[1],
      refused(lambda: forms.open('<form><input name=a></form>').fill({{'a': 1}}).submit())[1],
      refused(lambda: forms.open(url + '/find', browser='none'))[1]])
"""
    many, other, scripted, missing, away, ftp, no_file, number, no_address, browser = run(
        default_environment, tmp_path, code
    )
    assert "has 2 forms: choose one by form='1' with q; form='signup' with name, mail" in many
    assert "has no form 'x': choose one by" in other
    assert "has no form to fill in. It has scripts" in scripted
    assert "answered 404: not here" in missing
    assert "cannot be fetched" in away
    assert "no form that is known here" in ftp
    assert no_file == "no such file cannot be read: No such file or directory"
    assert number == "a int is no form: pass a path, a URL, or HTML"
    assert "pass url= where the form comes from a file or text" in no_address
    assert "through the toolbox, and this session has none" in browser


def test_forms_by_get_text_and_several_steps(default_environment: Environment, tmp_path: Path, site: Site) -> None:
    code = f"""
url = {site.url!r}
found = forms.open(url + '/find').fill({{'q': 'a b&c'}}).submit()
first = forms.open(url + '/steps').fill({{'one': '1'}})
first.submit()
second = first.next().fill({{'two': 'Å'}})
done = second.submit()
text = forms.open('<form action=/found><input name=q></form>', url=url).fill({{'q': 'x'}}).submit()
show([found['answer']['url'], second.schema['required'], done['answer']['text'], text['outcome']])
"""
    url, required, text, outcome = run(default_environment, tmp_path, code)
    assert url == f"{site.url}/found?q=a+b%26c"
    assert (required, text, outcome) == (["two"], "all done", "sent")
    assert site.sent == [[("q", "a b&c")], [("one", "1")], [("two", "Å")], [("q", "x")]]


def test_a_form_with_its_cookies_can_be_pickled_and_hostile_html_is_only_text(
    default_environment: Environment, tmp_path: Path, site: Site
) -> None:
    code = f"""
import pickle
sent = pickle.loads(pickle.dumps(form.fill({GOOD!r}))).submit()
odd = '<form><input name=a pattern="(" title="\\x1b[31m\\u202e"><select name=s>' + '<option>o' * 3000 + '<div>' * 9000
odd = forms.open(odd, url='http://x.test/').fill({{'a': 'x'}})
fields = odd.schema['properties']
show([sent['answer']['title'], fields['a'], len(fields['s']['enum']),
      refused(lambda: forms.open('<form>' + ''.join(f'<input name=n{{i}}>' for i in range(2001))))[1]])
"""
    title, field, options, many = run(default_environment, tmp_path, opened(site, code))
    assert title == "Done"
    assert "\x1b" not in str(field)
    assert options == 1
    assert "has 2,001 fields, the most is 2,000" in many


def test_where_lxml_is_missing_the_error_says_what_to_install(default_environment: Environment, tmp_path: Path) -> None:
    code = "sys.modules['lxml'] = None\nshow(refused(lambda: forms.open('<form><input name=a></form>')))"
    assert "%pip install lxml" in run(default_environment, tmp_path, code)[1]
