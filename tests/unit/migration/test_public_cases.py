"""Commands and objects of public reports: what `specdecode import` makes of each.

The inputs are those of vllm-project/recipes, of issues of vllm-project/vllm and of KServe's samples, shortened.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from specdecode_operator.migration.convert import Migration, migrate_workload
from specdecode_operator.migration.sources.command_line import read_words


def command(*words: str, sc: Mapping[str, Any] | None = None, version: str = "0.33") -> Migration:
    """Import ``vllm serve WORDS``, with a --speculative-config."""
    speculative = ["--speculative-config", json.dumps(sc)] if sc else []
    return migrate_workload(read_words(["vllm", "serve", *words, *speculative]), engine_version=version)


def speculation(migration: Migration) -> dict[str, Any]:
    """Return what the object says of speculation."""
    found: dict[str, Any] = migration.body["spec"]["speculation"]
    return found


def decided(migration: Migration) -> str:
    """Return what a person must decide."""
    return "\n".join(map(str, migration.decisions))


def told(migration: Migration) -> str:
    """Return what became of each setting."""
    return "\n".join(f"{each.name}: {each.result}" for each in migration.settings)


WITHOUT_FIELD = {
    "backends of the draft": ("Qwen/Qwen3.6-35B-A3B", {"attention_backend": "triton_attn", "moe_backend": "triton"}),
    "no padding": ("Qwen/Qwen3.5-27B", {"disable_padded_drafter_batch": True}),
    "cache of the draft": ("Qwen/Qwen3.5-27B", {"kv_cache_dtype": "auto", "enforce_eager": True}),
    "loader of the draft": ("Qwen/Qwen3.5-27B", {"draft_load_config": {"load_format": "safetensors"}}),
}


@pytest.mark.parametrize(("model", "keys"), WITHOUT_FIELD.values(), ids=WITHOUT_FIELD)
def test_keys_without_a_field_are_passed_on(model: str, keys: dict[str, Any]) -> None:
    """vllm-project/recipes MiniMax-M3, Qwen3.6-35B-A3B; vllm#32206; vllm#41559."""
    migration = command(model, sc={"method": "mtp", "num_speculative_tokens": 3, **keys})
    assert not migration.decisions, decided(migration)
    assert speculation(migration)["extraConfig"] == keys


def test_the_checkpoint_of_mtp_layers_is_kept() -> None:
    """vllm#48848, Step-3.7-Flash guide: with method mtp the key model names the checkpoint that drafts."""
    keys = {"method": "mtp", "model": "org/qwen3.5-9b-mtp-finetuned", "num_speculative_tokens": 2}
    migration = command("Qwen/Qwen3.5-9B", "--max-model-len", "32768", sc=keys)
    assert speculation(migration) == {
        "method": "mtp",
        "numSpeculativeTokens": 2,
        "draft": {"model": "org/qwen3.5-9b-mtp-finetuned"},
    }


@pytest.mark.parametrize("method", [{"method": "mtp"}, {}], ids=["named", "told by the name"])
def test_an_assistant_of_gemma_4_drafts_by_mtp(method: dict[str, str]) -> None:
    """vllm-project/recipes gemma-4: vLLM serves google/gemma-4-*-it-assistant as gemma4_mtp."""
    keys = {**method, "model": "google/gemma-4-26B-A4B-it-assistant", "num_speculative_tokens": 4}
    found = speculation(command("google/gemma-4-26B-A4B-it", sc=keys))
    assert (found["method"], found["draft"]["model"]) == ("mtp", keys["model"])


def test_a_draft_of_mtp_on_the_machine_is_a_decision() -> None:
    keys = {"method": "mtp", "model": "/models/qwen3.5-9b-mtp-finetuned", "num_speculative_tokens": 2}
    migration = command("Qwen/Qwen3.5-9B", sc=keys)
    assert "spec.speculation.draft.model: /models/qwen3.5-9b-mtp-finetuned" in decided(migration)


def test_the_target_as_its_own_draft_needs_no_field() -> None:
    keys = {"method": "mtp", "model": "Qwen/Qwen3.5-9B", "num_speculative_tokens": 2}
    migration = command("Qwen/Qwen3.5-9B", sc=keys)
    assert not migration.decisions, decided(migration)
    assert speculation(migration) == {"method": "mtp", "numSpeculativeTokens": 2}
    assert "draft Qwen/Qwen3.5-9B" in told(migration)
