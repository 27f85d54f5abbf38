"""Whether a machine was fast enough to be believed."""

from specdecode_operator.replay.emulated.lateness import Lateness


def test_a_step_is_late_by_more_than_a_tenth_and_more_than_a_millisecond() -> None:
    lateness = Lateness()
    for step_s, late_s in ((0.008, 0.0009), (0.008, 0.0011), (0.1, 0.009), (0.1, 0.011)):
        lateness.add(step_s, late_s)
    assert (lateness.steps, lateness.late_steps) == (4, 2)


def test_a_machine_that_was_fast_enough_is_believed() -> None:
    lateness = Lateness()
    for index in range(1000):
        lateness.add(0.01, 0.005 if index % 25 == 0 else 0.0001)
    assert lateness.is_believable
    assert lateness.verdict() == "emulated: 1000 steps, 4.0 % of them late, 3.0 % longer in all"


def test_one_that_was_too_slow_is_told_so_and_what_to_do() -> None:
    lateness = Lateness()
    for index in range(300):
        lateness.add(0.01, 0.005 if index % 10 == 0 else -0.001)
        assert lateness.is_hopeless == (index >= 199)
    assert "10.0 % of them late, 5.0 % longer in all" in lateness.verdict()
    assert "too slow to be believed" in lateness.verdict()


def test_nothing_is_said_of_no_steps() -> None:
    assert Lateness().verdict() == "emulated: no step was run"
    assert Lateness().is_believable
