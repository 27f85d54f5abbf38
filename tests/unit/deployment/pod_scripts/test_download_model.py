"""Download a model: the files fetched, and a reason for each failure."""

import errno
import json
import os
import shutil
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.model_jobs import DOWNLOADER
from specdecode_operator.deployment.pod_scripts.download_model import left_out, main
from tests.support.secret_forms import FORMS, SecretForm

COMMIT = "c" * 40
FILES = {
    "config.json": 1_000,
    "model.safetensors": 5_000,
    "pytorch_model.bin": 5_000,
    "original/consolidated.pth": 5_000,
}


class GatedRepoError(Exception):
    """As the hub's client names it."""


class RepositoryNotFoundError(Exception):
    """As the hub's client names it."""


class RevisionNotFoundError(Exception):
    """As the hub's client names it."""


class FakeHub(ModuleType):
    """As much of huggingface_hub as the download uses."""

    def __init__(self, failure: Exception | None = None, when: str = "download") -> None:
        super().__init__("huggingface_hub")
        self.failure, self.when = failure, when
        self.asked: list[dict[str, Any]] = []
        self.utils = SimpleNamespace(filter_repo_objects=_without)

    def HfApi(self) -> "FakeHub":  # noqa: N802
        return self

    def model_info(self, _model: str, *, revision: str | None, **_: Any) -> SimpleNamespace:
        if self.failure and self.when == "information":
            raise self.failure
        assert revision in (None, "v1")
        return SimpleNamespace(
            sha=COMMIT, siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in FILES.items()]
        )

    def snapshot_download(self, model: str, **given: Any) -> str:
        self.asked.append({"model": model, **given})
        if self.failure:
            raise self.failure
        return "somewhere"


def _without(names: list[str], ignore_patterns: list[str]) -> list[str]:
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in ignore_patterns)]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, hub: FakeHub, *arguments: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    message = folder / "message"
    code = main(["--model=acme/open", f"--cache={folder / 'hub'}", f"--message={message}", *arguments])
    return code, json.loads(message.read_text())


def test_downloaded_commit_is_the_termination_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = FakeHub()
    assert run(monkeypatch, tmp_path, hub, "--revision=v1") == (0, {"commit": COMMIT})
    (asked,) = hub.asked
    assert (asked["revision"], asked["cache_dir"]) == (COMMIT, str(tmp_path / "hub")), "all files are of one commit"
    assert _without(list(FILES), asked["ignore_patterns"]) == ["config.json", "model.safetensors"]


def test_pickles_are_downloaded_only_without_safetensors() -> None:
    head = ["config.json", "pytorch_model.bin", "medusa_lm_head.pt"]
    assert _without(head, list(left_out(head))) == head
    both = [*head, "model.safetensors"]
    assert _without(both, list(left_out(both))) == ["config.json", "model.safetensors"]


def test_volume_without_enough_space_is_reported_before_the_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    hub = FakeHub()
    code, answer = run(monkeypatch, tmp_path, hub)
    assert (code, answer["error"]["reason"], hub.asked) == (1, "NoSpaceLeft", [])
    assert "2 files" in answer["error"]["message"]


def test_files_already_downloaded_need_no_free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    snapshot = tmp_path / "hub" / "models--acme--open" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).touch()
    assert run(monkeypatch, tmp_path, FakeHub())[0] == 0


def test_only_old_incomplete_files_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--acme--open" / "blobs"
    blobs.mkdir(parents=True)
    for name, age_s in (("whole", 9000), ("left.1.incomplete", 9000), ("fetched.2.incomplete", 60)):
        (blobs / name).touch()
        os.utime(blobs / name, (time.time() - age_s,) * 2)
    assert run(monkeypatch, tmp_path, FakeHub())[0] == 0
    assert sorted(file.name for file in blobs.iterdir()) == ["fetched.2.incomplete", "whole"]


def _of_httpx() -> Exception:
    kind = type("ConnectError", (Exception,), {"__module__": "httpx"})
    error = RuntimeError("cannot reach the hub")
    error.__cause__ = kind("refused")
    return error


FAILURES = [
    (GatedRepoError("x"), "information", "ModelGated", "is gated"),
    (RepositoryNotFoundError("x"), "information", "ModelNotFound", "does not exist"),
    (RevisionNotFoundError("x"), "information", "RevisionNotFound", "no such revision"),
    (OSError(errno.ENOSPC, "No space left on device"), "download", "NoSpaceLeft", "volume is full"),
    (OSError(errno.EROFS, "Read-only file system", "/models/hub/x"), "download", "VolumeNotWritable", "/models/hub/x"),
    (PermissionError(errno.EACCES, "Permission denied", "/models"), "download", "VolumeNotWritable", str(os.getuid())),
    (ConnectionResetError("reset"), "download", "HubUnreachable", "reset"),
    (_of_httpx(), "information", "HubUnreachable", "cannot reach the hub"),
    (ZeroDivisionError("a defect"), "download", "DownloadFailed", "a defect"),
]


@pytest.mark.parametrize("case", FAILURES, ids=[f"{type(case[0]).__name__}-{case[2]}" for case in FAILURES])
def test_each_download_failure_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: tuple[Exception, str, str, str]
) -> None:
    failure, when, reason, words = case
    code, answer = run(monkeypatch, tmp_path, FakeHub(failure, when))
    assert (code, answer["error"]["reason"]) == (1, reason)
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(("status", "reason"), [(401, "ModelGated"), (403, "ModelGated"), (503, "HubUnreachable")])
def test_hub_http_status_decides_the_failure_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, reason: str
) -> None:
    failure = Exception("refused")
    failure.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    assert run(monkeypatch, tmp_path, FakeHub(failure))[1]["error"]["reason"] == reason


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_shortened_hub_errors_leak_no_part_of_a_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: SecretForm
) -> None:
    """The script shortens it without masking, and the operator masks what came of it."""
    for length in range(200 - len(form.text) - 4, 204, 9):
        failure = ConnectionResetError(
            f"{'reset ' * 40}"[: max(length, 0)] + f" {form.text} and more{' and more' * 90}"
        )
        _, answer = run(monkeypatch, tmp_path, FakeHub(failure))
        blocked = DOWNLOADER.read({"exitCode": 1, "message": json.dumps(answer)})
        assert isinstance(blocked, Blocked)
        assert "ConnectionResetError" in blocked.message
        assert form.leaks_in(blocked.message) is None, blocked.message
