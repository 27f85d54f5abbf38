"""Tokens that a grammar allows."""

from random import Random

import pytest

from specdecode_operator.replay.emulated.batch import Endings, allows, pick


def _row(*tokens: int) -> list[int]:
    row = [0] * 4
    for token in tokens:
        word = row[token // 32] | 1 << token % 32
        row[token // 32] = word - 2**32 if word >= 2**31 else word  # as a signed number, as vLLM has it
    return row


@pytest.mark.parametrize("token", [0, 31, 32, 95, 127])
def test_the_only_allowed_token_is_picked(token: int) -> None:
    row = _row(token)
    assert allows(row, token)
    assert not allows(row, token ^ 1)
    assert pick(row, Endings(stop=(3,), closing=(4,)), Random(0)) == token


def test_every_allowed_token_may_be_picked() -> None:
    row, random = _row(0, 31, 64, 100), Random(1)
    assert {pick(row, Endings(), random) for _ in range(300)} == {0, 31, 64, 100}


def test_the_end_comes_where_it_may_and_what_closes_comes_often() -> None:
    row, random = _row(7, 8, 9), Random(2)
    assert {pick(row, Endings(stop=(200, 8)), random) for _ in range(20)} == {8}
    closed = [pick(row, Endings(closing=(9,)), random) for _ in range(200)]
    assert closed.count(9) > 100


def test_nothing_is_picked_where_nothing_is_allowed() -> None:
    assert pick(_row(), Endings(stop=(1,)), Random(0)) is None
    assert pick([], Endings(), Random(0)) is None
    assert not allows([], 5)


def test_what_is_blank_is_picked_only_where_nothing_else_is_allowed() -> None:
    random = Random(3)
    endings = Endings(blank=frozenset({7, 100}))
    assert {pick(_row(7, 8, 50, 100), endings, random) for _ in range(100)} == {8, 50}
    assert pick(_row(7), endings, random) == 7
