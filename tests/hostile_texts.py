"""Texts that parsers read slowly where they read anything twice, and which of them one takes too long for."""

from collections.abc import Callable, Container

from growth import TIMES, growth

TEXTS = (
    *" \n\r\"'\\<[({.-,:;=@#`!%*&?",
    *(
        "\x1b[",
        "\x1b[31m",
        '\\"',
        '"""',
        "<style",
        "<a ",
        "<!--",
        "![",
        "[a](",
        "**a",
        "_a*",
        "|a|\n",
        "> ",
        "[a]: b\n",
    ),
    *(
        "[]",
        "{},",
        "x,",
        "a.",
        "a;",
        "a?\n",
        "!a\n",
        "%a\n",
        "a=!b\n",
        "%%a\n",
        "@a\n",
        "\\\n",
        "f'{",
        "not ",
        "lambda:",
    ),
    *("- ", "- a\n", "a: ", "&a a\n", "*a ", "? ", '  File "a", line 1\n', "----> 1 a\n", "a\r", "a\b"),
)


def slow_texts(
    parse: Callable[[str], object], *, spared: Container[str] = (), longest: int = 16_384
) -> dict[str, float]:
    """Return the texts of which twice as much takes more than three times as long, with how many times as long."""
    texts = [text for text in TEXTS if text not in spared]
    return {text: factor for text in texts if (factor := growth(parse, lambda n, text=text: text * n, longest)) > TIMES}
