"""PDF forms written by hand, object by object, so that tests decide how odd they are."""

from typing import Final

FONT: Final = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"


class Pdf:
    """Numbers objects and writes them with a cross-reference table."""

    def __init__(self) -> None:
        self._objects: list[bytes] = []

    def add(self, text: str | bytes = "null") -> str:
        """Add an object and return its reference."""
        self._objects.append(text.encode("latin-1") if isinstance(text, str) else text)
        return f"{len(self._objects)} 0 R"

    def set(self, reference: str, text: str) -> str:
        """Replace an object that was added before what it refers to."""
        self._objects[int(reference.split()[0]) - 1] = text.encode("latin-1")
        return reference

    def stream(self, entries: str, content: str = "") -> str:
        return self.add(f"<< {entries} /Length {len(content)} >>\nstream\n{content}\nendstream")

    def written(self, root: str) -> bytes:
        out, places = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), list[int]()
        for number, text in enumerate(self._objects, 1):
            places.append(len(out))
            out += b"%d 0 obj\n%s\nendobj\n" % (number, text)
        start = len(out)
        out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(places) + 1)
        out += b"".join(b"%010d 00000 n \n" % place for place in places)
        out += b"trailer\n<< /Size %d /Root %s >>\nstartxref\n%d\n%%%%EOF\n" % (len(places) + 1, root.encode(), start)
        return bytes(out)


def appearance(pdf: Pdf, *states: str) -> str:
    drawn = {state: pdf.stream("/Type /XObject /Subtype /Form /BBox [0 0 20 20]", "0 0 10 10 re f") for state in states}
    return f"/AP << /N << {' '.join(f'/{state} {drawn[state]}' for state in states)} >> >>"


def widget(place: int, *entries: str) -> str:
    return f"<< /Type /Annot /Subtype /Widget /Rect [50 {place} 250 {place + 20}] /F 4 {' '.join(entries)} >>"


def document(pdf: Pdf, fields: list[str], pages: list[list[str]], extra: str = "", catalogue: str = "") -> bytes:
    """A document with these fields and, on its pages, these widgets."""
    font = pdf.add(FONT)
    tree = pdf.add()
    made = [
        pdf.add(f"<< /Type /Page /Parent {tree} /MediaBox [0 0 612 792] /Annots [{' '.join(widgets)}] >>")
        for widgets in pages
    ]
    pdf.set(tree, f"<< /Type /Pages /Kids [{' '.join(made)}] /Count {len(made)} >>")
    listed = f"/Fields [{' '.join(fields)}]"
    form = pdf.add(f"<< {listed} /DA (/Helv 0 Tf 0 g) /DR << /Font << /Helv {font} >> >> {extra} >>")
    return pdf.written(pdf.add(f"<< /Type /Catalog /Pages {tree} /AcroForm {form} {catalogue} >>"))


def claim() -> bytes:
    """Two pages: texts, one with what it is in its parent, a checkbox, radio buttons, choices, and what is fixed."""
    pdf = Pdf()
    name = pdf.add(widget(700, "/FT /Tx /T (name) /TU (Full name) /Ff 2 /MaxLen 40"))
    parent = pdf.add()
    street = pdf.add(widget(660, f"/T (street) /Parent {parent}"))
    city = pdf.add(widget(640, f"/T (city) /Parent {parent} /V (Oslo)"))
    pdf.set(parent, f"<< /T (address) /FT /Tx /DA (/Helv 10 Tf 0 g) /Kids [{street} {city}] >>")
    notes = pdf.add(widget(600, "/FT /Tx /T (notes) /Ff 4096"))
    date = '/AA << /F << /S /JavaScript /JS (AFDate_FormatEx\\("dd.mm.yyyy"\\);) >> >>'
    born = pdf.add(widget(580, f"/FT /Tx /T (born) {date}"))
    agree = pdf.add(widget(560, f"/FT /Btn /T (agree) /Ff 2 /V /Off /AS /Off {appearance(pdf, 'Ja', 'Off')}"))
    plan = pdf.add()
    basic = pdf.add(widget(540, f"/Parent {plan} /AS /Off {appearance(pdf, 'basic', 'Off')}"))
    pro = pdf.add(widget(520, f"/Parent {plan} /AS /Off {appearance(pdf, 'pro', 'Off')}"))
    pdf.set(plan, f"<< /FT /Btn /T (plan) /TU (Which plan) /Ff {1 << 15 | 2} /Kids [{basic} {pro}] >>")
    country = pdf.add(widget(700, f"/FT /Ch /T (country) /Ff {1 << 17 | 2} /Opt [[(NO) (Norway)] [(IT) (Italy)]]"))
    extras = pdf.add(widget(600, f"/FT /Ch /T (extras) /Ff {1 << 21} /Opt [(fast) (quiet) (cheap)]"))
    number = pdf.add(widget(560, "/FT /Tx /T (number) /Ff 1 /V (A-17)"))
    signature = pdf.add(widget(540, "/FT /Sig /T (signature)"))
    button = pdf.add(widget(520, f"/FT /Btn /T (reset) /Ff {1 << 16}"))
    fields = [name, parent, notes, born, agree, plan, country, extras, number, signature, button]
    first = [name, street, city, notes, born, agree, basic, pro]
    return document(pdf, fields, [first, [country, extras, number, signature, button]])


def xfa(*, is_hybrid: bool = False) -> bytes:
    """A form in XFA; a hybrid one has fields of its own as well."""
    pdf = Pdf()
    packet = pdf.stream("", "<xdp:xdp xmlns:xdp='http://ns.adobe.com/xdp/'/>")
    name = pdf.add(widget(700, "/FT /Tx /T (name)"))
    fields = [name] if is_hybrid else []
    return document(
        pdf, fields, [fields], extra=f"/XFA {packet}", catalogue="" if is_hybrid else "/NeedsRendering true"
    )


def signed() -> bytes:
    pdf = Pdf()
    name = pdf.add(widget(700, "/FT /Tx /T (name)"))
    value = pdf.add("<< /Type /Sig /Filter /Adobe.PPKLite /ByteRange [0 1 2 3] /Contents <00> >>")
    signature = pdf.add(widget(660, f"/FT /Sig /T (signature) /V {value}"))
    return document(pdf, [name, signature], [[name, signature]])


def plain() -> bytes:
    pdf = Pdf()
    tree = pdf.add()
    page = pdf.add(f"<< /Type /Page /Parent {tree} /MediaBox [0 0 612 792] >>")
    pdf.set(tree, f"<< /Type /Pages /Kids [{page}] /Count 1 >>")
    return pdf.written(pdf.add(f"<< /Type /Catalog /Pages {tree} >>"))


def endless() -> bytes:
    """Fields that are their own children."""
    pdf = Pdf()
    one = pdf.add()
    pdf.set(one, f"<< /T (a) /FT /Tx /Kids [{one}] >>")
    return document(pdf, [one], [[]])
