"""Pairs that our rules refuse, each with what the real vLLM does with them."""

import copy
from typing import Any

from specdecode_operator.sizing.catalogue import find_entry
from tests.engine.oracle_cases import HEADS as HEADS_OF_CLASSES
from tests.engine.verdicts import Later, Ours, Refused, Verdict
from tests.support.objects import Body, tiny_cpu
from tests.support.state_space_models import MAMBA2

QWEN, QWEN_HEAD = "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"
HEADS = "sgl-project/SpecForge:configs"
ON_CPU: Body = {
    "accelerator": {"type": "CPU", "memoryGiB": 120, "cpuCores": 8, "kvCacheGiB": 8},
    "engine": {"image": "registry.example/vllm-cpu:v0.32.0"},
}


def config_of(model: str, **changes: Any) -> Body:
    """Return the config.json of an entry of the catalogue, with changes."""
    entry = find_entry(model)
    assert entry is not None
    return {**copy.deepcopy(entry.config), **changes}


def pair(method: str, draft: Body | None, target: str | Body = QWEN, k: int = 3, **more: Any) -> Body:
    """Return a spec of a target and what drafts for it, each a name or a config.json."""
    speculation: Body = {"method": method, "numSpeculativeTokens": k}
    if draft is not None:
        speculation["draft"] = {"model": "org/draft", "config": draft}
    model = {"model": target} if isinstance(target, str) else {"model": "org/target", "config": target}
    return {"target": model, "speculation": speculation, "serving": {"maxModelLen": 2048}, **more}


def several_dimensions(model: str) -> Body:
    """Return the config.json of a model that sees, with what the catalogue leaves out because it takes no memory."""
    config = config_of(model)
    config["text_config"]["rope_scaling"] = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    return config


def with_draft(body: Body, **changes: Any) -> Body:
    """Return the spec with more said of its draft."""
    body["speculation"]["draft"] |= changes
    return body


def with_speculation(body: Body, **changes: Any) -> Body:
    """Return the spec with more said of how it drafts."""
    body["speculation"] |= changes
    return body


EAGLE3 = config_of(f"{HEADS}/qwen3-8b-eagle3.json")
MEDUSA: Body = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 4096,
    "vocab_size": 151_936,
    "num_heads": 5,
    "num_layers": 1,
    "num_hidden_layers": 1,
    "max_seq_len": 40_960,
}
XPRESS = config_of(f"{HEADS}/qwen3-8b-dflash.json", architectures=["Qwen3XPressModel"], xpress_block_size=8)
CRASHES = "a crash in the workers once weights are loaded, in the first step"
HEAD_FILE = "vllm/model_executor/models/llama_eagle3.py"

ASSISTANT = HEADS_OF_CLASSES["assistant of Gemma-4-26B-A4B"]
ASSISTANT_FILE = "vllm/v1/worker/gpu/spec_decode/gemma4/speculator.py"
GEMMA = "google/gemma-4-26B-A4B"
WITHOUT_PACKAGE = "a package that the image lacks"

PAIRS: dict[str, tuple[Body, Verdict]] = {
    "a head as the target": (
        {"target": {"model": QWEN_HEAD}, "serving": {"maxModelLen": 2048}},
        Ours(f"{HEAD_FILE} reads hidden states that no target hands it: {CRASHES}"),
    ),
    "blocks in copies with experts": (
        pair(
            "dflash",
            {**config_of(f"{HEADS}/qwen3-8b-dflash.json"), "hidden_size": 2048},
            target="Qwen/Qwen3-30B-A3B",
            parallelism={"data": 2, "expert": True},
            engine={"version": "0.29"},
        ),
        Ours("vllm/forward_context.py, DPMetadata.make, fails in the profiling run of 0.28 and 0.29 (vllm#56281)"),
    ),
    "a model where a head is due": (
        pair("eagle3", config_of("Qwen/Qwen3-0.6B")),
        Ours(f"{HEAD_FILE}, load_weights: such a checkpoint has none of its weights"),
    ),
    "a head where a model is due": (
        pair("draft_model", EAGLE3),
        Ours(f"vllm/v1/worker/gpu/spec_decode/standalone_ar calls it without hidden states: {CRASHES}"),
    ),
    "a head of another method": (pair("dflash", EAGLE3), Refused("are not supported for now")),
    "a model of another vocabulary": (
        pair("draft_model", config_of("meta-llama/Llama-3.2-1B")),
        Refused("Target and draft model should have the same vocabulary size"),
    ),
    "a head of another vocabulary": (
        pair("eagle3", {**EAGLE3, "vocab_size": 128_256}),
        Ours(f"{HEAD_FILE} looks the target's tokens up in a table of its own vocabulary"),
    ),
    "a head of another width": (
        pair("eagle3", config_of(f"{HEADS}/qwen3-4b-eagle3.json")),
        Ours(f"{HEAD_FILE}, fc, multiplies states of its own width: {CRASHES}"),
    ),
    "more tokens than the vocabulary has": (
        pair("eagle3", {**EAGLE3, "draft_vocab_size": 151_937}),
        Ours(f"{HEAD_FILE}, draft_id_to_target_id, cannot name tokens that the target lacks"),
    ),
    "a quantized head": (
        with_draft(pair("eagle3", EAGLE3), quantization="FP8"),
        Ours("what vLLM makes of a head while loading is not known to sizing"),
    ),
    "checkpoints of a head": (
        {
            **with_draft(pair("eagle3", EAGLE3), checkpoints=[{"quantization": "FP8", "model": "org/fp8"}]),
            "target": {"model": QWEN, "quantization": "Auto"},
        },
        Ours("what vLLM makes of a head while loading is not known to sizing"),
    ),
    "a draft that is too short": (
        with_draft(
            pair("draft_model", config_of("Qwen/Qwen3-0.6B", max_position_embeddings=1024), **ON_CPU), maxModelLen=1025
        ),
        Refused("greater than the derived max_model_len"),
    ),
    "a target that no stages have": (
        pair("ngram", None, target={**MAMBA2, "model_type": "mamba2"}, parallelism={"pipeline": 2}),
        Refused("Pipeline parallelism is not supported for this model"),
    ),
    "a target that keeps its states": (
        pair("eagle3", {**EAGLE3, "vocab_size": 32_000}, target="mistralai/Mixtral-8x7B-Instruct-v0.1"),
        Later("inner_states", "does not support EAGLE3 interface"),
    ),
    "states that do not cross stages": (
        pair(
            "eagle3",
            config_of(f"{HEADS}/qwen3-30B-A3B-eagle3.json"),
            target="Qwen/Qwen3-30B-A3B",
            parallelism={"pipeline": 2},
        ),
        Ours(
            "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, verify_supports_aux_hidden_states_over_pp, raises "
            "after loading; test_targets_can_do_what_we_say asks the classes"
        ),
    ),
    "more tokens than Medusa has heads": (
        pair("medusa", MEDUSA, k=6, engine={"version": "0.32"}),
        Ours("vllm/v1/spec_decode/medusa.py proposes a token a head, whatever K is: fewer than the engine was told"),
    ),
    "an XPress head on model runner V1": (pair("dflash", XPRESS, k=7, **ON_CPU), Refused("xpress")),
    "fewer tokens than an XPress head refines": (
        pair("dflash", XPRESS),
        Ours(
            "vllm/v1/worker/gpu/spec_decode/xpress/kernels.py reads the mixer as one of K + 1 places, whatever it has"
        ),
    ),
    "an XPress head that samples": (
        with_speculation(pair("dflash", XPRESS, k=7), draftSampling="probabilistic"),
        Ours(
            "vllm/v1/worker/gpu/spec_decode/xpress/speculator.py never writes the logits that its drafts are checked by"
        ),
    ),
    "candidates of a head without a refiner": (
        with_speculation(pair("dflash", config_of(f"{HEADS}/qwen3-8b-dflash.json")), xpressTopC=64),
        Refused("xpress_topc is only supported by XPress"),
    ),
    "more candidates than tokens": (
        with_speculation(pair("dflash", XPRESS, k=7), xpressTopC=151_937),
        Refused("xpress_topc must be between 0 and the draft vocabulary size"),
    ),
    "a head that is renamed to no class": (
        pair("eagle3", {**EAGLE3, "architectures": ["PeagleLlamaForCausalLM"]}),
        Refused("are not supported for now"),
    ),
    "stages of DSpark in a target without": (
        pair("dspark", None, k=4),
        Ours("vllm/models/deepseek_v4, DSparkDeepseekV4ForCausalLM, reads keys of its config.json that others lack"),
    ),
    "a checkpoint without layers of prediction": (
        pair("mtp", config_of(QWEN), k=1),
        Refused("Unsupported speculative method: 'mtp'"),
    ),
    "an assistant beside another family": (
        pair(
            "mtp",
            {
                **ASSISTANT,
                "backbone_hidden_size": 4096,
                "text_config": {**ASSISTANT["text_config"], "vocab_size": 151_936},
            },
        ),
        Ours(f"{ASSISTANT_FILE}, _setup_gemma4_kv_sharing, finds no layers to read keys and values of"),
    ),
    "an assistant over stages": (
        pair("mtp", ASSISTANT, target=GEMMA, parallelism={"pipeline": 2}),
        Ours(f"{ASSISTANT_FILE}, _share_embeddings, leaves it its own embedding, of another width: {CRASHES}"),
    ),
    "a quantized output head of an assistant": (
        with_speculation(pair("mtp", ASSISTANT, target=GEMMA), draftLmHeadQuantization="fp8"),
        Refused("draft_lm_head_quantization"),
    ),
    "a DFlash 2 head on model runner V1": (
        pair("dflash", HEADS_OF_CLASSES["DFlash 2 for Qwen3.5-27B"], target="Qwen/Qwen3.5-27B", k=7, **ON_CPU),
        Refused("DFlash candidate-head drafts"),
    ),
    "own layers of a model without": (pair("mtp", None, k=1), Refused("Unsupported speculative method: 'mtp'")),
    WITHOUT_PACKAGE: (pair("suffix", None), Refused("Arctic Inference is required")),
    "a split of no draft": (
        pair("ngram", None, parallelism={"tensor": 2, "draftTensor": 1}),
        Ours("nothing is there that could follow it"),
    ),
    "a whole draft of a target whose split is left open": (
        pair("draft_model", config_of("Qwen/Qwen3-0.6B"), parallelism={"draftTensor": 1}, engine={"version": "0.30"}),
        Ours("the plan would choose a split that the engine refuses beside it: see the whole draft of a split target"),
    ),
    "stages on the CPU": (
        tiny_cpu(speculation={"method": "ngram", "numSpeculativeTokens": 3}, parallelism={"pipeline": 2}),
        Ours("sizing knows ranks of one kind on the CPU, and nobody has asked for more"),
    ),
    "part of a GiB for a rank": (
        tiny_cpu(parallelism={"tensor": 2}),
        Ours("VLLM_CPU_KVCACHE_SPACE is given a rank, in whole GiB (vllm/envs.py, vllm/platforms/cpu.py)"),
    ),
    "a draft that sees, on V1": (
        pair(
            "draft_model",
            several_dimensions("Qwen/Qwen3-VL-2B-Instruct"),
            target=several_dimensions("Qwen/Qwen3-VL-32B-Instruct"),
            **ON_CPU,
        ),
        Later("draft_positions", "does not support M-RoPE yet"),
    ),
    "a draft in several groups, on V1": (
        pair("draft_model", config_of("google/gemma-3-4b-it"), target="google/gemma-3-27b-it", **ON_CPU),
        Ours("vllm/v1/spec_decode/llm_base_proposer.py, validate_same_kv_cache_group, once the cache is divided"),
    ),
}
"""Of deployment/model_checks.py and deployment/model_checks.py."""
