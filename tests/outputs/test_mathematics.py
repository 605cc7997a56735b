"""LaTeX as MathML, and Markdown with it: what is set, what stays as it was written, and hostile formulas."""

import re

import pytest

from belljar.outputs.mathematics import MAX_FORMULA_CHARS, MAX_TEXT_CHARS, latex_html, markdown_html
from growth import TIMES, growth


def test_formulas_among_words_are_set() -> None:
    html = latex_html(r"Loss $x^2$ at 5\% \& <b>")
    assert html == (
        'Loss <math display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math> at 5% &amp; &lt;b&gt;'
    )
    displayed = (r"$$x$$", r"\[x\]", r"\begin{align}x\end{align}")
    assert all('<math display="block">' in (latex_html(text) or "") for text in displayed)
    assert latex_html("costs $5") is None


def test_what_sympy_shows_is_set() -> None:
    html = latex_html(r"$\displaystyle \int\limits_{0}^{\infty} \frac{e^{- x^{2}}}{x^{2} + 1}\, dx$") or ""
    assert all(part in html for part in ("<munderover><mo>∫</mo>", "<mfrac>", "<mo>∞</mo>", 'displaystyle="true"'))


@pytest.mark.parametrize(
    "formula",
    [
        r"\href{javascript:alert(1)}{x}",
        r"\text{<script>alert(1)</script>}",
        r"\style{position:fixed}{x}",
        r'\class{a" onclick="alert(1)}{x}',
        r'\color{red" onmouseover="alert(1)}{x}',
        r"\unicode{x3c}script\unicode{x3e}",
        r"\rule{1em}{10000em}\hspace{-9999em}",
        r"\text{&lt;img src=x onerror=alert(1)&gt;}",
    ],
)
def test_a_formula_becomes_known_elements_with_harmless_attributes_and_nothing_else(formula: str) -> None:
    html = latex_html(f"${formula}$")
    assert html is not None
    for tag in re.findall(r"<[^>]*>", html):
        assert re.fullmatch(r'</?m[a-z]+(?: [a-z]+="[a-zA-Z0-9.#+ -]*")*>', tag), tag
        assert not re.search(r'href|style=|class|on[a-z]+="|\d{3}', tag), tag


@pytest.mark.parametrize(
    "formula",
    [
        r"\newcommand{\x}{\x\x}\x",
        r"\def\x{\x\x}\x",
        "{" * 1_500 + "}" * 1_500,
        r"\frac",
        "x" * (MAX_FORMULA_CHARS + 1),
    ],
)
def test_a_formula_that_cannot_be_read_stays_as_it_was_written(formula: str) -> None:
    html = latex_html(f"${formula}$")
    assert html is None or f"<code>{formula}</code>" in html
    assert latex_html("$x$" * MAX_TEXT_CHARS) is None


@pytest.mark.parametrize(
    "part", ["$", "$a ", r"\(", r"\[", r"\begin{a}", "$x$", "$${", r"\frac", "x+", r"\text{", "^", "\\", "&", "`$"]
)
def test_time_to_set_formulas_grows_with_their_length(part: str) -> None:
    assert growth(latex_html, lambda count: f"${part * count}$") <= TIMES
    assert growth(markdown_html, lambda count: part * count) <= TIMES


def test_markdown_has_formulas_but_prices_and_code_are_none() -> None:
    html = markdown_html("Of $x$, for $5 and $6, `$y$` <b>\n\n$$\nz\n$$")
    assert html.count("<math") == 2
    assert "$5 and $6, <code>$y$</code> &lt;b&gt;" in html
