"""Models that the catalogue does not know: told all at once, and read from the hub where that is asked for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from specdecode_operator.cli import hub
from tests.support.http_server import serving
from tests.support.loopback_hub import COMMIT, TOKEN, Hub
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.hub.conftest import FILES, SHARDS, alone


def verdict(specdecode: Specdecode, path: Path, *options: str) -> dict[str, Any]:
    """The only object of `plan -o json`."""
    (found,) = json.loads(specdecode("plan", "-f", path, "-o", "json", *options).stdout)["objects"]
    answer: dict[str, Any] = found
    return answer


def test_all_unknown_models_of_all_objects_are_named_at_once(specdecode: Specdecode, write: WriteObject) -> None:
    head = {"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": "acme/head"}}
    both = manifest("both", target={"model": "acme/target"}, speculation=head)
    result = specdecode("plan", "-f", write("a.yaml", both, alone("acme/other")))
    assert result.exit_code == 5
    assert "3 models are unknown here: acme/target, acme/head, acme/other" in result.stderr
    assert "--hub" in result.stderr
    assert all(f"--model-config acme/{name}=PATH" in result.stderr for name in ("target", "head", "other"))
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["both", "Unknown"], ["alone", "Unknown"]]


def test_a_slip_in_the_name_of_a_head_means_a_head(specdecode: Specdecode, write: WriteObject) -> None:
    head = {"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8b"}}
    answer = verdict(specdecode, write("a.yaml", manifest("a", speculation=head)))
    assert "did you mean yuhuili/EAGLE3-LLaMA3.1-Instruct-8B?" in answer["problems"][0]["message"]


def test_an_unknown_model_is_a_verdict_of_its_own_in_data(specdecode: Specdecode, write: WriteObject) -> None:
    answer = verdict(specdecode, write("a.yaml", alone("acme/other", revision="v1")))
    assert answer["verdict"] == "Unknown"
    assert answer["unknown_models"] == [{"model": "acme/other", "revision": "v1"}]
    assert [problem["field"] for problem in answer["problems"]] == ["spec.target.model"]


def test_what_is_wrong_whatever_the_model_is_makes_the_object_invalid(
    specdecode: Specdecode, write: WriteObject
) -> None:
    body = alone("acme/other")
    body["spec"]["engine"] = {"extraArgs": ["--tensor-parallel-size=2"]}
    result = specdecode("plan", "-f", write("a.yaml", body))
    assert (result.exit_code, "tensor-parallel-size" in result.stdout) == (2, True)


@pytest.mark.parametrize(
    ("others", "code"),
    [([], 5), (["fits"], 5), (["does not fit"], 4), (["invalid"], 2), (["does not fit", "invalid"], 2)],
)
def test_a_verdict_that_is_known_to_be_bad_comes_before_unknown(
    specdecode: Specdecode, write: WriteObject, others: list[str], code: int
) -> None:
    small, large = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-405B"
    bodies = {"fits": alone(small), "does not fit": alone(large), "invalid": alone(small, quantization="FP1")}
    objects = [alone("acme/other"), *(bodies[other] for other in others)]
    for number, body in enumerate(objects):
        body["metadata"]["name"] = f"object-{number}"
    assert specdecode("plan", "-f", write("a.yaml", *objects)).exit_code == code


@pytest.mark.parametrize("command", ["plan", "explain", "render"])
def test_every_command_ends_alike(specdecode: Specdecode, write: WriteObject, command: str) -> None:
    result = specdecode(command, "-f", write("a.yaml", alone("acme/other")))
    assert (result.exit_code, "acme/other" in result.stdout + result.stderr) == (5, True)


def test_a_model_on_a_volume_is_not_looked_for_on_the_hub(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    body = alone("acme/open")
    body["spec"]["models"] = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
    result = specdecode("plan", "-f", write("a.yaml", body), "--hub")
    assert (result.exit_code, hub.asked) == (5, [])


def test_the_hub_is_asked_for_headers_alone_and_once(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    path = write("a.yaml", alone("acme/open", revision="v1"))
    answer = verdict(specdecode, path, "--hub")
    assert answer["verdict"] == "Fits"
    assert answer["read_models"] == [{"model": "acme/open", "revision": "v1", "commit": COMMIT}]
    assert "pytorch_model.bin" not in dict(hub.sent)
    assert all(size <= 64 * 1024 for name, size in hub.sent if name in SHARDS), "weights stay where they are"
    assert not [each for each in hub.asked if "/resolve/" in each and COMMIT not in each], "one commit for all files"
    hub.asked.clear()
    assert verdict(specdecode, path, "--hub") == answer
    (again,) = hub.asked
    assert again.partition("?")[0].endswith("/revision/v1"), "only whether the revision has moved"


def test_render_knows_what_the_hub_knows(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    result = specdecode("render", "-f", write("a.yaml", alone("acme/open", revision="v1")), "--hub")
    assert (result.exit_code, "--revision=v1" in result.stdout or "v1" in result.stdout.split()) == (0, True)
    assert hub.sent


def test_a_model_that_is_pinned_to_a_commit_needs_no_network_again(
    specdecode: Specdecode, write: WriteObject, hub: Hub
) -> None:
    path = write("a.yaml", alone("acme/open", revision=COMMIT))
    assert verdict(specdecode, path, "--hub")["verdict"] == "Fits"
    hub.asked.clear()
    assert verdict(specdecode, path, "--hub")["verdict"] == "Fits"
    assert hub.asked == []


def test_a_revision_that_is_not_there_is_told(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open", revision="v9")), "--hub")
    assert (result.exit_code, "acme/open: has no such revision" in result.stdout) == (5, True)
    assert len(hub.asked) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"key": 1, "value": 2}'])
def test_a_broken_cache_is_read_anew(
    specdecode: Specdecode, write: WriteObject, hub: Hub, own_cache: Path, content: bytes
) -> None:
    path = write("a.yaml", alone("acme/open"))
    good = verdict(specdecode, path, "--hub")
    kept = [each for each in own_cache.rglob("*") if each.is_file()]
    assert len(kept) == 2
    for each in kept:
        each.write_bytes(content)
    assert verdict(specdecode, path, "--hub") == good
    assert any("/resolve/" in asked for asked in hub.asked)
    assert sorted(each.suffix for each in own_cache.rglob("*") if each.is_file()) == [".json", ".json"]


def test_an_entry_of_another_model_in_the_cache_is_not_believed(
    specdecode: Specdecode, write: WriteObject, hub: Hub, own_cache: Path
) -> None:
    path = write("a.yaml", alone("acme/open"))
    good = verdict(specdecode, path, "--hub")
    for each in own_cache.rglob("*.json"):
        entry = json.loads(each.read_text())
        each.write_text(json.dumps({**entry, "key": {**entry["key"], "model": "acme/other"}}))
    asked = len(hub.sent)
    assert verdict(specdecode, path, "--hub") == good
    assert len(hub.sent) > asked


def test_what_another_version_read_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = hub.HubCache(tmp_path, "https://hub")
    kept.keep_commit("acme/open", None, COMMIT)
    assert kept.commit("acme/open", None) == COMMIT
    monkeypatch.setattr(hub, "__version__", "next")
    assert kept.commit("acme/open", None) is None


def test_who_asked_the_hub_is_not_told_to_ask_it(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    path = write("a.yaml", alone("acme/none"))
    assert "--hub, to read" in specdecode("plan", "-f", path).stderr
    assert "--hub, to read" not in specdecode("plan", "-f", path, "--hub").stderr
    assert hub.asked


@pytest.mark.parametrize("folder", ["/proc/nowhere", "relative", ""])
def test_a_cache_that_cannot_be_written_does_no_harm(
    specdecode: Specdecode, write: WriteObject, hub: Hub, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert verdict(specdecode, write("a.yaml", alone("acme/open")), "--hub")["verdict"] == "Fits"
    assert hub.sent


def test_a_gated_model_needs_the_token_which_nobody_sees(
    specdecode: Specdecode, write: WriteObject, hub: Hub, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    path = write("a.yaml", alone("acme/gated"))
    refused = specdecode("plan", "-f", path, "--hub")
    assert (refused.exit_code, "is gated" in refused.stdout, "HF_TOKEN" in refused.stdout) == (5, True, True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    read = specdecode("plan", "-f", path, "--hub")
    assert read.exit_code == 0
    kept = "".join(each.read_text() for each in own_cache.rglob("*.json"))
    assert TOKEN not in refused.output + read.output + kept
    assert hub.sent


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "two words"),
        ("HF_TOKEN", "a\nb"),
        ("HF_ENDPOINT", "file:///etc"),
        ("HF_ENDPOINT", "http://user:secret@127.0.0.1"),
        ("HF_ENDPOINT", "no address"),
        ("HF_ENDPOINT", "http://[::1"),
    ],
)
def test_settings_that_cannot_be_used_are_named_and_not_repeated(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    told = {"HF_TOKEN": "HF_TOKEN holds characters", "HF_ENDPOINT": "HF_ENDPOINT must be an address"}[name]
    assert (result.exit_code, told in result.stdout, value in result.output) == (5, True, False)


def test_a_hub_out_of_reach_leaves_what_was_read_before(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write("a.yaml", alone("acme/open")), write("b.yaml", alone("acme/gated"))
    with serving(Hub(FILES)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert specdecode("plan", "-f", path, "--hub").exit_code == 0
    again = specdecode("plan", "-f", path, "--hub")
    assert (again.exit_code, "cannot be reached" in again.stderr, COMMIT[:12] in again.stderr) == (0, True, True)
    never = specdecode("plan", "-f", other, "--hub")
    assert (never.exit_code, "cannot be reached" in never.stdout) == (5, True)


@pytest.mark.parametrize("model", ["../../etc/passwd", "a/../b", "a/b/c", "/a", "a b", "a/b?c", "a/b\nc", "é/b"])
def test_what_is_no_hub_id_is_not_asked_for(specdecode: Specdecode, write: WriteObject, hub: Hub, model: str) -> None:
    case = json.dumps({"gpu": "H100", "model": model})
    result = specdecode("estimate", "--in", "-", "--out", "-", "--hub", stdin=case)
    assert "is no hub id" in json.loads(result.stdout)["error"]
    assert specdecode("plan", "-f", write("a.yaml", alone(model)), "--hub").exit_code == 2, "no API server takes it"
    assert hub.asked == []


@pytest.mark.parametrize("revision", ["../../../acme/none", "v1?a=b#c", "a\x00b", "refs/pr/1", "é"])
def test_a_revision_stays_one_part_of_the_address(
    specdecode: Specdecode, write: WriteObject, hub: Hub, revision: str
) -> None:
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open", revision=revision)), "--hub")
    assert result.exit_code == 5
    (asked,) = hub.asked
    assert asked.partition("?")[0] == f"/api/models/acme/open/revision/{quote(revision, safe='')}"


def test_files_below_folders_are_not_counted(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    kept = {name: FILES[name] for name in ("config.json", *SHARDS)}
    hub.files = {**kept, "original/consolidated.00.safetensors": SHARDS["model-00001-of-00002.safetensors"]}
    assert verdict(specdecode, write("a.yaml", alone("acme/open")), "--hub")["verdict"] == "Fits"
    assert {name for name, _ in hub.sent} == set(kept)


def test_estimate_reads_models_from_the_hub(specdecode: Specdecode, hub: Hub) -> None:
    cases = [
        {"id": 1, "gpu": "H100", "model": "acme/open", "revision": "v1"},
        {"id": 2, "gpu": "H100", "model": "acme/none"},
    ]
    stdin = "\n".join(map(json.dumps, cases))
    result = specdecode("estimate", "--in", "-", "--out", "-", "--hub", stdin=stdin)
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["verdict"], second["error"].startswith("model: acme/none: ")) == ("Fits", True)
    assert any(asked.partition("?")[0].endswith("/revision/v1") for asked in hub.asked)
    without = specdecode("estimate", "--in", "-", "--out", "-", stdin=stdin)
    assert "not in the catalogue: acme/open, acme/none: add --hub" in without.stderr


def test_of_many_unknown_models_a_few_are_named(specdecode: Specdecode) -> None:
    stdin = "\n".join(json.dumps({"id": each, "gpu": "H100", "model": f"acme/m{each}"}) for each in range(7))
    result = specdecode("estimate", "--in", "-", "--out", "-", stdin=stdin)
    assert "acme/m0, acme/m1, acme/m2, acme/m3, acme/m4 and 2 more: add --hub" in result.stderr


def test_without_hub_nothing_of_http_is_loaded(write: WriteObject) -> None:
    """It would cost a fifth of a plan's time."""
    program = (
        "import sys; from typer.testing import CliRunner; from specdecode_operator.cli.main import app\n"
        "result = CliRunner().invoke(app, sys.argv[1:]); print(result.exit_code, 'httpx' in sys.modules)"
    )
    arguments = ["plan", "-f", str(write("a.yaml", alone("acme/open")))]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "False"]
