"""Objects take turns: one that changes by itself is asked often, others are found all the same."""

from specdecode_operator.api.key import Key
from specdecode_operator.handlers.turns import Turns

ROUND_S = 15.0


def keys(count: int) -> list[Key]:
    return [Key("team", str(number)) for number in range(count)]


def round_of(turns: Turns, present: list[Key], close: frozenset[Key]) -> list[Key]:
    """Look at all whose turn it is."""
    looked = turns.next(present)
    for key in looked:
        turns.looked(key, is_close=key in close)
    return looked


def test_a_few_that_change_by_themselves_are_looked_at_each_round() -> None:
    present, turns = keys(80), Turns(ROUND_S)
    close = frozenset(present)
    assert all(sorted(round_of(turns, present, close)) == sorted(present) for _ in range(3))
    assert turns.interval_s == 15.0


def test_with_many_the_interval_grows_and_not_the_work_and_nobody_is_passed_over() -> None:
    present, turns = keys(1000), Turns(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    looked = [round_of(turns, present, close) for _ in range(13)]
    assert max(map(len, looked)) == 80
    assert {key for each in looked for key in each} == close
    (interval,) = (sample.value for family in turns.collect() for sample in family.samples)
    assert interval == turns.interval_s == 195.0


def test_what_waits_for_nothing_is_looked_at_in_twenty_rounds_a_few_at_a_time() -> None:
    present, turns = keys(100), Turns(ROUND_S)
    round_of(turns, present, frozenset())
    looked = [round_of(turns, present, frozenset()) for _ in range(20)]
    assert max(map(len, looked)) == 5
    assert sorted(key for each in looked for key in each) == sorted(present)


def test_what_was_just_looked_at_comes_last_and_what_is_gone_not_at_all() -> None:
    present, turns = keys(40), Turns(ROUND_S)
    round_of(turns, present, frozenset())
    turns.looked(present[0], is_close=False)
    assert turns.next(present) == present[1:3]
    assert turns.next(present[3:]) == present[3:5]
    assert turns.next([]) == []
    assert turns.interval_s == ROUND_S
