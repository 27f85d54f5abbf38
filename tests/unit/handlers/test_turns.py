"""Objects take turns: one that changes by itself is asked often, others are found all the same."""

from itertools import pairwise

from specdecode_operator.api.deployment import Key
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers.resync import ResyncOrder

ROUND_S = 15.0


def keys(count: int) -> list[Key]:
    return [Key("team", str(number)) for number in range(count)]


def round_of(
    turns: ResyncOrder, present: list[Key], close: frozenset[Key], with_policy: frozenset[Key] = frozenset()
) -> list[Key]:
    """Look at all whose turn it is."""
    looked = turns.next(present, 0.0)
    for key in looked:
        turns.looked(key, Requeue(is_close=key in close | with_policy, has_policy=key in with_policy))
    return looked


def test_a_few_that_change_by_themselves_are_looked_at_each_round() -> None:
    present, turns = keys(64), ResyncOrder(ROUND_S)
    close = frozenset(present)
    assert all(sorted(round_of(turns, present, close)) == sorted(present) for _ in range(3))
    assert turns.interval_s == 15.0


def test_with_many_the_interval_grows_and_not_the_work_and_nobody_is_passed_over() -> None:
    present, turns = keys(1000), ResyncOrder(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    looked = [round_of(turns, present, close) for _ in range(16)]
    assert max(map(len, looked)) == 64
    assert {key for each in looked for key in each} == close
    (interval,) = (sample.value for family in turns.collect() for sample in family.samples)
    assert interval == turns.interval_s == 240.0


def test_who_fills_a_namespace_makes_no_other_wait_and_does_not_wait_for_many_small_ones() -> None:
    few, small = [Key("few", "one"), Key("few", "two")], [Key(f"small-{number}", "one") for number in range(200)]
    present, turns = [*keys(800), *few, *small], ResyncOrder(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    looked = [round_of(turns, present, close) for _ in range(28)]
    assert {len(each) for each in looked} == {64}
    assert {key for each in looked for key in each} == close, "in twice the rounds of an average one, everybody"
    rounds = [number for number, each in enumerate(looked) if few[0] in each]
    assert max(after - before for before, after in pairwise([0, *rounds])) <= 8, "32 of 202 namespaces in each round"


def test_of_a_few_namespaces_a_small_one_is_looked_at_each_round() -> None:
    one = Key("small", "one")
    present, turns = [*keys(2000), one], ResyncOrder(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    assert all(one in round_of(turns, present, close) for _ in range(8))


def test_what_waits_for_nothing_is_looked_at_in_twenty_rounds_a_few_at_a_time() -> None:
    present, turns = keys(100), ResyncOrder(ROUND_S)
    round_of(turns, present, frozenset())
    looked = [round_of(turns, present, frozenset()) for _ in range(20)]
    assert max(map(len, looked)) == 5
    assert sorted(key for each in looked for key in each) == sorted(present)


def test_what_was_just_looked_at_comes_last_and_what_is_gone_not_at_all() -> None:
    present, turns = keys(40), ResyncOrder(ROUND_S)
    round_of(turns, present, frozenset())
    turns.looked(present[0], Requeue(is_close=False))
    assert turns.next(present, 0.0) == present[1:3]
    assert turns.next(present[3:], 0.0) == present[3:5]
    assert turns.next([], 0.0) == []
    assert turns.interval_s == ROUND_S


def test_with_a_policy_engines_are_asked_each_minute_however_many_there_are() -> None:
    """A look stands for a minute: from 400 objects on no policy ever saw enough of its window."""
    present, turns = keys(2000), ResyncOrder(ROUND_S)
    with_policy, close = frozenset(present[:600]), frozenset(present[600:])
    round_of(turns, present, close, with_policy)
    looked = [round_of(turns, present, close, with_policy) for _ in range(3)]
    assert sorted(key for each in looked for key in each if key in with_policy) == sorted(with_policy)
    assert [len(close.intersection(each)) for each in looked] == [20] * 3, "nor are the others forgotten"
    assert turns.interval_s == 15.0 * 1400 / 20


def test_a_few_with_a_policy_and_a_few_without_are_all_looked_at_each_round() -> None:
    present, turns = keys(64), ResyncOrder(ROUND_S)
    with_policy = frozenset(present[:32])
    close = frozenset(present[32:])
    assert all(len(round_of(turns, present, close, with_policy)) == 64 for _ in range(3))


def test_who_has_a_schedule_is_looked_at_when_it_is_due_whosever_turn_it_is() -> None:
    """With 2,000 objects each is looked at every eight minutes, which is later than a schedule may be."""
    present, turns = keys(2000), ResyncOrder(ROUND_S)
    for key in present:
        turns.looked(key, Requeue())
    last = present[-1]
    turns.looked(last, Requeue(due_at_s=1000.0))
    assert last not in turns.next(present, 999.0)
    assert turns.next(present, 1000.0).count(last) == 1
    turns.looked(last, Requeue(due_at_s=4600.0))
    assert last not in turns.next(present, 1000.0)
    assert last not in turns.next(present[:-1], 4600.0)


def test_what_no_longer_changes_by_itself_takes_no_turn_of_what_does() -> None:
    present, turns = keys(128), ResyncOrder(ROUND_S)
    round_of(turns, present, frozenset(present))
    assert turns.interval_s == 2 * ROUND_S
    for key in present[64:]:
        turns.looked(key, Requeue(is_close=False))
    assert turns.interval_s == ROUND_S


def test_an_odd_number_of_looks_is_shared_out_in_full() -> None:
    present, turns = keys(129), ResyncOrder(ROUND_S)
    with_policy, close = frozenset(present[:1]), frozenset(present[1:])
    round_of(turns, present, close, with_policy)
    assert {len(round_of(turns, present, close, with_policy)) for _ in range(4)} == {64}


def test_who_was_looked_at_by_time_alone_has_had_the_turn_of_its_namespace() -> None:
    small = [Key(f"small-{number}", "one") for number in range(32)]
    present, turns = [*keys(2000), *small], ResyncOrder(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    assert all(close.difference(keys(2000)) <= {*round_of(turns, present, close)} for _ in range(8))
