"""Imports that the collector leaves alone."""

import gc

from belljar.cli.importing import at_once


def test_the_collector_rests_during_imports_and_passes_over_them_afterwards() -> None:
    before = gc.get_freeze_count()
    try:
        with at_once():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
