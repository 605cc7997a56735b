from belljar.toolbox.base import MAX_RECORDS, CallLog, CallRecord, most_telling


def test_a_call_that_is_under_way_is_never_forgotten():
    ledger = CallLog()
    first = ledger.start("s", "slow")
    for _ in range(2 * MAX_RECORDS):
        ledger.finish(ledger.start("s", "quick"), "returned")
    records = ledger.records()
    assert len(records) == MAX_RECORDS
    assert (records[0].tool, records[0].state) == ("slow", "started")
    ledger.finish(first, "cancelled")
    assert ledger.records()[0].state == "cancelled"


def test_what_did_not_return_is_told_first_and_in_its_order():
    records = [CallRecord("s", str(n), "failed" if n in (1, 5) else "returned") for n in range(10)]
    assert [record.tool for record in most_telling(records, 4)] == ["1", "5", "8", "9"]
    assert most_telling(records, 20) == records
