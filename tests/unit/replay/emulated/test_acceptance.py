"""How many drafted tokens are accepted."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from specdecode_operator.replay.emulated.engine_model import (
    Acceptance,
    Difficulty,
    Drafting,
    acceptance_from_json,
    from_rates,
)

RATES = (0.8, 0.6, 0.42, 0.3)
EASY = {"share": 0.25, "outcomes": [0, 0, 0, 1], "temperature": 0.0}
HARD = {"share": 0.75, "outcomes": [0, 1, 0, 0], "temperature": 0.0}
WARM = {"share": 1.0, "outcomes": [1, 0, 0, 0], "temperature": 1.0}
SECTION: dict[str, Any] = {
    "num_speculative_tokens": 2,
    "outcomes": [[0, 0], [2, 0], [2, 1], [2, 2]],
    "classes": [EASY, HARD],
}


def _drawn(model: Acceptance, difficulty: Difficulty, steps: int, width: int) -> list[tuple[int, int]]:
    drafting = Drafting(model, difficulty, Random(1))
    return [drafting.next(width) for _ in range(steps)]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_rates_come_out_at_each_position_also_of_shorter_drafts(width: int) -> None:
    model = from_rates(RATES)
    found = _drawn(model, model.classes[0], 20_000, width)
    assert {drafted for drafted, _ in found} == {width}
    for position in range(1, width + 1):
        seen = sum(accepted >= position for _, accepted in found) / len(found)
        assert seen == pytest.approx(RATES[position - 1], abs=0.012)
    assert model.rates(width) == pytest.approx(RATES[:width])


def test_a_longer_draft_goes_on_as_its_last_position_did() -> None:
    model = from_rates((0.8, 0.4))
    found = _drawn(model, model.classes[0], 20_000, 4)
    seen = [sum(accepted >= position for _, accepted in found) / len(found) for position in (1, 2, 3, 4)]
    assert seen == pytest.approx([0.8, 0.4, 0.2, 0.1], abs=0.012)


def test_a_drafter_that_finds_nothing_drafts_nothing() -> None:
    model = from_rates((0.5,), drafting=0.25)
    found = Counter(_drawn(model, model.classes[0], 20_000, 3 - 2))
    assert found[0, 0] / 20_000 == pytest.approx(0.75, abs=0.012)
    assert model.rates(1) == pytest.approx([0.5])


def test_a_request_is_easy_or_hard_throughout() -> None:
    model = acceptance_from_json(SECTION)
    random = Random(2)
    classes = [model.draw_class(None, random) for _ in range(4000)]
    assert sum(each.outcomes[-1] == 1 for each in classes) / 4000 == pytest.approx(0.25, abs=0.02)
    for each, accepted in ((model.classes[0], 2), (model.classes[1], 0)):
        assert set(_drawn(model, each, 50, 2)) == {(2, accepted)}
    assert model.rates(2) == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(("temperature", "outcomes"), [(0.0, {0, 1}), (0.3, {0, 1}), (0.8, {2}), (None, {2})])
def test_a_request_is_of_a_class_of_its_temperature(temperature: float | None, outcomes: set[int]) -> None:
    model = acceptance_from_json(SECTION | {"classes": [EASY, HARD, WARM]})
    random = Random(3)
    assert {model.classes.index(model.draw_class(temperature, random)) for _ in range(100)} == outcomes


def test_outcomes_hang_together_where_the_class_says_so() -> None:
    # After a full acceptance comes nothing, after nothing a full acceptance.
    rows = [[0, 0, 0, 1], [], [], [1, 0, 0, 0]]
    model = acceptance_from_json(SECTION | {"classes": [EASY | {"after": rows}]})
    assert _drawn(model, model.classes[0], 4, 2) == [(2, 2), (0, 0), (2, 2), (0, 0)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_speculative_tokens": 0}, "acceptance.num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "acceptance.num_speculative_tokens"),
        ({"outcomes": [[2, 3]]}, "acceptance.outcomes"),
        ({"outcomes": [[3, 3]]}, "acceptance.outcomes"),
        ({"outcomes": []}, "acceptance.outcomes"),
        ({"classes": []}, "acceptance.classes"),
        ({"classes": [EASY | {"share": 0}]}, "acceptance.classes"),
        ({"classes": [EASY | {"share": -1}]}, "acceptance.classes[0].share"),
        ({"classes": [EASY, HARD | {"outcomes": [1]}]}, "acceptance.classes[1].outcomes"),
        ({"classes": [EASY | {"outcomes": [0, 0, 0, 0]}]}, "acceptance.classes[0].outcomes"),
        ({"classes": [EASY | {"after": [[1, 0, 0, 0]]}]}, "acceptance.classes[0].after"),
        ({"classes": [EASY | {"ease": 1}]}, "acceptance.classes[0]"),
        ({"rates": [1]}, "unknown: rates"),
    ],
)
def test_a_wrong_section_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.").replace("[", r"\[")):
        acceptance_from_json(SECTION | change)


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.1,), (0.5, -0.1)])
def test_rates_that_rise_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must not rise"):
        from_rates(rates)
