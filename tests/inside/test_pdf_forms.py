"""PDF forms, filled in by the module that sessions import."""

from pathlib import Path
from typing import Any

import pdf_forms
import pytest
from form_code import run

from belljar.environments import Environment

GOOD = {"name": "Ada", "agree": True, "plan": "pro", "country": "Italy"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "claim.pdf").write_bytes(pdf_forms.claim())
    return tmp_path


def test_a_form_says_what_it_asks_for(default_environment: Environment, folder: Path) -> None:
    read: dict[str, Any] = run(
        default_environment,
        folder,
        "form = forms.open('claim.pdf')\nshow([form.schema, form.missing(), form.notes, form.values, form.kind])",
    )
    schema, missing, notes, values, kind = read
    assert schema["properties"] == {
        "name": {"type": "string", "title": "Full name", "maxLength": 40},
        "address.street": {"type": "string"},
        "address.city": {"type": "string"},
        "notes": {"type": "string", "description": "may have several lines"},
        "born": {"type": "string", "description": "a date written as dd.mm.yyyy"},
        "agree": {"type": "boolean", "states": ["Off", "Ja"], "const": True},
        "plan": {"type": "string", "title": "Which plan", "enum": ["basic", "pro"]},
        "country": {
            "type": "string",
            "oneOf": [{"const": "NO", "title": "Norway"}, {"const": "IT", "title": "Italy"}],
        },
        "extras": {"type": "array", "items": {"type": "string", "enum": ["fast", "quiet", "cheap"]}},
    }
    assert schema["required"] == ["name", "agree", "plan", "country"]
    assert missing == {
        "name": "is required",
        "agree": "has to be ticked",
        "plan": "is required",
        "country": "is required",
    }
    assert values == {"address.city": "Oslo", "agree": False}
    assert notes == ["to be signed elsewhere: signature", "not to be changed: number"]
    assert kind == "pdf"


def test_all_kinds_of_fields_are_saved_and_read_back_with_what_they_look_like(
    default_environment: Environment, folder: Path
) -> None:
    code = f"""
form = forms.open('claim.pdf').fill({GOOD!r})
form.fill({{'address.street': 'Åvegen 1', 'notes': 'one\\ntwo', 'extras': ['fast', 'cheap']}}, by='the file')
receipt = form.save('out/filled.pdf')
again = forms.open('out/filled.pdf')
import pypdf
reader = pypdf.PdfReader('out/filled.pdf')
fields = reader.get_fields()
drawn = [str(kid.get_object()['/AS']) for kid in fields['plan'].raw_get('/Kids')] if '/Kids' in fields['plan'] else []
widgets = [one.get_object() for page in reader.pages for one in page['/Annots']]
name = next(one for one in widgets if one.get('/T') == 'name')
states = {{str(one.get('/T') or one['/Parent']['/T']): str(one['/AS']) for one in widgets if '/AS' in one}}
show([again.values, receipt, name['/AP']['/N'].get_data().decode('latin-1'), states, str(fields['plan']['/V'])])
"""
    values, receipt, drawn, states, plan = run(default_environment, folder, code)
    assert values == {
        "name": "Ada",
        "agree": True,
        "plan": "pro",
        "country": "IT",
        "address.street": "Åvegen 1",
        "address.city": "Oslo",
        "notes": "one\ntwo",
        "extras": ["fast", "cheap"],
    }
    assert "Ada" in drawn
    assert states == {"agree": "/Ja", "plan": "/pro"}
    assert plan == "/pro"
    assert receipt["outcome"] == "saved"
    assert receipt["fields"]["name"] == {"value": "Ada", "by": "code"}
    assert receipt["fields"]["address.street"]["by"] == "the file"
    assert receipt["fields"]["address.city"]["by"] == "the form"
    assert receipt["file"]["path"] == "out/filled.pdf"
    assert receipt["file"]["size"] == (folder / "out/filled.pdf").stat().st_size


def test_nothing_is_saved_while_a_required_value_is_missing(default_environment: Environment, folder: Path) -> None:
    code = """
form = forms.open('claim.pdf').fill({'name': 'Ada'})
said = refused(lambda: form.save('filled.pdf'))
dry = refused(lambda: form.submit(dry_run=True))
show([said, dry, os.path.exists('filled.pdf'), form.save('draft.pdf', is_draft=True)['outcome'], repr(form)])
"""
    said, dry, is_there, draft, shown = run(default_environment, folder, code)
    assert said[0] == dry[0] == "InvalidValues"
    assert "'country' is required, takes one of: NO (Norway), IT (Italy)" in said[1]
    assert not is_there
    assert draft == "saved as a draft"
    assert shown == "<pdf form claim.pdf, 9 fields, 3 missing: agree, plan, country>"


def test_values_that_do_not_fit_are_refused_together_and_none_is_filled_in(
    default_environment: Environment, folder: Path
) -> None:
    code = """
form = forms.open('claim.pdf')
wrong = {'name': 'x' * 41, 'plan': 'gold', 'agree': 'maybe', 'extras': ['fast', 'odd'], 'notes': {},
  'address.city': 'Rome'}
try: form.fill(wrong)
except forms.InvalidValues as error: faults = error.faults
kept = dict(form.values)
show([faults, kept, refused(lambda: form.fill({'nane': 'x'})), refused(lambda: form.fill({'full NAME': 3}))])
"""
    faults, values, unknown, labelled = run(default_environment, folder, code)
    assert faults == {
        "name": "it has 41 characters, the most is 40",
        "plan": "'gold' is not one of 'basic', 'pro'",
        "agree": "'maybe' is neither yes nor no",
        "extras": "'odd' is not one of 'fast', 'quiet', 'cheap'",
        "notes": "{} is not text",
    }
    assert values == {"address.city": "Oslo", "agree": False}
    assert unknown[1].startswith("'nane' is not in the form. Its fields are 'name', ")
    assert labelled is None


def test_xfa_signed_flat_and_broken_documents_are_refused_with_words(
    default_environment: Environment, folder: Path
) -> None:
    documents = {
        "xfa": pdf_forms.xfa(),
        "signed": pdf_forms.signed(),
        "plain": pdf_forms.plain(),
        "endless": pdf_forms.endless(),
        "cut": pdf_forms.claim()[:700],
        "noise": b"%PDF-1.7\n" + bytes(range(256)) * 40,
    }
    for name, content in documents.items():
        (folder / f"{name}.pdf").write_bytes(content)
    said = run(
        default_environment, folder, f"show({{n: refused(lambda: forms.open(n + '.pdf')) for n in {[*documents]!r}}})"
    )
    assert "is an XFA form, which only Adobe's programs" in said["xfa"][1]
    assert "is signed (signature): filling it in would break the signature" in said["signed"][1]
    assert "without form fields" in said["plain"][1]
    assert "has no field that could be filled in" in said["endless"][1]
    assert "cannot be read as a PDF form" in said["noise"][1]
    assert said["cut"] is not None


def test_a_document_with_xfa_and_fields_is_filled_in_and_loses_its_xfa(
    default_environment: Environment, folder: Path
) -> None:
    (folder / "hybrid.pdf").write_bytes(pdf_forms.xfa(is_hybrid=True))
    code = """
import pypdf
form = forms.open('hybrid.pdf').fill({'name': 'Ada Ł 漢'})
form.save('out.pdf')
root = pypdf.PdfReader('out.pdf').root_object['/AcroForm']
show([form.notes, '/XFA' in root, bool(root.get('/NeedAppearances')), forms.open('out.pdf').values])
"""
    notes, has_xfa, needs_viewer, values = run(default_environment, folder, code)
    assert notes == ["its XFA part is left out of the saved file"]
    assert not has_xfa
    assert needs_viewer
    assert values == {"name": "Ada Ł 漢"}


def test_a_form_can_be_pickled_with_its_values(default_environment: Environment, folder: Path) -> None:
    code = f"""
import pickle
form = pickle.loads(pickle.dumps(forms.open('claim.pdf').fill({GOOD!r}, by='a step')))
show([form.save('out.pdf')['fields']['name'], form.fingerprint == forms.open('claim.pdf').fingerprint])
"""
    assert run(default_environment, folder, code) == [{"value": "Ada", "by": "a step"}, True]


def test_where_pypdf_is_missing_the_error_says_what_to_install(default_environment: Environment, folder: Path) -> None:
    code = "sys.modules['pypdf'] = None\nshow(refused(lambda: forms.open('claim.pdf')))"
    assert run(default_environment, folder, code)[1].startswith("PDF forms take the package pypdf: %pip install pypdf")


def test_a_person_at_a_terminal_is_asked_field_by_field(default_environment: Environment, folder: Path) -> None:
    code = "form = forms.open('claim.pdf').ask({'name': 'Ada', 'country': 'Mars'})\nshow([form.values, form.given_by])"
    values, given_by = run(default_environment, folder, code, said="yes\ngold\npro\nnorway\n")
    assert values == {"address.city": "Oslo", "agree": True, "plan": "pro", "country": "NO", "name": "Ada"}
    assert given_by == {
        "address.city": "the form",
        "agree": "the person",
        "plan": "the person",
        "country": "the person",
        "name": "code",
    }


def test_a_dry_run_of_a_step_writes_nothing_and_the_real_one_has_who_gave_what(
    default_environment: Environment, folder: Path
) -> None:
    code = f"""
read = forms.read('claim.pdf', {{'name': 'Ada', 'plan': 'gold'}})
by = {{'name': 'variables', 'plan': 'the person'}}
dry = forms.fill('claim.pdf', {GOOD!r}, by=by, save='out.pdf', dry_run=True, fingerprint=read['fingerprint'])
is_there = os.path.exists('out.pdf')
done = forms.fill('claim.pdf', {GOOD!r}, by=by, save='out.pdf', fingerprint=read['fingerprint'])
other = refused(lambda: forms.fill('claim.pdf', {GOOD!r}, save='two.pdf', fingerprint='0' * 16))
show([read['missing'], read['values'], dry['outcome'], is_there, done['fields'], other])
"""
    missing, values, dry, is_there, fields, other = run(default_environment, folder, code)
    assert set(missing) == {"agree", "plan", "country"}
    assert values["name"] == "Ada"
    assert (dry, is_there) == ("dry run", False)
    assert fields["name"] == {"value": "Ada", "by": "variables"}
    assert fields["country"] == {"value": "IT", "by": "code"}
    assert other[0] == "FormChanged"
