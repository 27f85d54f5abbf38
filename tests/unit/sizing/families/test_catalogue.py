"""The data of the catalogue: every entry has a source, and the numbers in it are those of a model of that name."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.enums import Method, Precision
from specdecode_operator.sizing.catalogue import (
    PublishedHead,
    find_entry,
    find_geometry,
    known_drafts,
    known_models,
    published_heads,
    same_beginning,
    similar_model,
)
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import parameter_count, weight_bytes

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "operator/sizing/data/models").glob("*.json"))
RAW = {path.name: json.loads(path.read_text())["models"] for path in FILES}
ENTRIES = [entry for entries in RAW.values() for entry in entries]
WHOLE = {entry["id"]: whole for entry in ENTRIES if (whole := find_entry(entry["id"])) is not None}

SOURCE = re.compile(r"PyPI [\w-]+ [\d.]+(?:dev\d+)?: \S+|[\w.-]+/[\w.-]+@[0-9a-f]{12}:\S+")
SIZES = ("hidden_size", "num_attention_heads", "vocab_size")
LAYERS = ("num_hidden_layers", "layers_block_type")
LONGEST_LIST = 512
LARGEST_FILE_BYTES = 100_000
UNKNOWN = "-"
NOT_QUANTIZED = "none"
WHOLE_CONFIG = re.compile(r"config\.json|hf_model_configs\.py|model_preset\.py|Model_Config\.md|eagle|EAGLE|configs/")
"""Files that hold a whole config.json, or what makers train a head by."""


def strings_and_lists(value: Any) -> Iterator[str | list[Any]]:
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from strings_and_lists(inner)
        case list():
            yield value
            for inner in value:
                yield from strings_and_lists(inner)


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The section that holds the sizes of the decoder."""
    section: dict[str, Any] = config.get("text_config") or config.get("transformer_layer_config") or config
    return section


def billions(model_id: str) -> float | None:
    """Size of a catalogue model as sizing counts it; None for an architecture that sizing does not know."""
    try:
        geometry = find_geometry(model_id)
    except GeometryError:
        return None
    assert geometry is not None
    return parameter_count(geometry) / 1e9


def named_billions(model_id: str) -> float | None:
    """Size that a target's name states, as the 70 of Llama-3.1-70B; None where the name has none or one of experts."""
    found = re.search(r"(?<![A\dx.])(\d+(?:\.\d+)?)[Bb]\b(?!-(?:16|128)E)", model_id)
    of_a_draft = ":" in model_id or re.search(r"eagle|assistant|speculator|dflash|dspark", model_id, re.IGNORECASE)
    return float(found[1]) if found and not of_a_draft else None


def documented_rows() -> list[list[str]]:
    lines = (ROOT / "docs/reference/models.md").read_text().splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]


def test_no_model_is_listed_twice() -> None:
    ids = [entry["id"] for entry in ENTRIES]
    assert len(ids) == len(set(ids))
    assert tuple(sorted(ids)) == known_models()


@pytest.mark.parametrize("name", RAW)
def test_catalogue_files_are_sorted_and_have_only_known_keys(name: str) -> None:
    ids = [entry["id"] for entry in RAW[name]]
    assert all(first < second for first, second in pairwise(ids))
    assert (ROOT / "operator/sizing/data/models" / name).stat().st_size < LARGEST_FILE_BYTES
    for entry in RAW[name]:
        own = [key for key in entry if key != "base"]
        assert own == ["id", "source", "quantization", "quantization_source", "config"]
        assert list(entry["config"]) == sorted(entry["config"]), entry["id"]
        lists = [value for value in strings_and_lists(entry["config"]) if isinstance(value, list)]
        assert all(len(items) <= LONGEST_LIST for items in lists), entry["id"]


def test_every_source_is_a_package_or_repository_reference() -> None:
    assert {entry["id"]: entry["source"] for entry in ENTRIES if not SOURCE.match(entry["source"])} == {}


def stored_by(config: dict[str, Any]) -> str:
    """How the checkpoint says that it is quantized: at the top, or beside the sizes of the decoder."""
    found = config.get("quantization_config") or language_model(config).get("quantization_config")
    return NOT_QUANTIZED if found is None else found.get("quant_method") or found["producer"]["name"]


def test_entry_quantization_matches_its_config() -> None:
    said = {entry["id"]: entry["quantization"] for entry in ENTRIES}
    assert said == {model: stored_by(dict(whole.config)) for model, whole in WHOLE.items()}
    assert not [model for model, quantization in said.items() if not quantization]


def test_every_quantization_has_a_source() -> None:
    """What others wrote down from a config.json may lack the section: then the hub's page says how it is stored."""
    for entry in ENTRIES:
        source = entry["quantization_source"]
        page = source.startswith(f"https://huggingface.co/{entry['id']} (")
        whole = source.startswith("config.json") and WHOLE_CONFIG.search(entry["source"])
        assert page or whole, f"{entry['id']}: {source}"


def test_int4_weights_of_kimi_k2_match_the_published_size() -> None:
    """The makers of Kimi-K2-Thinking state 594 GB; in 16 bits it would not fit on eight H200."""
    geometry = find_geometry("moonshotai/Kimi-K2-Thinking")
    assert geometry is not None
    assert weight_bytes(geometry, Precision.INT4, Split(1)) / 1e9 == pytest.approx(594, abs=1)


def odd_sizes(config: dict[str, Any]) -> Iterator[str]:
    """What is in a config that no model has."""
    sizes = language_model(config)
    if not config.get("architectures", [""])[0]:
        yield "no architecture"
    for key in SIZES:
        if not isinstance(sizes.get(key), int) or not 0 < sizes[key] < 1_000_000:
            yield f"{key}: {sizes.get(key)}"
    layers = next((sizes[key] for key in LAYERS if key in sizes), 0)
    if not 0 < (layers if isinstance(layers, int) else len(layers)) < 200:
        yield f"layers: {layers}"
    if sizes["num_attention_heads"] % (sizes.get("num_key_value_heads") or 1):
        yield f"{sizes['num_key_value_heads']} key-value heads of {sizes['num_attention_heads']}"


def test_config_sizes_are_plausible() -> None:
    odd = {model: [*odd_sizes(dict(whole.config))] for model, whole in WHOLE.items()}
    assert {model: what for model, what in odd.items() if what} == {}


def test_parameter_count_is_near_the_size_in_the_name() -> None:
    sizes = {model: (billions(model), named_billions(model)) for model in known_models()}
    both = {model: (counted, named) for model, (counted, named) in sizes.items() if counted and named}
    assert len(both) > 80
    assert {model: size for model, size in both.items() if not 0.75 < size[0] / size[1] < 1.4} == {}


def test_number_ranges_in_names_are_expanded() -> None:
    entries = {model: find_entry(model) for model in known_models()}
    texts = {model: strings_and_lists(dict(entry.config)) for model, entry in entries.items() if entry}
    assert set(texts) == {entry["id"] for entry in ENTRIES}
    short = {
        model: [text for text in found if re.search(r"\{\d+\.\.\d+\}", str(text))] for model, found in texts.items()
    }
    assert {model: found for model, found in short.items() if found} == {}


def test_number_range_expands_to_every_layer() -> None:
    entry = find_entry("Qwen/Qwen3-30B-A3B-FP8")
    assert entry is not None
    kept = entry.config["quantization_config"]["modules_to_not_convert"]
    gates = [name for name in kept if name.endswith(".mlp.gate")]
    assert sorted(gates) == sorted(f"model.layers.{layer}.mlp.gate" for layer in range(48))


def test_entry_with_a_base_inherits_all_other_config_keys() -> None:
    builds = [entry for entry in ENTRIES if "base" in entry]
    assert builds
    for entry in builds:
        built, base = WHOLE[entry["id"]].config, WHOLE[entry["base"]].config
        kept = {key for key in base if key not in entry["config"]}
        assert {key: built[key] for key in kept} == {key: base[key] for key in kept}
        assert set(built) == {*base, *entry["config"]}


def test_copied_model_has_the_drafts_of_its_original() -> None:
    drafts = known_drafts("unsloth/Llama-3.1-8B-Instruct")
    assert drafts
    assert drafts == known_drafts("meta-llama/Llama-3.1-8B-Instruct")


# Sizes of files in public reports: bytes of the head's file less its header, GB of a checkpoint.
@pytest.mark.parametrize(
    ("model_id", "precision", "gigabytes"),
    [
        ("mistralai/Mistral-Medium-3.5-128B", Precision.FP8, 133.606),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", Precision.FP8, 72.7),
        ("RedHatAI/Kimi-K3-speculator.dspark", Precision.BF16, 9.49),
        ("thinkingmachines/Inkling-Small", Precision.BF16, 531.9),
    ],
)
def test_weight_bytes_match_the_published_files(model_id: str, precision: Precision, gigabytes: float) -> None:
    geometry = find_geometry(model_id)
    assert geometry is not None
    assert weight_bytes(geometry, precision, Split(1)) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_parameter_count_of_a_head_matches_a_public_list() -> None:
    """The list counts the map from the target's vocabulary, too, which vLLM does not load (llama_eagle3.py)."""
    geometry = find_geometry("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3")
    assert geometry is not None
    assert parameter_count(geometry) == 522_152_832 - geometry.vocab_size


def test_unknown_model_id_has_no_entry() -> None:
    assert find_entry("nobody/nothing") is None
    assert find_geometry("nobody/nothing") is None


@pytest.mark.parametrize("head", published_heads(), ids=lambda head: str(head.head))
def test_published_head_has_the_shape_of_its_targets(head: PublishedHead) -> None:
    assert SOURCE.match(head.source), head.source
    assert head.shape in known_models()
    geometry = find_geometry(head.head)
    assert geometry is not None
    assert geometry.head is not None, "whatever architecture its config.json names"
    for target_id in head.targets:
        target = find_geometry(target_id) if target_id in known_models() else None
        assert target is None or (target.hidden_size, target.vocab_size) == (geometry.hidden_size, geometry.vocab_size)


def test_every_known_draft_has_a_source_and_is_not_its_target() -> None:
    rows = read_data("drafts.json")["drafts"]
    for row in rows:
        assert SOURCE.match(row["source"]), row
        assert row["method"] in set(Method), row
        assert row["targets"] == sorted(set(row["targets"])), row
        assert row.get("draft") not in row["targets"], row
        assert row.get("draft") or row["method"] in {Method.MTP, Method.DSPARK}, "only these lie in the target itself"
    pairs = [(row.get("draft"), row["method"], target) for row in rows for target in row["targets"]]
    assert len(pairs) == len(set(pairs))


def test_published_heads_are_unique_and_not_catalogue_models() -> None:
    names = [head.head for head in published_heads()]
    assert len(names) == len(set(names))
    assert not set(names) & set(known_models())


def test_the_document_lists_the_catalogue() -> None:
    documented = {
        model: (architecture, quantization, source.partition("; quantization: ")[0])
        for model, architecture, *_, quantization, source in documented_rows()
    }
    expected = {
        model: (whole.config["architectures"][0], whole.quantization, whole.source) for model, whole in WHOLE.items()
    }
    assert documented == expected


def test_document_has_the_counted_parameter_sizes() -> None:
    for model_id, _, known, parameters, _, _ in documented_rows():
        counted = billions(model_id)
        assert (known == UNKNOWN) == (counted is None), model_id
        if counted is not None and parameters != UNKNOWN:
            assert parameters == f"{counted:.2f}", model_id


@pytest.mark.parametrize(
    ("written", "heads", "meant"),
    [
        ("meta-lama/Llama-3.1-8B-Instruct", False, "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-3.1-8B-Instuct", False, "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", False, "meta-llama/Llama-3.1-8B-Instruct"),
        ("Llama-3.1-8B-Instruct", False, "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen/qwen3-32b", False, "Qwen/Qwen3-32B"),
        ("AngelSlim/Qwen3-8B-eagle3", True, "AngelSlim/Qwen3-8B_eagle3"),
        # Other numbers are other models, other words other checkpoints, and a head is no model.
        ("zai-org/GLM-3.5", False, None),
        ("zai-org/GLM-3.5-FP8", False, None),
        ("deepseek-ai/DeepSeek-R1-0529", False, None),
        ("Qwen/Qwen3-32B-GPTQ", False, None),
        ("AngelSlim/Qwen3-8B-eagle3", False, None),
        ("meta-llama/Llama-3.1-8B-Instuct", True, None),
        ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", True, None),
        ("nobody/nothing", False, None),
        ("", False, None),
        ("4.5", False, None),
    ],
)
def test_only_near_misspellings_suggest_a_model(written: str, heads: bool, meant: str | None) -> None:
    assert similar_model(written, heads=heads) == meant


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (
            "llama-3.3-70b",
            (
                "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
                "meta-llama/Llama-3.3-70B-Instruct",
                "nvidia/Llama-3.3-70B-Instruct-FP8",
                "nvidia/Llama-3.3-70B-Instruct-NVFP4",
            ),
        ),
        ("mirror/glm-5.1", ("nvidia/GLM-5.1-NVFP4", "zai-org/GLM-5.1", "zai-org/GLM-5.1-FP8")),
        # Another build of a known model: its base, and what else is stored of it.
        ("acme/Qwen3.8-27B-GPTQ-Int4", ("Qwen/Qwen3.8-27B", "Qwen/Qwen3.8-27B-FP8")),
        ("Eco-Tech/Qwen3.8-27B-w8a8", ("Qwen/Qwen3.8-27B", "Qwen/Qwen3.8-27B-FP8")),
        # Not what merely has the same digits in front, or the same owner.
        ("zai-org/GLM-3.5", ()),
        ("zai-org/GLM-5.", ()),
        ("zai-org/", ()),
    ],
)
def test_models_with_the_same_name_prefix_are_found(written: str, found: tuple[str, ...]) -> None:
    assert same_beginning(written, heads=False) == found
