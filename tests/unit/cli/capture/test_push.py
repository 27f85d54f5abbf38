"""`specdecode capture push`."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specdecode_operator.cli.capture.files import PushError, push, uploads
from specdecode_operator.cli.main import app
from tests.support.s3_server import BUCKET, KEYS, s3_server

obstore = pytest.importorskip("obstore", reason="the extra s3 is not installed: ./just setup installs it")

LARGE = b"0123456789abcdef" * (2**20 + 1)
"""More than one part of an upload."""


def write_capture(folder: Path, **contents: bytes) -> Path:
    """Write the files of a capture with their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, content in contents.items():
        (folder / f"{name}.jsonl").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        lines = content.count(b"\n") + (not content.endswith(b"\n"))
        files[f"{name}.jsonl"] = {"bytes": len(content), "lines": lines, "sha256": sha256}
    (folder / "manifest.json").write_text(json.dumps({"capture": folder.name, "files": files}))
    return folder


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return write_capture(tmp_path / "demo", trace=b"one\ntwo\n", client=b"three\n")


@pytest.fixture
def store() -> Any:
    return obstore.store.MemoryStore()


def held(store: Any) -> dict[str, bytes]:
    found = [each for page in obstore.list(store) for each in page]
    return {each["path"]: bytes(obstore.get(store, each["path"]).bytes()) for each in found}


def pushed(store: Any, folder: Path) -> dict[str, bool]:
    return {upload.key: is_new for upload, is_new in push(store, uploads(folder))}


def test_all_files_are_uploaded_and_the_manifest_is_last(store: Any, capture: Path) -> None:
    assert list(pushed(store, capture)) == ["client.jsonl", "trace.jsonl", "manifest.json"]
    assert held(store) == {each.name: each.read_bytes() for each in capture.iterdir()}


def test_existing_files_are_not_uploaded_again(store: Any, capture: Path) -> None:
    obstore.put(store, "trace.jsonl", b"one\ntwo\n")
    assert pushed(store, capture) == {"client.jsonl": True, "trace.jsonl": False, "manifest.json": True}
    assert not any(pushed(store, capture).values())


@pytest.mark.parametrize("name", ["trace.jsonl", "manifest.json"])
@pytest.mark.parametrize("size", ["same", "other"])
def test_existing_object_with_other_content_is_not_overwritten(store: Any, capture: Path, name: str, size: str) -> None:
    there = b"x" * (capture / name).stat().st_size if size == "same" else b"x"
    obstore.put(store, name, there)
    with pytest.raises(PushError, match=rf"{name}: exists with other content"):
        pushed(store, capture)
    assert held(store)[name] == there
    if name == "manifest.json":
        assert list(held(store)) == [name], "files of another capture would stand beside its manifest"


def test_file_changed_during_the_upload_leaves_no_manifest(store: Any, capture: Path) -> None:
    files = uploads(capture)
    (capture / "trace.jsonl").write_bytes(b"ONE\nTWO\n")
    with pytest.raises(PushError, match=r"trace\.jsonl: exists with other content"):
        list(push(store, files))
    assert "manifest.json" not in held(store)


def test_arms_keep_their_folders_and_manifests_are_last(store: Any, tmp_path: Path) -> None:
    for arm in ("off", "k3"):
        write_capture(tmp_path / arm / "1", trace=arm.encode())
    (tmp_path / "comparison.json").write_text("{}")
    assert list(pushed(store, tmp_path)) == [
        "k3/1/trace.jsonl",
        "off/1/trace.jsonl",
        "comparison.json",
        "k3/1/manifest.json",
        "off/1/manifest.json",
    ]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["capture", "push", *map(str, arguments)])


class TestFolder:
    """A folder that is no complete capture is refused before any request."""

    def refused(self, folder: Path) -> str:
        answer = run(folder, "s3://bucket/demo", "--endpoint-url", "http://127.0.0.1:1")
        assert answer.exit_code == 2
        return str(answer.stderr)

    def test_folder_without_a_manifest_is_refused(self, tmp_path: Path) -> None:
        assert "contains no manifest.json" in self.refused(tmp_path)

    def test_folder_with_a_changed_file_is_refused(self, capture: Path) -> None:
        (capture / "trace.jsonl").write_bytes(b"ONE\nTWO\n")
        assert "does not match its checksum" in self.refused(capture)

    def test_folder_with_a_missing_file_is_refused(self, capture: Path) -> None:
        (capture / "trace.jsonl").unlink()
        assert "trace.jsonl is missing" in self.refused(capture)

    @pytest.mark.parametrize("name", ["../x", "x\0", "x" * 253])
    def test_with_a_name_of_no_file(self, capture: Path, name: str) -> None:
        files = {name: {"bytes": 0, "lines": 0, "sha256": ""}}
        (capture / "manifest.json").write_text(json.dumps({"files": files}))
        assert "is not the name of a capture file" in self.refused(capture)

    def test_folder_with_a_compressed_file_is_refused(self) -> None:
        assert "is compressed" in self.refused(Path("tests/data/captures/ngram"))


@pytest.mark.parametrize(
    "destination",
    [
        "bucket/demo",
        "s3://",
        "s3://B/demo",
        "s3://bucket/a b",
        "s3://bucket/../x",
        "s3://bucket/./x",
        "https://bucket/x",
    ],
)
def test_a_wrong_destination_is_refused(capture: Path, destination: str) -> None:
    answer = run(capture, destination)
    assert answer.exit_code == 2
    assert "s3://BUCKET/PREFIX" in answer.stderr


@pytest.mark.parametrize("url", ["localhost:9000", "http://user:secret@host", "file:///x", "http://host/path"])
def test_a_wrong_endpoint_is_refused(capture: Path, url: str) -> None:
    answer = run(capture, "s3://bucket/demo", "--endpoint-url", url)
    assert answer.exit_code == 2
    assert "--endpoint-url" in answer.stderr
    assert "secret" not in answer.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.mark.long
class TestServer:
    """A real server of S3, with the credentials of the environment."""

    @pytest.fixture(autouse=True)
    def keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)

    @staticmethod
    def bucket(server: str) -> Any:
        return obstore.store.S3Store(BUCKET, endpoint=server, client_options={"allow_http": True})

    def test_push_uploads_all_files_once(self, server: str, capture: Path) -> None:
        write_capture(capture, trace=LARGE, client=b"three\n")
        arguments = (capture, f"s3://{BUCKET}/team/demo/", "--endpoint-url", server)
        first = run(*arguments)
        assert first.exit_code == 0, first.output
        assert "3 files, 3 uploaded, all verified" in first.stdout
        store = self.bucket(server)
        assert bytes(obstore.get(store, "team/demo/trace.jsonl").bytes()) == LARGE
        assert "3 files, 0 uploaded, all verified" in run(*arguments).stdout

    def test_endpoint_may_come_from_the_environment(
        self, server: str, capture: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        assert run(capture, f"s3://{BUCKET}/environment").exit_code == 0
        assert obstore.head(self.bucket(server), "environment/manifest.json")["size"]

    def test_push_resumes_after_a_failure(self, server: str, capture: Path) -> None:
        store = self.bucket(server)
        obstore.put(store, "broken/trace.jsonl", b"other")
        arguments = (capture, f"s3://{BUCKET}/broken", "--endpoint-url", server)
        failed = run(*arguments)
        assert failed.exit_code == 1
        assert "trace.jsonl: exists with other content" in failed.stderr
        with pytest.raises(FileNotFoundError):
            obstore.head(store, "broken/manifest.json")
        obstore.delete(store, "broken/trace.jsonl")
        answer = run(*arguments)
        assert answer.exit_code == 0
        assert "client.jsonl: already there" in answer.stdout

    def test_missing_bucket_is_reported_in_one_line(self, server: str, capture: Path) -> None:
        answer = run(capture, "s3://missing-bucket/demo", "--endpoint-url", server)
        assert answer.exit_code == 1
        assert answer.stderr.count("\n") == 1
        assert "s3://missing-bucket/demo: client.jsonl: the bucket does not exist" in answer.stderr
