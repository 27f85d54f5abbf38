"""Texts that many objects have in common are kept once, and what only one has is not kept for ever."""

from specdecode_operator.cluster.cache import SharedTexts


def copy_of(text: str) -> str:
    """Return an equal text that is another object, as each reading of JSON makes."""
    return text.encode().decode()


def test_equal_texts_are_one_wherever_they_stand_and_the_value_is_what_it_was() -> None:
    texts, long = SharedTexts(), "x" * 10_000
    one = texts.share({"annotations": {"a": copy_of(long)}, "numbers": [1, 2.5, True, None]})
    other = texts.share({"a list": [copy_of(long)], copy_of(long): 0})
    assert one == {"annotations": {"a": long}, "numbers": [1, 2.5, True, None]}
    assert other == {"a list": [long], long: 0}
    assert one["annotations"]["a"] is other["a list"][0] is [*other][1]


def test_what_is_known_is_bounded_and_sharing_goes_on() -> None:
    texts, most = SharedTexts(), 0
    for number in range(100):
        texts.share([f"{number}" * 100_000, "x" * 20_000_000 if number == 50 else ""])
        most = max(most, texts.known_bytes)
    assert most <= 4 * 2**20
    assert texts.share(copy_of("after it")) is texts.share(copy_of("after it"))
