"""Facts of models from a hub."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from specdecode_operator.cli import hub
from specdecode_operator.cli.hub import Allowance, HubClient, HubSettings
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError
from specdecode_operator.deployment.models.model_facts import unpack_facts
from specdecode_operator.sizing.catalogue import find_entry
from tests.support.checkpoints import header, safetensors, write_checkpoint
from tests.support.http_server import Quiet, serving
from tests.support.llama import SMALL_CONFIG
from tests.support.loopback_hub import COMMIT, TOKEN, Hub
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.hub.conftest import FILES, SHARDS, alone


def verdict(specdecode: Specdecode, path: Path, *options: str) -> dict[str, Any]:
    """The only object of `plan -o json`."""
    (found,) = json.loads(specdecode("plan", "-f", path, "-o", "json", *options).stdout)["objects"]
    answer: dict[str, Any] = found
    return answer


def test_unknown_models_of_all_objects_are_listed_together(specdecode: Specdecode, write: WriteObject) -> None:
    head = {"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": "acme/head"}}
    both = manifest("both", target={"model": "acme/target"}, speculation=head)
    result = specdecode("plan", "-f", write("a.yaml", both, alone("acme/other")))
    assert result.exit_code == 5
    assert "3 models are unknown here: acme/target, acme/head, acme/other" in result.stderr
    assert "--hub" in result.stderr
    assert all(f"--model-config acme/{name}=PATH" in result.stderr for name in ("target", "head", "other"))
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["both", "Unknown"], ["alone", "Unknown"]]


def test_misspelled_head_suggests_a_head(specdecode: Specdecode, write: WriteObject) -> None:
    head = {"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8b"}}
    answer = verdict(specdecode, write("a.yaml", manifest("a", speculation=head)))
    assert "did you mean yuhuili/EAGLE3-LLaMA3.1-Instruct-8B?" in answer["problems"][0]["message"]


def test_unknown_model_has_its_own_verdict_in_json(specdecode: Specdecode, write: WriteObject) -> None:
    answer = verdict(specdecode, write("a.yaml", alone("acme/other", revision="v1")))
    assert answer["verdict"] == "Unknown"
    assert answer["unknown_models"] == [{"model": "acme/other", "revision": "v1"}]
    assert [problem["field"] for problem in answer["problems"]] == ["spec.target.model"]


def test_error_unrelated_to_an_unknown_model_makes_the_object_invalid(
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
def test_exit_code_of_a_bad_verdict_wins_over_unknown(
    specdecode: Specdecode, write: WriteObject, others: list[str], code: int
) -> None:
    small, large = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-405B"
    bodies = {"fits": alone(small), "does not fit": alone(large), "invalid": alone(small, quantization="FP1")}
    objects = [alone("acme/other"), *(bodies[other] for other in others)]
    for number, body in enumerate(objects):
        body["metadata"]["name"] = f"object-{number}"
    assert specdecode("plan", "-f", write("a.yaml", *objects)).exit_code == code


def test_model_on_a_volume_is_not_requested_from_the_hub(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    body = alone("acme/open")
    body["spec"]["models"] = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
    result = specdecode("plan", "-f", write("a.yaml", body), "--hub")
    assert (result.exit_code, hub.asked) == (5, [])


def test_only_headers_are_read_from_the_hub_and_cached(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
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


def test_render_reads_models_from_the_hub(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    result = specdecode("render", "-f", write("a.yaml", alone("acme/open", revision="v1")), "--hub")
    assert (result.exit_code, "--revision=v1" in result.stdout or "v1" in result.stdout.split()) == (0, True)
    assert hub.sent


def test_model_pinned_to_a_commit_is_read_from_the_cache(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    path = write("a.yaml", alone("acme/open", revision=COMMIT))
    assert verdict(specdecode, path, "--hub")["verdict"] == "Fits"
    hub.asked.clear()
    assert verdict(specdecode, path, "--hub")["verdict"] == "Fits"
    assert hub.asked == []


def test_missing_revision_is_reported(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open", revision="v9")), "--hub")
    assert (result.exit_code, "acme/open: has no such revision" in result.stdout) == (5, True)
    assert len(hub.asked) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"key": 1, "value": 2}'])
def test_corrupt_cache_is_replaced_from_the_hub(
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


def test_cache_entry_of_another_model_is_ignored(
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


@pytest.mark.parametrize("folder", ["/proc/nowhere", "relative", ""])
def test_unwritable_cache_is_no_error(
    specdecode: Specdecode, write: WriteObject, hub: Hub, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert verdict(specdecode, write("a.yaml", alone("acme/open")), "--hub")["verdict"] == "Fits"
    assert hub.sent


def test_gated_model_needs_the_token_which_is_never_shown(
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
def test_invalid_hub_settings_are_named_without_their_value(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    told = {"HF_TOKEN": "HF_TOKEN contains invalid characters", "HF_ENDPOINT": "HF_ENDPOINT must be a URL"}[name]
    assert (result.exit_code, told in result.stdout, value in result.output) == (5, True, False)


def test_unreachable_hub_falls_back_to_the_cache(
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
def test_invalid_hub_id_is_not_requested(specdecode: Specdecode, write: WriteObject, hub: Hub, model: str) -> None:
    case = json.dumps({"gpu": "H100", "model": model})
    result = specdecode("plan", "--batch", "-", "--out", "-", "--hub", stdin=case)
    assert "is not a hub id" in json.loads(result.stdout)["error"]
    assert specdecode("plan", "-f", write("a.yaml", alone(model)), "--hub").exit_code == 2, "no API server takes it"
    assert hub.asked == []


@pytest.mark.parametrize("revision", ["../../../acme/none", "v1?a=b#c", "a\x00b", "refs/pr/1", "é"])
def test_revision_is_escaped_in_the_url(specdecode: Specdecode, write: WriteObject, hub: Hub, revision: str) -> None:
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open", revision=revision)), "--hub")
    assert result.exit_code == 5
    (asked,) = hub.asked
    assert asked.partition("?")[0] == f"/api/models/acme/open/revision/{quote(revision, safe='')}"


def test_files_in_subfolders_are_not_read(specdecode: Specdecode, write: WriteObject, hub: Hub) -> None:
    kept = {name: FILES[name] for name in ("config.json", *SHARDS)}
    hub.files = {**kept, "original/consolidated.00.safetensors": SHARDS["model-00001-of-00002.safetensors"]}
    assert verdict(specdecode, write("a.yaml", alone("acme/open")), "--hub")["verdict"] == "Fits"
    assert {name for name, _ in hub.sent} == set(kept)


def test_batch_reads_models_from_the_hub(specdecode: Specdecode, hub: Hub) -> None:
    cases = [
        {"id": 1, "gpu": "H100", "model": "acme/open", "revision": "v1"},
        {"id": 2, "gpu": "H100", "model": "acme/none"},
    ]
    stdin = "\n".join(map(json.dumps, cases))
    result = specdecode("plan", "--batch", "-", "--out", "-", "--hub", stdin=stdin)
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["verdict"], second["error"].startswith("model: acme/none: ")) == ("Fits", True)
    assert any(asked.partition("?")[0].endswith("/revision/v1") for asked in hub.asked)
    without = specdecode("plan", "--batch", "-", "--out", "-", stdin=stdin)
    assert "not in the catalogue: acme/open, acme/none: add --hub" in without.stderr


def test_plan_without_hub_does_not_import_httpx(write: WriteObject) -> None:
    """It would cost a fifth of a plan's time."""
    program = (
        "import sys; from typer.testing import CliRunner; from specdecode_operator.cli.main import app\n"
        "result = CliRunner().invoke(app, sys.argv[1:]); print(result.exit_code, 'httpx' in sys.modules)"
    )
    arguments = ["plan", "-f", str(write("a.yaml", alone("acme/open")))]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "False"]


# Servers that are no hub, or a bad one: what they say is bounded, not believed, and told in our words.

DEEP = b'{"a":' * 900 + b"1" + b"}" * 900
HOSTILE: dict[str, tuple[dict[str, bytes], str]] = {
    "no config": ({"config.json": None}, "no config.json"),
    "a large config": ({"config.json": b" " * 9 * 2**20}, "more than 8 MiB"),
    "a deep config": ({"config.json": DEEP}, "nested more than"),
    "a very deep config": ({"config.json": b"[" * 60_000}, "is not JSON"),
    "a config that is a list": ({"config.json": b"[]"}, "not an object"),
    "a header of 2^60": ({next(iter(SHARDS)): safetensors({}, 0, length=2**60)}, "more than 100,000,000"),
    "an index to elsewhere": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../../../etc/passwd.safetensors"}}'},
        "are not in",
    ),
    "names that steer a terminal": (
        {next(iter(SHARDS)): safetensors({"\x1b[2J\u202e": 1}, 0)},
        r"must describe tensor \x1b[2J",
    ),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_give_a_plain_error(specdecode: Specdecode, write: WriteObject, hub: Hub, case: str) -> None:
    changed, words = HOSTILE[case]
    hub.files = {name: content for name, content in {**FILES, **changed}.items() if content is not None}
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (5, True)
    assert words in result.stdout
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


class Odd(ThreadingHTTPServer):
    """A server that answers everything in one odd way, and remembers what it was sent."""

    daemon_threads = True

    def __init__(self, way: str) -> None:
        super().__init__(("127.0.0.1", 0), OddHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.way = way
        self.elsewhere = ""
        self.tokens: list[str | None] = []
        self.done = Event()


class OddHandler(Quiet, BaseHTTPRequestHandler):
    server: Odd

    def do_GET(self) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        match self.server.way:
            case "loop":
                self._send(302, b"", Location=f"{self.server.url}{self.path}x")
            case "elsewhere":
                self._send(302, b"", Location=f"{self.server.elsewhere}/x")
            case "file":
                self._send(302, b"", Location="file:///etc/passwd")
            case "silence":
                self.server.done.wait()
            case "compressed":
                self._send(200, b"\x1f\x8b" + b"0" * 100, **{"Content-Encoding": "gzip"})
            case "endless":
                self._send(200, b" " * (9 * 2**20))
            case "error":
                self._send(500, b"\x1b[2J secret words")
            case body:
                self._send(200, body.encode())

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("loop", "redirects more than 5 times"),
        ("file", "cannot be reached over HTTP"),
        ("compressed", "ignores Accept-Encoding"),
        ("endless", "no valid list of files"),
        ("error", "answers HTTP 500"),
        ("<html>", "no valid list of files"),
        ("[]", "no valid list of files"),
        ("[" * 100_000, "no valid list of files"),
        ('{"sha": "../..", "siblings": []}', "no valid list of files"),
        ('{"sha": "abcdef0123", "siblings": [{"rfilename": 3}]}', "no valid list of files"),
        ('{"sha": "abcdef0123", "siblings": [{"rfilename": "config.json", "size": -1}]}', "no valid list of files"),
        ('{"sha": "abcdef0123", "siblings": []}', "there is no config.json"),
    ],
)
def test_server_that_is_no_hub_gives_a_plain_error(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, way: str, words: str
) -> None:
    with serving(Odd(way)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (result.exit_code, words in result.stdout) == (5, True)
    assert "secret" not in result.output


@pytest.mark.parametrize(("left", "at_once"), [(1000, 2**30), (2**30, 1000)])
def test_bytes_read_per_file_and_in_total_are_limited(left: int, at_once: int) -> None:
    with serving(Odd("endless")) as server:
        hub = HubClient(HubSettings.of({"HF_ENDPOINT": server.url}))
        with pytest.raises(CheckpointError, match="more data than the headers of a model need"):
            hub.get("x", Allowance(math.inf, left, at_once), start=0, length=8 * 2**20)


@pytest.mark.parametrize(("answer", "words"), [(307, "redirects to a URL without TLS"), (500, "HTTP 500")])
def test_redirect_to_a_url_without_tls_is_refused(monkeypatch: pytest.MonkeyPatch, answer: int, words: str) -> None:
    asked = []

    def answered(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.scheme)
        return httpx.Response(answer, headers={"Location": "http://hub.invalid/x"})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answered))
    monkeypatch.setattr(httpx, "AsyncClient", client)
    hub = HubClient(HubSettings.of({"HF_ENDPOINT": "https://hub.invalid", "HF_TOKEN": "hf_secret"}))
    with pytest.raises(CheckpointError, match=words):
        hub.get("x", Allowance(math.inf, 2**20, 2**20), start=0, length=8)
    assert asked == ["https"], "nothing is sent in the clear"


@pytest.mark.parametrize(("files", "words"), [(4096, "there is no config.json"), (4097, "no valid list of files")])
def test_repository_with_too_many_files_is_refused(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, files: int, words: str
) -> None:
    listed = [{"rfilename": f"{each}.txt", "size": 1} for each in range(files)]
    with serving(Odd(json.dumps({"sha": "abcdef0123", "siblings": listed}))) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (result.exit_code, words in result.stdout) == (5, True)


def test_hub_that_never_responds_times_out(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_DEADLINE_S", 0.05)
    with serving(Odd("silence")) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
        server.done.set()
    assert (result.exit_code, "responds too slowly" in result.stdout) == (5, True)


def test_token_is_sent_only_to_the_hub(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(Odd("elsewhere")) as server, serving(Odd("{}")) as other:
        server.elsewhere = other.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (server.tokens, other.tokens) == ([f"Bearer {TOKEN}"], [None])


# Pairs that people serve, none of them in the catalogue: the plan reads them from the hub, as a user asks for it.

GIB = 2**30


def known(model: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a model in the catalogue, changed."""
    entry = find_entry(model)
    assert entry is not None
    return {**entry.config, **changes}


def repository(config: dict[str, Any], **parts_gib: float) -> dict[str, bytes]:
    """Files of a model: a header for parts of so many GiB, without the data."""
    shapes = {name.replace("__", "."): ("BF16", [int(size * GIB) // 2]) for name, size in parts_gib.items()}
    files = {"config.json": json.dumps(config).encode()}
    return files | ({"model.safetensors": safetensors(header(shapes)[0], 0)} if shapes else {"pytorch_model.bin": b""})


TABLES = {"model__embed_tokens__weight": 2.4, "lm_head__weight": 2.4}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head", "mtp*"],
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float"},
            "targets": [f"model.layers.{n}.mixer.experts.{e}.up_proj" for n in range(40) for e in range(512)],
        }
    },
}
FP8_AND_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "attention": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["re:.*attn.*"]},
        "mlp": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}, "targets": ["re:.*mlp.*"]},
    },
}
HEAD_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 6144,
    "target_hidden_size": 8192,
    "num_hidden_layers": 1,
    "intermediate_size": 16_384,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "draft_vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
DSPARK = known("RedHatAI/Kimi-K3-speculator.dspark")
LAYERS = {key: DSPARK[key] for key in ("head_dim", "intermediate_size", "max_position_embeddings", "model_type")}
SPECULATOR = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [3, 18, 33, 48, 63],
    "markov_rank": 256,
    "mask_token_id": 248_070,
    "transformer_layer_config": LAYERS
    | {"hidden_size": 5120, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"vocab_size": 248_320},
}
DFLASH2 = known("z-lab/Qwen3.8-27B-DFlash2")
SWA = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "hidden_size": 4096, "vocab_size": 154_880}
REPOSITORIES = {
    "nvidia/Llama-3.3-70B-FP8": repository(known("nvidia/Llama-3.3-70B-Instruct-FP8"), model__layers__0__all=66.0),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": repository(HEAD_70B),
    "Frozenlock/Qwen3.8-27B-int4-AutoRound": repository(
        known("Qwen/Qwen3.8-27B", quantization_config=AUTOROUND), **TABLES, model__layers__0__all=12.5
    ),
    "nvidia/Puzzle-75B-A9B-NVFP4": repository(
        known(
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
            architectures=["NemotronHPuzzleForCausalLM"],
            quantization_config=MIXED,
        ),
        model__embeddings__weight=1.0,
        model__layers__0__all=43.0,
        mtp__layers__0__all=5.3,
    ),
    "RedHatAI/Qwen3.8-27B-NVFP4": repository(
        known("Qwen/Qwen3.8-27B", quantization_config=FP8_AND_NVFP4), **TABLES, model__layers__0__all=17.0
    ),
    "RedHatAI/Qwen3.8-27B-speculator.dspark": repository(SPECULATOR, layers__0__all=3.4),
    "zai-org/GLM-5.3-Flash-BF16": repository(
        known("zai-org/GLM-5.3-Flash", quantization_config=None), **TABLES, model__layers__0__all=580.0
    ),
    "incoai/GLM-5.3-Flash-DFlash2": repository(DFLASH2 | SWA, layers__0__all=2.1),
}
PAIRS: dict[str, tuple[str | None, str, int, list[str]]] = {
    "nvidia/Llama-3.3-70B-FP8": ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "eagle3", 3, ["exact", "exact"]),
    "Frozenlock/Qwen3.8-27B-int4-AutoRound": (None, "mtp", 1, ["estimated"]),
    "nvidia/Puzzle-75B-A9B-NVFP4": (None, "mtp", 3, ["estimated"]),
    "RedHatAI/Qwen3.8-27B-NVFP4": ("RedHatAI/Qwen3.8-27B-speculator.dspark", "dspark", 8, ["estimated", "exact"]),
    "zai-org/GLM-5.3-Flash-BF16": ("incoai/GLM-5.3-Flash-DFlash2", "dflash", 7, ["estimated", "exact"]),
}


@pytest.fixture
def hub_of_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({}, REPOSITORIES)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.usefixtures("hub_of_pairs")
@pytest.mark.parametrize("target", PAIRS)
def test_commonly_served_pair_gets_a_verdict(specdecode: Specdecode, write: WriteObject, target: str) -> None:
    draft, method, tokens, knowledge = PAIRS[target]
    speculation: dict[str, Any] = {"method": method, "numSpeculativeTokens": tokens}
    if draft is not None:
        speculation["draft"] = {"model": draft}
    path: Path = write("a.yaml", manifest("a", target={"model": target}, speculation=speculation, **EIGHT_H200))
    result = specdecode("plan", path, "--hub", "-o", "json")
    (found,) = json.loads(result.stdout)["objects"]
    assert [each["knowledge"] for each in found["models"]] == knowledge, result.output
    assert found["verdict"] in ("Fits", "Tight", "DoesNotFit")


EIGHT_H200: dict[str, Any] = {
    "engine": {"version": "0.33"},
    "accelerator": {"products": ["NVIDIA-H200"]},
    "parallelism": {"tensor": 8},
    "serving": {"maxModelLen": 32_768},
}


# What the Job that reads a model runs, against a hub on the loopback.


@pytest.fixture
def message(tmp_path: Path) -> Path:
    """The file that stands for the container's termination message."""
    return tmp_path / "message"


def read(specdecode: Specdecode, message: Path, *arguments: str) -> Checkpoint:
    """Run the command of the Job."""
    result = specdecode("read-model", "hub", *arguments, "--message", message)
    assert message.exists(), result.output
    return unpack_facts(message.read_text())


def test_read_model_fetches_headers_but_no_weights(specdecode: Specdecode, message: Path, hub: Hub) -> None:
    found = read(specdecode, message, "acme/open", "--revision=v1")
    assert (found.config, found.commit) == (SMALL_CONFIG, COMMIT)
    assert (found.weights.total_bytes, found.weights.tensors) == (2 * 4096 * 1024 * 2, 2)
    sent_bytes: Counter[str] = Counter()
    for name, size_bytes in hub.sent:
        sent_bytes[name] += size_bytes
    assert all(0 < sent_bytes[name] <= 64 * 1024 < len(SHARDS[name]) for name in SHARDS), "weights were not fetched"
    assert "pytorch_model.bin" not in sent_bytes
    assert not any("/resolve/v1/" in path for path in hub.asked), "all files are those of one commit"


@pytest.mark.usefixtures("hub")
def test_a_gated_model_needs_the_token(specdecode: Specdecode, message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is gated") as refused:
        read(specdecode, message, "acme/gated")
    assert refused.value.reason == "HubRefused"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read(specdecode, message, "acme/gated").weights.tensors == 2


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "arguments", [["acme/none"], ["acme/open", "--revision=v9"], ["a/b/c/d"]], ids=["model", "revision", "id"]
)
def test_request_refused_by_the_hub_is_reported(specdecode: Specdecode, message: Path, arguments: list[str]) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(specdecode, message, *arguments)
    assert refused.value.reason == "HubRefused"


def test_unreachable_hub_is_reported(specdecode: Specdecode, message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub(FILES) as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)  # its port is free again
    with pytest.raises(CheckpointError) as refused:
        read(specdecode, message, "acme/open")
    assert refused.value.reason == "HubUnreachable"


def test_folder_is_read_without_hub_and_engine_packages(tmp_path: Path, message: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", [64, 32])}
    folder = write_checkpoint(tmp_path / "model", SMALL_CONFIG, tensors)
    # What no engine brings along must not be needed: no module named vllm, torch or huggingface_hub.
    blocked = dict.fromkeys(("vllm", "torch", "huggingface_hub", "transformers"))
    start = f"import sys; sys.modules.update({blocked}); from specdecode_operator.cli.main import main; main()"
    command = [sys.executable, "-c", start, "read-model", "folder", "--message", str(message), "--", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert unpack_facts(message.read_text()).weights.total_bytes == 64 * 32 * 2
