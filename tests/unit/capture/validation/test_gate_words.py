"""What the measures say: a person reads it to find out what happened to a capture."""

from collections import Counter

import pytest

from specdecode_operator.capture.files.accounting import Accounting, Mismatch, gates
from specdecode_operator.capture.files.formats import Gate
from specdecode_operator.capture.files.totals import StepTotals, TraceTotals


@pytest.mark.parametrize(
    ("mismatches", "told"),
    [(0, ""), (2, ": a: lost; b: twice"), (5, ": a: lost; b: twice; and 3 more")],
    ids=["none", "all are named", "more than are named"],
)
def test_accounting_names_what_does_not_fit_and_counts_the_rest(mismatches: int, told: str) -> None:
    shown = [Mismatch("a", "lost"), Mismatch("b", "twice")] if mismatches else []
    accounting = Accounting(sent=3, engine=Counter(completed=3), mismatches=mismatches, shown=shown)
    found = gates(None, None, accounting, None)["accounting"]
    assert found == Gate(value=mismatches, limit=0, passed=not mismatches, why=f"{accounting.equation}{told}")


@pytest.mark.parametrize(
    ("accepted", "told"),
    [(400, "40 (10.0 %) were cut from last chunks"), (0, "0 were cut from last chunks")],
    ids=["some accepted", "none accepted"],
)
def test_cut_drafts_are_told_with_their_share(accepted: int, told: str) -> None:
    kept = accepted * 9 // 10
    trace, steps = TraceTotals(records=20, extra_tokens=kept), StepTotals(steps=1, accepted=accepted, num_spec_tokens=4)
    why = (
        f"{accepted} drafts accepted by the engine's counters, {kept} in the chunks: {told};"
        " each request can lose K at its end"
    )
    assert gates(trace, steps, None, None)["step_counters"] == Gate(
        value=accepted - kept, limit=4 * 20, passed=True, why=why
    )


def test_what_lies_before_what_it_follows_is_counted_in_both_files() -> None:
    found = gates(TraceTotals(backward=2), StepTotals(steps=1, backward=1), None, None)["clock"]
    why = "3 gaps, first tokens or steps that lie before what they follow"
    assert found == Gate(value=3, limit=0, passed=False, why=why)
