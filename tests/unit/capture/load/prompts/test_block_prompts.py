"""Prompts that are made up from lengths and hashes."""

from array import array

from specdecode_operator.capture.load.prompts import BlockPrompts, Said, TokenIds
from specdecode_operator.capture.trace_reader import RecordedRequest
from tests.support.sequences import common_length

NOTHING = Said()


def request(prompt_tokens: int, *blocks: int) -> RecordedRequest:
    return RecordedRequest(
        arrival_ms=0,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        ttft_ms=1,
        chunk_tokens=array("I", [1]),
        gaps_ms=array("d"),
        block_hashes=array("Q", blocks) if blocks else None,
    )


def prompts(seed: int = 0, block_size: int = 8) -> BlockPrompts:
    return BlockPrompts(TokenIds(32_000), block_size, seed)


def test_prompts_have_in_common_the_blocks_whose_hashes_are_equal() -> None:
    made = prompts()
    one, other = made.make(request(30, 1, 2, 3), 0, NOTHING), made.make(request(41, 1, 2, 4, 5, 6), 1, NOTHING)
    assert (len(one), len(other)) == (30, 41)
    assert common_length(one, other) == 16
    assert made.make(request(30, 1, 2, 3), 0, NOTHING) == one


def test_what_is_no_full_block_is_of_one_request_alone() -> None:
    made = prompts()
    one, other = made.make(request(7), 0, NOTHING), made.make(request(7), 1, NOTHING)
    assert len(one) == len(other) == 7
    assert not set(one) & set(other)


def test_another_seed_has_nothing_in_common() -> None:
    one, other = (
        prompts(seed=1).make(request(16, 1, 2), 0, NOTHING),
        prompts(seed=2).make(request(16, 1, 2), 0, NOTHING),
    )
    assert one[:8] != other[:8]
    assert one[8:] != other[8:]


def test_ids_are_those_that_a_vocabulary_has_for_words() -> None:
    made = BlockPrompts(TokenIds(1000), 8, 0).make(request(8000, *range(1000)), 0, NOTHING)
    assert (min(made), max(made)) == (10, 989)


def test_more_hashes_than_tokens_make_no_longer_prompt() -> None:
    assert len(prompts().make(request(9, 1, 2, 3), 0, NOTHING)) == 9


def test_a_turn_begins_with_what_was_said_and_others_with_its_blocks_have_that_too() -> None:
    made = prompts()
    first = made.make(request(10, 1), 0, NOTHING)
    said = Said([*first, *range(100_000, 100_009)], blocks=1)
    # The answer ends within the third block.
    second = made.make(request(30, 1, 2, 3), 1, said)
    assert second[:19] == said.tokens
    assert len(second) == 30
    branch = made.make(request(40, 1, 2, 3, 4, 5), 2, NOTHING)
    assert common_length(second, branch) == 24


def test_a_turn_shorter_than_what_was_said_is_as_long_as_it_was() -> None:
    said = Said(list(range(100, 150)), blocks=1)
    assert prompts().make(request(20, 1, 2), 1, said) == list(range(100, 120))
