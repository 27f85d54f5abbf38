"""The weekly comparison of the catalogue with recipes and vLLM's registry, on small ones."""

from pathlib import Path

import pytest

from bench.sizing.catalogue_gaps import page, recipe_models, registered

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
"""


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


def test_targets_of_variants_and_drafts_are_models_of_a_recipe(recipes: Path) -> None:
    assert recipe_models(recipes) == {
        "models/Qwen/a.yaml": ("Qwen/Qwen3-32B", "new/Qwen3-32B-FP9", "new/head"),
        "models/Qwen/b.yaml": ("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"),
    }


def test_the_page_names_what_the_catalogue_and_sizing_lack(recipes: Path, registry: Path) -> None:
    lines = page(recipes, registry, "0.34.0").splitlines()
    assert lines[0].startswith("# ")
    assert "- models/Qwen/a.yaml: `new/Qwen3-32B-FP9`, `new/head`" in lines
    assert [line for line in lines if line.startswith("- `")] == ["- `NewMTPModel`", "- `NewForCausalLM`"]
    assert not any("b.yaml" in line for line in lines), "all of it is known"
    assert any("0.34.0" in line for line in lines)


def test_there_is_no_page_if_nothing_is_missing(recipes: Path, registry: Path) -> None:
    (recipes / "models/Qwen/a.yaml").unlink()
    registry.write_text(REGISTRY.replace("New", "Qwen3").replace("Qwen3MTPModel", "MedusaModel"))
    assert page(recipes, registry, "0.34.0") == ""


def test_another_layout_is_an_error_and_no_empty_page(tmp_path: Path, registry: Path) -> None:
    with pytest.raises(ValueError, match="spec_decoding"):
        recipe_models(tmp_path)
    with pytest.raises(ValueError, match="_OTHER"):
        registered(registry, ["_OTHER"])
