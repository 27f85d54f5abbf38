"""Files of a head: nothing outside the claim is read, and nothing of another shape is loaded."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdecode_operator.capture.recorder.head_loader import (
    NEW,
    OLD,
    HeadLoader,
    RefusedError,
    Update,
    check_configs,
    check_tensors,
    read_below,
)

CONFIG = {"hidden_size": 8, "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "/a"}}}


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    head = tmp_path / "claim/team/chat/head"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    (tmp_path / "secret").write_text("s")
    return tmp_path / "claim"


def test_file_of_a_head_is_read(claim: Path) -> None:
    assert read_below(claim, "team/chat/head/config.json", 10) == b"{}"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../secret", "name of a file"),
        ("team/../../secret", "name of a file"),
        ("team//chat/head/config.json", "name of a file"),
        ("/etc/passwd", "name of a file"),
        ("linked/chat/head/config.json", "linked"),
        ("team/chat/head/link.json", "link.json"),
        ("team/chat/head/pipe", "not a regular file"),
        ("team/chat/head", "not a regular file"),
        ("team/chat/head/absent", "No such file"),
        ("team/chat/head/large", "more than 10 bytes"),
    ],
)
def test_other_files_are_refused(claim: Path, path: str, why: str) -> None:
    head = claim / "team/chat/head"
    (claim / "linked").symlink_to(claim / "team")
    (head / "link.json").symlink_to(claim.parent / "secret")
    (head / "large").write_text("x" * 11)
    os.mkfifo(head / "pipe")
    with pytest.raises(RefusedError, match=why):
        read_below(claim, path, 10)


def written(**changes: object) -> bytes:
    return json.dumps({**CONFIG, **changes}).encode()


def test_heads_may_differ_in_how_they_were_made() -> None:
    of_another = {"algorithm": "eagle3", "verifier": {"name_or_path": "/b"}}
    check_configs(written(transformers_version="6", speculators_config=of_another), written())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (written(hidden_size=16), "hidden_size"),
        (written(extra=1), "extra"),
        (written(speculators_config={"algorithm": "dflash"}), "speculators_config"),
        (b"{", "invalid JSON"),
        (b"[" * 10**5, "invalid JSON"),
        (b"[]", "not an object"),
    ],
)
def test_heads_with_other_settings_are_refused(changed: bytes, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        check_configs(changed, written())


@dataclass(frozen=True)
class Tensor:
    """Shape and type of a tensor."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "bfloat16"


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ({}, "only in the current head"),
        ({"a": Tensor(), "b": Tensor()}, "b: only in the new head"),
        ({"a": Tensor((3, 2))}, "a: "),
        ({"a": Tensor(dtype="float32")}, "float32"),
    ],
)
def test_heads_with_other_tensors_are_refused(new: dict[str, Tensor], why: str) -> None:
    check_tensors({"a": Tensor()}, {"a": Tensor()})
    with pytest.raises(RefusedError, match=why):
        check_tensors(new, {"a": Tensor()})


def test_worker_that_loads_the_old_head_at_the_second_try_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = HeadLoader()
    update = Update(worker, Path("/drafts/heads"), "team/new/head", "ab" * 32, Path("/drafts/heads/team/old/head"))
    update.refused = ""
    worker.specdecode_update = update
    tries = iter([None, RuntimeError("busy"), None])

    def load(which: str) -> None:
        if (error := next(tries)) is not None:
            raise error

    monkeypatch.setattr(update, "load", load)
    assert worker.specdecode_load_head(NEW) == ""
    assert worker.specdecode_folder == update.folder
    assert worker.specdecode_load_head(OLD) == "RuntimeError: busy"
    assert worker.specdecode_folder == update.old_folder
