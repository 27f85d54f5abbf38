"""`specdecode models`: what is known of models, here and on the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.catalogue import known_models, published_heads
from tests.support.http_server import serving
from tests.support.loopback_hub import COMMIT, Hub
from tests.unit.cli.conftest import Specdecode
from tests.unit.cli.hub.conftest import FILES

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def data(specdecode: Specdecode, *arguments: str) -> Any:
    return json.loads(specdecode("models", *arguments, "-o", "json").stdout)


def test_all_models_and_heads_are_listed(specdecode: Specdecode) -> None:
    rows = {row["id"]: row for row in data(specdecode, "list")}
    shapes_only = {name for name in known_models() if ":" in name}
    assert set(rows) == {*known_models(), *(head.head for head in published_heads())} - shapes_only
    assert rows["moonshotai/Kimi-K2-Thinking"]["quantization"] == "compressed-tensors"
    assert rows["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"]["kind"] == "eagle3 head"
    assert rows["Qwen/Qwen3-32B-FP8-Static-PerTensor"]["parameters"] is None, "its quantization is not known in full"


def test_a_model_is_shown_with_its_heads_and_sources(specdecode: Specdecode) -> None:
    result = specdecode("models", "show", LLAMA)
    assert result.exit_code == 0
    for line in ("parameters         8.03 B", "weights            14.96 GiB in BF16", "quantization       none"):
        assert line in result.stdout
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B (eagle3)" in result.stdout
    shown = data(specdecode, "show", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    assert (shown["weights"]["precision"], shown["parameters"] > 10**8) == ("BF16", True)
    assert (shown["kind"], shown["made for"]) == ("eagle3 head", [LLAMA])


def test_drafts_of_a_target_are_listed_with_recommended_token_counts(specdecode: Specdecode) -> None:
    rows = data(specdecode, "drafts", "zai-org/GLM-5.2-FP8")
    found = {(row["draft"], row["method"], row["tokens"]) for row in rows}
    assert found == {("RedHatAI/GLM-5.2-speculator.dspark", "dspark", 7), (None, "mtp", 5)}
    assert all(row["source"] for row in rows)
    known = data(specdecode, "drafts", LLAMA)
    recommended = [row["draft"] for row in known if row["tokens"] is not None]
    assert "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3" in recommended
    assert [row["draft"] for row in known[: len(recommended)]] == recommended, "recommended ones come first"
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in specdecode("models", "drafts", LLAMA).stdout
    sized = {row["draft"]: row["parameters"] for row in data(specdecode, "drafts", LLAMA)}
    assert sized["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"] > 10**8
    others = {row["draft"]: row["parameters"] for row in data(specdecode, "drafts", "Qwen/Qwen3-8B")}
    assert others["RedHatAI/Qwen3-8B-speculator.peagle"] is None, "no source gives its shape"
    shown = specdecode("models", "drafts", "Qwen/Qwen3-8B")
    lines = {line.split()[0]: line.split()[3:] for line in shown.stdout.splitlines()}
    assert lines["RedHatAI/Qwen3-8B-speculator.peagle"] == ["unknown", "-"]
    assert "unknown" not in lines["AngelSlim/Qwen3-8B_eagle3"]
    assert "--hub" in shown.stderr
    assert "unknown" not in specdecode("models", "drafts", "Qwen/Qwen3-Next-80B-A3B-Instruct").output, "its own layers"


def test_target_without_known_drafts_exits_with_code_5(specdecode: Specdecode) -> None:
    result = specdecode("models", "drafts", "zai-org/GLM-5.2-FP9")
    assert (result.exit_code, result.stdout) == (5, "")
    assert "zai-org/GLM-5.2-FP9" in result.stderr


def test_shown_config_works_as_model_config(specdecode: Specdecode, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(data(specdecode, "show", LLAMA)["config"]))
    options = ("--gpu", "H100", "-o", "json")
    copied = specdecode("plan", "--model", "my/copy", "--model-config", f"my/copy={config}", *options)
    own = specdecode("plan", "--model", LLAMA, *options)
    (first,), (second,) = (json.loads(each.stdout)["objects"] for each in (copied, own))
    assert first["candidates"] == second["candidates"]


def test_model_that_cannot_be_sized_is_marked(specdecode: Specdecode) -> None:
    assert "cannot be sized" in specdecode("models", "show", "Qwen/Qwen3-32B-FP8-Static-PerTensor").stdout


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("meta-lama/Llama-3.1-8B-Instruct", f"did you mean {LLAMA}?"),
        ("zai-org/GLM-3.5", "add --hub to read it from the hub"),
        ("llama-3.1-405b", "catalogue, which has meta-llama/Llama-3.1-405B-Instruct, nvidia/"),
        ("a\x1b[2Jb", "not found in the catalogue"),
    ],
)
def test_unknown_model_exits_with_code_5(specdecode: Specdecode, model: str, words: str) -> None:
    result = specdecode("models", "show", model)
    assert (result.exit_code, words in result.stderr, "\x1b" in result.stderr) == (5, True, False)


def test_show_with_hub_reads_the_hub(specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(Hub(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        shown = data(specdecode, "show", "acme/open", "--hub", "--revision", "v1")
        absent = specdecode("models", "show", "acme/none", "--hub")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        hub.files = {**FILES, "config.json": b'{"architectures": 5, "text_config": [], "quantization_config": "x"}'}
        odd = specdecode("models", "show", "acme/open", "--hub", "--revision", "main")
    assert (shown["source"], shown["quantization"]) == (f"the hub at commit {COMMIT}", "none")
    assert (absent.exit_code, "acme/none: " in absent.stderr) == (5, True)
    assert odd.exit_code == 0
