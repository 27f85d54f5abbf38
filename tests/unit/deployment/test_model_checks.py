"""Which drafts go with which targets: rejected, or warned of in Planned."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_warnings
from specdecode_operator.enums import Method
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.memory.kv_cache import stage_weights
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.version_rules import Runner
from tests.support.decisions import NOW, desired_state
from tests.support.objects import H200, TINY_CONFIG, pair_70b, parent, tiny_cpu

QWEN, QWEN_HEAD = "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"
SPECFORGE = "sgl-project/SpecForge:configs"
H200_NODE = NodeFacts("h200-0", H200, 8)


def config_of(entry_id: str, **changes: Any) -> dict[str, Any]:
    """The config.json of an entry of the catalogue, with changes."""
    entry = find_entry(entry_id)
    assert entry is not None
    return {**entry.config, **changes}


def head(method: str, config: dict[str, Any] | None, target: str = QWEN, k: int = 3, **more: Any) -> dict[str, Any]:
    """A spec that drafts with a head."""
    draft = {"model": "org/head", "config": config} if config is not None else {"model": QWEN_HEAD}
    speculation = {"method": method, "numSpeculativeTokens": k, "draft": draft}
    return {"target": {"model": target}, "speculation": speculation, "serving": {"maxModelLen": 8192}, **more}


def without_draft(method: str, target: str, k: int = 1, **more: Any) -> dict[str, Any]:
    """A spec whose method needs no checkpoint of its own."""
    speculation = {"method": method, "numSpeculativeTokens": k}
    return {"target": {"model": target}, "speculation": speculation, "serving": {"maxModelLen": 8192}, **more}


def with_speculation(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The spec with more said of how it drafts."""
    return {**spec, "speculation": {**spec["speculation"], **changes}}


MEDUSA = {"model_type": "medusa", "hidden_size": 4096, "num_heads": 5, "num_layers": 1}
DSPARK = config_of(f"{SPECFORGE}/qwen3-8b-dspark.json", markov_rank=256)
ASSISTANT = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 5376,
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "vocab_size": 262_144,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
    },
}
SPECULATOR = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32_000,
    "speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-32B"}},
    "transformer_layer_config": {
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    },
}
DFLASH2 = config_of(f"{SPECFORGE}/qwen3-8b-dflash.json", architectures=["DFlash2DraftModel"])
DFLASH2["dflash_config"] = {**DFLASH2["dflash_config"], "conv_kernel_size": 2, "conv_group_size": 16}
ON_CPU = {
    "accelerator": {"type": "CPU", "memoryGiB": 120, "cpuCores": 8, "kvCacheGiB": 8},
    "engine": {"image": "registry.example/vllm-cpu:v0.32.0"},
}
GOOD = {
    "eagle3 of the catalogue": head("eagle3", None),
    "eagle3 by its config": head("eagle3", config_of(f"{SPECFORGE}/qwen3-8b-eagle3.json")),
    "eagle with the name of a model": head(
        "eagle", {**TINY_CONFIG, "num_hidden_layers": 1, "hidden_size": 4096, "vocab_size": 151936}
    ),
    "medusa": head("medusa", MEDUSA, engine={"version": "0.32"}),
    "eagle3 of another class": head(
        "eagle3", config_of(f"{SPECFORGE}/qwen3-8b-eagle3.json", architectures=["Eagle3Qwen3vlForCausalLM"])
    ),
    "an assistant": head("mtp", ASSISTANT, target="nvidia/Gemma-4-31B-IT-NVFP4"),
    "layers of another checkpoint": head("mtp", config_of("Qwen/Qwen3.5-27B"), target="Qwen/Qwen3.5-27B"),
    "dflash": head("dflash", config_of(f"{SPECFORGE}/qwen3-8b-dflash.json")),
    "dspark": head("dspark", DSPARK),
    "stages inside the target": without_draft("dspark", "deepseek-ai/DeepSeek-V4.1-Flash", 5),
    "mtp": without_draft("mtp", "deepseek-ai/DeepSeek-V3", 2),
    "ngram_gpu": without_draft("ngram_gpu", QWEN, 4),
    "suffix": without_draft("suffix", QWEN, 8, engine={"image": "registry.example/vllm-arctic:v0.32.0"}),
}


OTHER_VOCABULARY = head("draft_model", config_of("meta-llama/Llama-3.2-1B"))
MAPPED = {**OTHER_VOCABULARY, "speculation": {**OTHER_VOCABULARY["speculation"], "useHeterogeneousVocab": True}}
PARD = config_of("Qwen/Qwen3-0.6B", pard_token=151_669)


@pytest.mark.parametrize("spec", [MAPPED, head("draft_model", PARD)], ids=["mapped", "pard"])
def test_drafts_that_runner_v2_lacks_are_sized_for_v1(spec: dict[str, Any]) -> None:
    pair = valid_facts(SpecDecodeDeploymentSpec.model_validate(spec)).pair
    assert pair.era.runner is Runner.V1
    assert pair.maps_vocabulary == (spec is MAPPED)
    assert pair.drafts_in_parallel == (spec is not MAPPED)


def problems(spec: dict[str, Any]) -> list[Problem]:
    """What is wrong with a spec."""
    try:
        valid_facts(SpecDecodeDeploymentSpec.model_validate(spec))
    except InvalidSpecError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("name", GOOD)
def test_compatible_pair_is_accepted_and_sized(name: str) -> None:
    facts = valid_facts(SpecDecodeDeploymentSpec.model_validate(GOOD[name]))
    weights = stage_weights(facts.pair, Parallelism(8 if name == "mtp" else 1))[0]
    has_layers = facts.method not in (Method.NGRAM_GPU, Method.SUFFIX)
    assert (weights.draft_bytes > 0) == has_layers
    assert facts.pair.method == facts.method.value


BAD = {
    "more tokens than the vocabulary has": (
        head("eagle3", config_of(f"{SPECFORGE}/qwen3-8b-eagle3.json", draft_vocab_size=151_937)),
        "spec.speculation.draft.model",
        "check its draft_vocab_size",
    ),
    "a head in the speculators format as the target": (
        {"target": {"model": "org/speculator", "config": SPECULATOR}, "serving": {"maxModelLen": 8192}},
        "spec.target.model",
        "name Qwen/Qwen3-32B, and this one as speculation.draft.model with method: eagle3",
    ),
    "a head that is renamed to no class": (
        head("eagle3", config_of(f"{SPECFORGE}/qwen3-8b-eagle3.json", architectures=["PeagleLlamaForCausalLM"])),
        "spec.speculation.draft.model",
        "write Eagle3LlamaForCausalLM into architectures",
    ),
    "an assistant as a draft model": (
        head("draft_model", ASSISTANT, target="nvidia/Gemma-4-31B-IT-NVFP4"),
        "spec.speculation.draft.model",
        "use method: mtp",
    ),
    "an assistant beside another family": (
        head("mtp", {**ASSISTANT, "backbone_hidden_size": 4096}),
        "spec.speculation.draft.model",
        "keys and values of a Gemma 4 target",
    ),
    "an assistant of another width": (
        head("mtp", {**ASSISTANT, "backbone_hidden_size": 2816}, target="nvidia/Gemma-4-31B-IT-NVFP4"),
        "spec.speculation.draft.model",
        "width 2816",
    ),
    "an assistant over stages": (
        head("mtp", ASSISTANT, target="nvidia/Gemma-4-31B-IT-NVFP4", parallelism={"pipeline": 2}),
        "spec.parallelism.pipeline",
        "use 1",
    ),
    "an assistant's output head, quantized": (
        with_speculation(head("mtp", ASSISTANT, target="nvidia/Gemma-4-31B-IT-NVFP4"), draftLmHeadQuantization="fp8"),
        "spec.speculation.draftLmHeadQuantization",
        "remove it",
    ),
    "a checkpoint without layers of prediction": (
        head("mtp", config_of("Qwen/Qwen3-0.6B")),
        "spec.speculation.draft.model",
        "no layers for multi-token",
    ),
    "layers of prediction of another width": (
        head("mtp", config_of("Qwen/Qwen3.5-35B-A3B"), target="Qwen/Qwen3.5-27B"),
        "spec.speculation.draft.model",
        "width",
    ),
    "stages of DSpark in a target without": (
        without_draft("dspark", QWEN, 4),
        "spec.speculation.draft",
        "holds no stages of DSpark: name a draft, or use method ngram",
    ),
    "stages of DSpark in another checkpoint of the target": (
        without_draft("dspark", "nvidia/DeepSeek-V4-Flash-NVFP4", 7),
        "spec.speculation.draft",
        "set target.model to deepseek-ai/DeepSeek-V4-Flash-0731 or deepseek-ai/DeepSeek-V4-Flash-DSpark, or use",
    ),
    "stages of DSpark in checkpoints that the catalogue cannot size": (
        without_draft("dspark", "deepseek-ai/DeepSeek-V4-Pro", 7),
        "spec.speculation.draft",
        "set target.model to deepseek-ai/DeepSeek-V4-Pro-0813 or deepseek-ai/DeepSeek-V4-Pro-DSpark",
    ),
    "DFlash 2 on the CPU": (
        head("dflash", DFLASH2, k=7, **ON_CPU),
        "spec.speculation.draft.model",
        "DFlash 2",
    ),
    "no multiple of the modules": (
        {
            **without_draft("mtp", "org/v3", 3),
            "target": {
                "model": "org/v3",
                "config": config_of("deepseek-ai/DeepSeek-V3", num_nextn_predict_layers=2),
            },
        },
        "spec.speculation.numSpeculativeTokens",
        "write 2, or another multiple of 2",
    ),
    "a quantized head": (
        {
            **head("eagle3", None),
            "speculation": {
                "method": "eagle3",
                "numSpeculativeTokens": 3,
                "draft": {"model": QWEN_HEAD, "quantization": "FP8"},
            },
        },
        "spec.speculation.draft.quantization",
        "in its own precision",
    ),
    "a draft that is too short": (
        pair_70b(
            speculation={
                "method": "draft_model",
                "numSpeculativeTokens": 3,
                "draft": {
                    "model": "org/short",
                    "maxModelLen": 4096,
                    "config": config_of("meta-llama/Llama-3.1-8B-Instruct", max_position_embeddings=2048),
                },
            }
        ),
        "spec.speculation.draft.maxModelLen",
        "at most 2048 tokens",
    ),
    "a split of no draft": (
        without_draft("ngram", QWEN, parallelism={"tensor": 2, "draftTensor": 1}),
        "spec.parallelism.draftTensor",
        "there is no draft to split",
    ),
    "stages on the CPU": (tiny_cpu(parallelism={"pipeline": 2}), "spec.parallelism", "only be split by tensor"),
    "heads that the ranks of a CPU cannot share": (
        tiny_cpu(
            target={"model": "pair/target", "quantization": "Auto", "config": tiny_cpu()["target"]["config"]},
            speculation={"method": "ngram", "numSpeculativeTokens": 3},
            parallelism={"tensor": 3},
            accelerator={"type": "CPU", "cpuCores": 3, "memoryGiB": 30, "kvCacheGiB": 6},
        ),
        "spec.parallelism.tensor",
        "num_attention_heads 4",
    ),
    "too many stages": (without_draft("ngram", QWEN, parallelism={"pipeline": 37}), "spec.parallelism.pipeline", "36"),
}


@pytest.mark.parametrize("name", BAD)
def test_incompatible_pair_is_refused(name: str) -> None:
    spec, field, words = BAD[name]
    found = {problem.field: problem.message for problem in problems(spec)}
    assert field in found, found
    assert words in found[field]


@pytest.mark.parametrize(
    ("draft", "target", "made_for", "instead"),
    [
        ({"model": "AngelSlim/Qwen3-14B_eagle3"}, "Qwen/Qwen3-32B", "Qwen/Qwen3-14B", None),
        ({"model": "org/head", "config": SPECULATOR}, "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "AngelSlim/Qwen3-14B_eagle3"),
        ({"model": "org/head", "config": SPECULATOR}, "org/Qwen3-14B-FP8-dynamic", "Qwen/Qwen3-32B", None),
        ({"model": "org/head", "config": SPECULATOR}, "Qwen/Qwen3-32B", None, None),
        ({"model": "AngelSlim/Qwen3-14B_eagle3"}, "acme/Qwen3-14B-AWQ", None, None),
        ({"model": "AngelSlim/Qwen3-14B_eagle3"}, "acme/Qwen3-14B-support", None, None),
        ({"model": "AngelSlim/Qwen3-14B_eagle3"}, "acme/assistant", None, None),
    ],
)
def test_head_made_for_another_target_is_a_warning(
    draft: dict[str, Any], target: str, made_for: str | None, instead: str | None
) -> None:
    served = {"model": target} | ({} if target.startswith("Qwen") else {"config": config_of("Qwen/Qwen3-14B")})
    speculation = {"method": "eagle3", "numSpeculativeTokens": 3, "draft": draft}
    spec = {"target": served, "speculation": speculation, "serving": {"maxModelLen": 8192}}
    told = [
        warning
        for warning in plan_warnings(valid_facts(SpecDecodeDeploymentSpec.parse(spec)), {}, 1)
        if "was made for" in warning
    ]
    assert len(told) == (made_for is not None)
    assert all(f"made for {made_for}, not for {target}" in warning and (instead or "") in warning for warning in told)


def planned_message(spec: dict[str, Any]) -> str:
    """What Planned says of a spec on H200s."""
    owner = parse_deployment(parent(spec))
    desired = desired_state(owner, (H200_NODE,))
    assert isinstance(desired.outcome, Launch)
    conditions = compose_status(owner, desired, Observation(), NOW).conditions
    return next(condition.message for condition in conditions if condition.type == "Planned")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"version": "0.32"}, None),
        ({"version": "0.99", "image": "vllm/vllm-openai:v0.99.0"}, "spec.engine.version: 0.99: is untested"),
        ({"version": "0.32", "image": "registry:5000/vllm-openai:v0.28.1"}, "is vLLM 0.28 by its name"),
        ({"version": "0.32", "image": "registry:5000/engine:v0.28.1"}, None),
        ({"version": "0.28", "image": "registry:5000/vllm-openai:v0.28.1"}, None),
    ],
    ids=str,
)
def test_untested_or_mismatched_engine_version_is_a_warning(engine: dict[str, str], told: str | None) -> None:
    message = planned_message(pair_70b(engine=engine))
    if told is None:
        assert "vLLM 0.28" not in message
        assert "untested" not in message
    else:
        assert told in message


def test_adaptive_verification_warns_that_acceptance_reads_low() -> None:
    def planned(*, adaptive: bool) -> str:
        return planned_message(pair_70b(speculation=pair_70b()["speculation"] | {"adaptiveVerification": adaptive}))

    assert "acceptance reads low" in planned(adaptive=True)
    assert "acceptance" not in planned(adaptive=False)


def test_lossy_speculation_warns_that_outputs_differ() -> None:
    lossy = {"rejectionSampling": "fly", "lossy": True}
    message = planned_message(pair_70b(speculation=pair_70b()["speculation"] | lossy))
    assert "outputs differ from meta-llama/Llama-3.1-70B-Instruct" in message
    assert "outputs differ" not in planned_message(pair_70b())


def test_draft_tensor_without_effect_is_a_warning() -> None:
    message = planned_message(pair_70b(parallelism={"tensor": 2, "draftTensor": 1}))
    assert "parallelism.draftTensor 1 has no effect" in message
    assert "over 2 GPUs" in message
    assert "draftTensor" not in planned_message(pair_70b(parallelism={"tensor": 2, "draftTensor": 2}))


RANGES = [{"from": 1, "to": 8, "numSpeculativeTokens": 3}, {"from": 9, "to": 256, "numSpeculativeTokens": 0}]


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.32", ("runner V2 of vLLM 0.32", "captured for each number", "still proposes 3 tokens each step")),
        ("0.30", ("runner V1 of vLLM 0.30", "in pieces only", "still runs once each step")),
    ],
)
def test_schedule_warning_names_graph_capture_and_draft_steps(version: str, told: tuple[str, ...]) -> None:
    spec = pair_70b(engine={"version": version})
    spec["speculation"]["numSpeculativeTokens"] = 3
    assert "numSpeculativeTokensByBatchSize" not in planned_message(spec)
    spec["speculation"]["numSpeculativeTokensByBatchSize"] = RANGES
    message = planned_message(spec)
    assert all(words in message for words in told), message


@pytest.mark.parametrize(
    "argument",
    [
        "--cpu-offload-gb={}",
        "--enable-lora",
        "--kv-transfer-config={}",
        "--mm-encoder-tp-mode=data",
        "--disable-hybrid-kv-cache-manager",
        "--mamba-ssm-cache-dtype=float32",
    ],
)
def test_flag_that_the_plan_does_not_count_is_a_warning(argument: str) -> None:
    told = f"engine.extraArgs has {argument.partition('=')[0]}, which the plan does not count"
    batch = {"maxNumBatchedTokens": 16_384}
    assert told not in planned_message(pair_70b(serving=batch))
    assert told in planned_message(pair_70b(serving=batch, engine={"extraArgs": [argument]}))
