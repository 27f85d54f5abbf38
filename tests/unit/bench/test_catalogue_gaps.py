"""The weekly comparison of the catalogue with recipes and vLLM's registry, on small ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.sizing.catalogue_gaps import page, recipe_models, refreshed, registered, registry_text
from devcluster.host.paths import REPOSITORY
from specdecode_operator.sizing.data_files import read_data

RECIPE = """
model: {model_id: Qwen/Qwen3-32B}
features:
  spec_decoding:
    modes:
      mtp: {args: ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']}
      eagle3: {args: ["--speculative-config", '{"model": "new/head", "method": "eagle3"}']}
variants: {default: {precision: bf16}, fp8: {model_id: new/Qwen3-32B-FP9}}
"""
DOTTED = """
model: {model_id: Qwen/Qwen3-8B}
features: {spec_decoding: {args: [--speculative-config.model, AngelSlim/Qwen3-8B_eagle3]}}
variants: {default: }
"""
REGISTRY = """
import os
raise RuntimeError("is not imported")
_TEXT_GENERATION_MODELS = {"Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"), "NewForCausalLM": ("new", "New")}
_MULTIMODAL_MODELS = {"Gemma3ForConditionalGeneration": ("gemma3_mm", "Gemma3ForConditionalGeneration")}
_SPECULATIVE_DECODING_MODELS = {"MedusaModel": ("medusa", "Medusa"), "NewMTPModel": ("new_mtp", "NewMTP")}
_TRANSFORMERS_SUPPORTED_MODELS = {"SmolLM3ForCausalLM": ("transformers", "TransformersForCausalLM")}
"""
KNOWN: dict[str, Any] = {
    "source": "registry.py",
    "newest": "0.33",
    "classes": ["Gemma3ForConditionalGeneration", "MedusaModel", "SmolLM3ForCausalLM"],
    "since": {"0.20": ["NewMTPModel"]},
    "until": {"0.31": ["Qwen3ForCausalLM", "OldForCausalLM"]},
    "in_transformers": ["OldForCausalLM"],
}
"""Content of registry.json: the registry above has two classes more."""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes/models/Qwen"
    folder.mkdir(parents=True)
    (folder / "a.yaml").write_text(RECIPE)
    (folder / "b.yaml").write_text(DOTTED)
    (folder / "plain.yaml").write_text("model: {model_id: new/none}\nvariants: {default: {}}\n")
    return tmp_path / "recipes"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    path = tmp_path / "registry.py"
    path.write_text(REGISTRY)
    return path


def test_recipe_models_include_variants_and_drafts(recipes: Path) -> None:
    assert recipe_models(recipes) == {
        "models/Qwen/a.yaml": ("Qwen/Qwen3-32B", "new/Qwen3-32B-FP9", "new/head"),
        "models/Qwen/b.yaml": ("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"),
    }


def test_page_lists_models_and_classes_missing_here(recipes: Path, registry: Path) -> None:
    lines = page(recipes, registry, "0.34.0", KNOWN).splitlines()
    assert lines[0].startswith("# ")
    assert "- models/Qwen/a.yaml: `new/Qwen3-32B-FP9`, `new/head`" in lines
    rows = [line for line in lines if line.startswith("- `")]
    assert rows == ["- `NewMTPModel`", "- `NewForCausalLM`", "- `NewForCausalLM`", "- `Qwen3ForCausalLM`"]
    assert not any("b.yaml" in line for line in lines), "all of it is known"
    assert any("0.34.0" in line for line in lines)


def test_new_version_adds_classes_and_ends_removed_ones(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "models/gone").mkdir(parents=True)
    (tmp_path / "models/gone/modeling_gone.py").write_text("class LostForCausalLM(Base):\n")
    known = {**KNOWN, "since": {"0.20": ["NewMTPModel", "LostForCausalLM", "LostModel"]}}
    now = refreshed(known, registry, "0.34.1", tmp_path)
    assert now["newest"] == "0.34"
    assert now["since"] == {"0.20": ["LostForCausalLM", "LostModel", "NewMTPModel"], "0.34": ["NewForCausalLM"]}
    assert now["until"] == {"0.31": ["OldForCausalLM"], "0.33": ["LostForCausalLM", "LostModel"]}
    assert "Qwen3ForCausalLM" in now["classes"], "it is back"
    assert now["in_transformers"] == ["LostForCausalLM", "OldForCausalLM"]
    assert refreshed(now, registry, "0.33.2", tmp_path) == now
    assert json.loads(registry_text(now)) == now


def test_registry_json_is_formatted_as_written() -> None:
    path = REPOSITORY / "operator/sizing/data/registry.json"
    assert path.read_text(encoding="utf-8") == registry_text(read_data("registry.json"))


def test_unknown_layout_is_an_error(tmp_path: Path, registry: Path) -> None:
    with pytest.raises(ValueError, match="spec_decoding"):
        recipe_models(tmp_path)
    with pytest.raises(ValueError, match="_OTHER"):
        registered(registry, ["_OTHER"])
