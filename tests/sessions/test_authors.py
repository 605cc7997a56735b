"""What is said of cells that are not the owner's."""

from belljar.sessions.session import Authors


def test_a_cell_of_somebody_else_says_whose_it_is() -> None:
    assert Authors().on_cell("ann") == "run by ann, who shares this session"


def test_the_owner_is_told_once_who_ran_cells_meanwhile() -> None:
    authors = Authors()
    for name in ("ann", "bob", "ann"):
        authors.on_cell(name)
    assert authors.on_cell("") == "ann and bob ran 3 cells in this session since your last one"
    assert authors.on_cell("") == ""


def test_one_cell_is_a_cell() -> None:
    authors = Authors()
    authors.on_cell("ann")
    assert authors.on_cell("") == "ann ran a cell in this session since your last one"


def test_an_owner_alone_is_told_nothing() -> None:
    assert Authors().on_cell("") == ""


def test_the_owner_is_told_who_used_widgets() -> None:
    authors = Authors()
    authors.use("")
    authors.use("ann")
    authors.use("ann")
    assert authors.on_cell("") == "ann used widgets in this session since your last one"
    authors.on_cell("ann")
    authors.use("ann")
    assert authors.on_cell("") == "ann ran a cell and used widgets in this session since your last one"
    authors.on_cell("ann")
    authors.use("bob")
    assert authors.on_cell("") == "ann ran a cell and bob used widgets in this session since your last one"
