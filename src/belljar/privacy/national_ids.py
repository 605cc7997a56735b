"""The national ids of people, by python-stdnum's names: the shape in which each is written.

`detectors.py` looks for them and has python-stdnum check their digits and dates. A file of its own, because the rules,
which `detectors.py` reads, name ids too.
"""

_ID_GAP = r"[ \u00a0\u202f]?"
# By python-stdnum's names. A bare number with one check digit is valid by chance in one case of ten, so such ids are
# searched for only if the rules name them; the others are in COMMON.
SHAPES = {
    "at.vnr": rf"\d{{4}}{_ID_GAP}\d{{6}}",
    "au.tfn": rf"\d{{3}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{2,3}}",
    "be.nn": r"\d{2}[. ]?\d{2}[. ]?\d{2}[- ]?\d{3}[. ]?\d{2}",
    "bg.egn": r"\d{10}",
    "br.cpf": r"\d{3}\.?\d{3}\.?\d{3}-?\d{2}",
    "ca.sin": r"\d{3}[- ]?\d{3}[- ]?\d{3}",
    "ch.ssn": r"756[. ]?\d{4}[. ]?\d{4}[. ]?\d{2}",
    "cl.rut": r"\d{1,2}\.?\d{3}\.?\d{3}-[\dK]",
    "cn.ric": r"\d{17}[\dX]",
    "cz.rc": r"\d{6}/?\d{3,4}",
    "de.idnr": rf"\d{{2}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{3}}",
    "dk.cpr": r"\d{6}[- ]\d{4}",
    "ee.ik": r"[1-6]\d{10}",
    "es.dni": r"\d{8}[- ]?[A-Z]",
    "es.nie": r"[XYZ][- ]?\d{7}[- ]?[A-Z]",
    "fi.hetu": r"\d{6}[-+A-FU-Y]\d{3}[0-9A-Y]",
    "fr.nir": rf"[1-478]{_ID_GAP}\d{{2}}{_ID_GAP}\d{{2}}{_ID_GAP}[0-9][0-9AB]"
    rf"{_ID_GAP}\d{{3}}{_ID_GAP}\d{{3}}{_ID_GAP}\d{{2}}",
    "gb.nhs": r"\d{3}[- ]?\d{3}[- ]?\d{4}",
    "gr.amka": r"\d{11}",
    "hr.oib": r"\d{11}",
    "ie.pps": r"\d{7}[A-W][A-IW]?",
    "il.idnr": r"\d{7,8}-?\d",
    "in_.aadhaar": r"[2-9]\d{3}[- ]?\d{4}[- ]?\d{4}",
    "in_.pan": r"[A-Z]{3}[ABCFGHJLPT][A-Z]\d{4}[A-Z]",
    "is_.kennitala": r"\d{6}-?\d{4}",
    "it.codicefiscale": r"[A-Z]{6}[\dL-V]{2}[A-EHLMPRST][\dL-V]{2}[A-Z][\dL-V]{3}[A-Z]",
    "kr.rrn": r"\d{6}-?\d{7}",
    "lt.asmens": r"[3-6]\d{10}",
    "mx.curp": r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z0-9]\d",
    "nl.bsn": r"\d{4}[. ]\d{2}[. ]\d{3}|\d{9}",
    "no.fodselsnummer": r"\d{6}[- ]?\d{5}",
    "pl.pesel": r"\d{11}",
    "pt.cc": r"\d{8} ?\d ?[A-Z0-9]{2}\d",
    "ro.cnp": r"[1-9]\d{12}",
    "se.personnummer": r"(?:\d{2})?\d{6}[-+]?\d{4}",
    "sk.rc": r"\d{6}/?\d{3,4}",
    "tr.tckimlik": r"[1-9]\d{10}",
    "us.itin": r"9\d{2}-\d{2}-\d{4}",
    "us.ssn": r"\d{3}-\d{2}-\d{4}|\d{3} \d{2} \d{4}",
    "za.idnr": r"\d{6} ?\d{4} ?\d{2} ?\d|\d{13}",
}
NAMES = tuple(SHAPES)
COMMON = (
    *("be.nn", "br.cpf", "ch.ssn", "cn.ric", "de.idnr", "es.dni", "es.nie", "fi.hetu", "fr.nir"),
    *("it.codicefiscale", "kr.rrn", "mx.curp", "no.fodselsnummer", "pl.pesel", "se.personnummer", "us.itin", "us.ssn"),
)
"""Ids whose shape is hardly ever that of something else."""
