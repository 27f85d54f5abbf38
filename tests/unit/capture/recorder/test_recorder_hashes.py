"""Block hashes, against the recipe written down plainly."""

import pytest

from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.capture.recorder.writer import Pace


def fnv1a(data: bytes) -> int:
    state = 14695981039346656037
    for byte in data:
        state = ((state ^ byte) * 1099511628211) % 2**64
    return state


def plainly(token_ids: list[int], block_size: int) -> list[int]:
    hashes: list[int] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        previous = hashes[-1] if hashes else 14695981039346656037
        block = b"".join(token.to_bytes(4, "little") for token in token_ids[end - block_size : end])
        hashes.append(fnv1a(previous.to_bytes(8, "little") + block))
    return hashes


def test_the_plain_recipe_is_fnv1a() -> None:
    # The vectors that the authors of FNV publish.
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a(b"foobar") == 0x85944171F73967E8


@pytest.mark.parametrize("scale", [1, 255, 256, 65_535, 65_536, 16_777_215, 16_777_216, 4_294_967_295 // 39])
@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 40])
def test_hashes_follow_the_recipe(scale: int, length: int) -> None:
    token_ids = [position * scale for position in range(length)]
    assert block_hashes(token_ids, 4, lambda: None) == plainly(token_ids, 4)


def test_equal_beginnings_have_equal_hashes() -> None:
    one = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 2, lambda: None)
    other = block_hashes([1, 2, 3, 4, 9, 6, 7, 8], 2, lambda: None)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_hashing_steps_aside_after_every_block() -> None:
    pauses: list[int] = []
    block_hashes([0] * 33, 4, lambda: pauses.append(1))
    assert len(pauses) == 8


def test_pace_sleeps_only_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    monkeypatch.setattr("time.sleep", slept.append)
    pace = Pace()
    pace.pause()
    now_s[0] = 1.0
    pace.pause()
    pace.pause()
    assert len(slept) == 1
    now_s[0] = 2.0
    pace.begin()
    pace.pause()
    now_s[0] = 3.0
    pace.is_relaxed = False
    pace.pause()
    assert len(slept) == 1
