"""Commands and objects of public reports: what `specdecode import` makes of each.

The inputs are those of vllm-project/recipes, of issues of vllm-project/vllm and of KServe's samples, shortened.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from specdecode_operator.importing.convert import Migration, migrate_workload
from specdecode_operator.importing.sources import read_words
from specdecode_operator.importing.spec_builder import MigrationError
from specdecode_operator.vllm.speculative_config import read_lax


def command(*words: str, sc: Mapping[str, Any] | None = None, version: str = "0.33") -> Migration:
    """Import ``vllm serve WORDS``, with a --speculative-config."""
    speculative = ["--speculative-config", json.dumps(sc)] if sc else []
    return migrate_workload(read_words(["vllm", "serve", *words, *speculative]), engine_version=version)


def with_config(name: str, config: Mapping[str, Any], *words: str, sc: Mapping[str, Any] | None = None) -> Migration:
    """Import ``vllm serve NAME WORDS`` with the model's config.json."""
    speculative = ["--speculative-config", json.dumps(sc)] if sc else []
    workload = read_words(["vllm", "serve", name, *words, *speculative])
    return migrate_workload(workload, engine_version="0.33", configs={name: config})


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
def test_speculative_keys_without_a_field_become_extra_config(model: str, keys: dict[str, Any]) -> None:
    """vllm-project/recipes MiniMax-M3, Qwen3.6-35B-A3B; vllm#32206; vllm#41559."""
    migration = command(model, sc={"method": "mtp", "num_speculative_tokens": 3, **keys})
    assert not migration.decisions, decided(migration)
    assert speculation(migration)["extraConfig"] == keys


def test_mtp_checkpoint_becomes_the_draft() -> None:
    """vllm#48848, Step-3.7-Flash guide: with method mtp the key model names the checkpoint that drafts."""
    keys = {"method": "mtp", "model": "org/qwen3.5-9b-mtp-finetuned", "num_speculative_tokens": 2}
    migration = command("Qwen/Qwen3.5-9B", "--max-model-len", "32768", sc=keys)
    assert speculation(migration) == {
        "method": "mtp",
        "numSpeculativeTokens": 2,
        "draft": {"model": "org/qwen3.5-9b-mtp-finetuned"},
    }


def test_local_mtp_checkpoint_is_a_decision() -> None:
    keys = {"method": "mtp", "model": "/models/qwen3.5-9b-mtp-finetuned", "num_speculative_tokens": 2}
    migration = command("Qwen/Qwen3.5-9B", sc=keys)
    assert "spec.speculation.draft.model: /models/qwen3.5-9b-mtp-finetuned" in decided(migration)


def test_mtp_draft_equal_to_the_target_is_omitted() -> None:
    keys = {"method": "mtp", "model": "Qwen/Qwen3.5-9B", "num_speculative_tokens": 2}
    migration = command("Qwen/Qwen3.5-9B", sc=keys)
    assert not migration.decisions, decided(migration)
    assert speculation(migration) == {"method": "mtp", "numSpeculativeTokens": 2}
    assert "draft Qwen/Qwen3.5-9B" in told(migration)


def test_suffix_without_k_uses_the_maximum_tree_depth() -> None:
    """OpenHands docs: {"method": "suffix"} alone; vLLM takes suffix_decoding_max_tree_depth."""
    migration = command("Qwen/Qwen3-30B-A3B", sc={"method": "suffix"})
    assert [each.field for each in migration.decisions] == ["spec.engine.image"]
    assert speculation(migration) == {"method": "suffix", "numSpeculativeTokens": 24}
    deeper = speculation(command("Qwen/Qwen3-30B-A3B", sc={"method": "suffix", "suffix_decoding_max_tree_depth": 64}))
    assert deeper == {"method": "suffix", "numSpeculativeTokens": 64, "suffix": {"maxTreeDepth": 64}}


def test_suffix_may_propose_more_than_32_tokens() -> None:
    migration = command("Qwen/Qwen3-30B-A3B", sc={"method": "suffix", "num_speculative_tokens": 48})
    assert [each.field for each in migration.decisions] == ["spec.engine.image"]
    other = command("Qwen/Qwen3-30B-A3B", sc={"method": "ngram", "num_speculative_tokens": 48})
    assert [each.field for each in other.decisions] == ["spec.speculation.numSpeculativeTokens"]


def test_other_method_without_k_is_a_decision() -> None:
    migration = command("Qwen/Qwen3-30B-A3B", sc={"method": "ngram"})
    assert "spec.speculation.numSpeculativeTokens" in [each.field for each in migration.decisions]


def test_dspark_without_a_draft_uses_the_target() -> None:
    """vllm-project/recipes DeepSeek-V4-Flash: vLLM takes the target's own checkpoint."""
    migration = command("deepseek-ai/DeepSeek-V4-Flash-0731", sc={"method": "dspark", "num_speculative_tokens": 3})
    assert speculation(migration) == {"method": "dspark", "numSpeculativeTokens": 3}


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--max-model-len", "32768"], 32768),
        (["--max-model-len", "4096"], 8192),
        (["--max-model-len", "32768", "--max-num-batched-tokens", "65536"], 65536),
        ([], 262144),
    ],
)
def test_max_num_batched_tokens_covers_max_model_len_without_chunking(words: list[str], tokens: int) -> None:
    """vllm-project/recipes Qwen3-Next-80B: vLLM raises max_num_batched_tokens to max_model_len."""
    keys = {"method": "qwen3_next_mtp", "num_speculative_tokens": 2}
    recipe = ("Qwen/Qwen3-Next-80B-A3B-Instruct", "--no-enable-chunked-prefill", "-tp", "8")
    migration = command(*recipe, *words, sc=keys)
    assert not migration.decisions, decided(migration)
    assert migration.body["spec"]["serving"]["maxNumBatchedTokens"] == tokens


def test_max_num_batched_tokens_of_an_unknown_model_is_a_decision() -> None:
    migration = command("org/unknown", "--no-enable-chunked-prefill")
    assert "spec.serving.maxNumBatchedTokens" in [each.field for each in migration.decisions]


SPECULATOR = "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"
SPECULATORS_CONFIG = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
}


def test_speculators_checkpoint_becomes_its_verifier_with_a_head() -> None:
    """vLLM docs: vllm serve RedHatAI/…-speculator.eagle3 serves the verifier and drafts with the head."""
    migration = with_config(SPECULATOR, SPECULATORS_CONFIG, "--max-model-len", "16384")
    assert migration.body["spec"]["target"]["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert speculation(migration) == {
        "method": "eagle3",
        "numSpeculativeTokens": 3,
        "draft": {"model": SPECULATOR},
    }
    assert migration.body["spec"]["serving"]["servedModelNames"] == [SPECULATOR]


def test_speculators_and_speculative_config_are_merged_as_in_vllm() -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 5, "attention_backend": "TRITON_ATTN"}
    migration = with_config(SPECULATOR, SPECULATORS_CONFIG, sc=keys)
    found = speculation(migration)
    assert (found["method"], found["numSpeculativeTokens"]) == ("eagle3", 5)
    assert found["extraConfig"] == {"attention_backend": "TRITON_ATTN"}
    assert "vLLM uses speculators_config" in told(migration)


@pytest.mark.parametrize(
    ("kind", "method"), [("peagle", "eagle3"), ("dflash2", "dflash"), ("dflash", "dflash"), ("eagle", "eagle")]
)
def test_method_of_a_speculators_checkpoint_matches_vllm(kind: str, method: str) -> None:
    config = {**SPECULATORS_CONFIG, "speculators_model_type": kind}
    assert speculation(with_config("org/head", config))["method"] == method


def test_head_without_its_config_is_a_decision() -> None:
    (decision,) = command("org/Llama-3.1-8B-Instruct-speculator.eagle3", "--max-model-len", "16384").decisions
    assert (decision.field, "--model-config" in decision.message) == ("spec.target.model", True)
    known = command("AngelSlim/Qwen3-1.7B_eagle3")
    assert "serve Qwen/Qwen3-1.7B with method eagle3" in decided(known)


def test_model_config_of_another_model_is_refused() -> None:
    workload = read_words(["vllm", "serve", "org/model"])
    with pytest.raises(MigrationError, match="--model-config: org/other"):
        migrate_workload(workload, configs={"org/other": {}})


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("num_speculative_tokens", " 4 ", 4),
        ("num_speculative_tokens", 4.0, 4),
        ("num_speculative_tokens", "four", "four"),
        ("num_speculative_tokens", "4.5", "4.5"),
        ("suffix_decoding_max_spec_factor", "1.5", 1.5),
        ("suffix_decoding_max_spec_factor", "nan", "nan"),
        ("use_heterogeneous_vocab", "Yes", True),
        ("use_heterogeneous_vocab", 0, False),
        ("use_heterogeneous_vocab", 2, 2),
        ("moe_backend", "3", "3"),
    ],
)
def test_speculative_values_are_converted_as_in_lax_mode(key: str, value: object, read: object) -> None:
    found = read_lax(key, value)
    assert (found, type(found)) == (read, type(read))


LONG_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "rope_type": "yarn",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "factor": 4.0,
    "original_max_position_embeddings": 262144,
}
LONG_QWEN = ("Qwen/Qwen3.6-35B-A3B", "-tp", "8", "--max-model-len", "1010000")


def overriding(rope: Mapping[str, Any], **more: Any) -> Migration:
    """Import Qwen3.6 with a rope by --hf-overrides, as its model card has it."""
    text = json.dumps({"text_config": {"rope_parameters": rope, **more}})
    words = ["env", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", "vllm", "serve", *LONG_QWEN, "--hf-overrides", text]
    return migrate_workload(read_words(words), engine_version="0.33")


def test_yarn_with_the_rope_parameters_of_the_model_becomes_a_field() -> None:
    """Model cards of Qwen3.5 and Qwen3.6; vllm-project/recipes#398."""
    migration = overriding(LONG_ROPE)
    assert not migration.decisions, decided(migration)
    scaling = {"type": "yarn", "factor": "4", "originalMaxPositionEmbeddings": 262144}
    assert migration.body["spec"]["target"]["ropeScaling"] == scaling
    assert "extraArgs" not in migration.body["spec"]["engine"]


@pytest.mark.parametrize(
    ("rope", "more"),
    [({**LONG_ROPE, "rope_theta": 5}, {}), (LONG_ROPE, {"vocab_size": 248320})],
    ids=["another base", "another override"],
)
def test_yarn_with_other_overrides_stays_an_argument(rope: dict[str, Any], more: dict[str, Any]) -> None:
    migration = overriding(rope, **more)
    assert not migration.decisions, decided(migration)
    assert "--hf-overrides" in migration.body["spec"]["engine"]["extraArgs"]


def test_variable_allows_a_length_beyond_that_of_the_model() -> None:
    words = ["vllm", "serve", "Qwen/Qwen3-32B", "-tp", "4", "--max-model-len", "131072"]
    allowed = migrate_workload(read_words(["env", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", *words]), engine_version="0.33")
    assert not allowed.decisions, decided(allowed)
    assert [each.field for each in migrate_workload(read_words(words)).decisions] == ["spec.serving.maxModelLen"]
