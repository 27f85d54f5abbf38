"""Settings, and command lines, that the real vLLM is asked about."""

import json
from pathlib import Path
from typing import Any

from specdecode_operator.api.deployment import Serving
from specdecode_operator.api.speculation import Draft, Ngram
from specdecode_operator.enums import DraftSampling, Method, OnlineQuantization, RejectionSampling
from specdecode_operator.vllm.settings import CpuSettings, EngineSettings, NodeGroup, ScheduleRange
from tests.support.engine_settings import replace, speculating_with

TARGET, DRAFT, OTHER_VOCABULARY, EAGLE_PATH = "target", "draft", "other-vocabulary", "eagle-house/draft"

DRAFT_MODEL = speculating_with(Method.DRAFT_MODEL, 5, draft_model=DRAFT)
FULL_DRAFT = replace(
    DRAFT_MODEL, draft_online_quantization=OnlineQuantization.FP8, draft=Draft(model=DRAFT, max_model_len=256)
)
NGRAM = speculating_with(Method.NGRAM, 4, ngram=Ngram(prompt_lookup_min=2, prompt_lookup_max=4))
SCHEDULED = replace(DRAFT_MODEL, schedule=(ScheduleRange(3, 8, 2), ScheduleRange(20, 30, 0)))

GPU = EngineSettings(
    model=TARGET,
    served_model_names=("one", "two"),
    max_model_len=512,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    block_size=32,
    tensor_parallel_size=1,
    shutdown_timeout_s=60,
    serving=Serving(),
)
CPU = replace(GPU, cpu=CpuSettings(kv_cache_gib=1, cores=2), block_size=128)

GOOD = {
    f"{platform}-{name}": replace(base, speculation=speculation)
    for platform, base in (
        *(("gpu", GPU), ("cpu", CPU), ("gpu-tp2", replace(GPU, tensor_parallel_size=2))),
        ("cpu-tp2", replace(CPU, tensor_parallel_size=2, cpu=CpuSettings(kv_cache_gib=2, cores=2))),
    )
    for name, speculation in (("none", None), ("draft", DRAFT_MODEL), ("ngram", NGRAM), ("schedule", SCHEDULED))
} | {
    "gpu-everything": replace(
        GPU,
        dtype="bfloat16",
        online_quantization=OnlineQuantization.FP8,
        kv_cache_dtype="fp8",
        enforce_eager=True,
        speculation=FULL_DRAFT,
        extra_args=("--async-scheduling", "--seed=3"),
    ),
    "gpu-sampling": replace(
        GPU,
        max_cudagraph_capture_size=48,
        speculation=replace(
            DRAFT_MODEL, rejection_sampling=RejectionSampling.BLOCK, draft_sampling=DraftSampling.PROBABILISTIC
        ),
    ),
    "cpu-sampling": replace(CPU, speculation=replace(DRAFT_MODEL, draft_sampling=DraftSampling.PROBABILISTIC)),
    "gpu-adaptive": replace(
        GPU,
        model="qwen3",
        speculation=speculating_with(Method.DSPARK, 4, draft_model="linked-block", adaptive_verification=True),
    ),
    "gpu-not-adaptive": replace(GPU, speculation=replace(DRAFT_MODEL, adaptive_verification=False)),
    "ngram-one-bound": replace(GPU, speculation=speculating_with(Method.NGRAM, 2, ngram=Ngram(prompt_lookup_max=3))),
}
LOSSY = replace(DRAFT_MODEL, rejection_sampling=RejectionSampling.FLY, lossy=True)
LOSSY_CHECKS = {
    "V2": replace(GPU, speculation=LOSSY),
    "V1": replace(GPU, speculation=replace(LOSSY, draft_model="parallel", drafts_in_parallel=True)),
    "two tokens": replace(GPU, speculation=replace(LOSSY, num_speculative_tokens=2)),
    "eight tokens": replace(GPU, speculation=replace(LOSSY, num_speculative_tokens=8)),
}
"""Checks of drafted tokens that lose the target's own answers, on both runners."""
DUAL_KEY = '{"key": 1, "algorithm": "dual_key_gumbel"}'
"""A watermark that drafted tokens carry, too."""
ON_THE_EDGE = {
    "as many tokens as requests": replace(GPU, max_num_batched_tokens=64),
    "as many tokens as a prompt may have": replace(
        GPU, max_num_batched_tokens=512, extra_args=("--no-enable-chunked-prefill",)
    ),
    "a draft as long as its target": replace(
        GPU, speculation=replace(DRAFT_MODEL, draft=Draft(model=DRAFT, max_model_len=256))
    ),
    "a lookup of one length": replace(
        GPU, speculation=replace(NGRAM, ngram=Ngram(prompt_lookup_min=4, prompt_lookup_max=4))
    ),
    "a range of all tokens": replace(GPU, speculation=replace(DRAFT_MODEL, schedule=(ScheduleRange(1, 1, 5),))),
    "a step of one draft": replace(GPU, max_num_seqs=1, max_num_batched_tokens=7, speculation=DRAFT_MODEL),
    "a step of all drafts": replace(
        GPU, max_num_batched_tokens=64 * 6, speculation=DRAFT_MODEL, extra_args=("--enable-lora",)
    ),
    "a request a rank": replace(
        GPU, tensor_parallel_size=8, max_num_seqs=8, extra_args=("--enable-batch-sharded-sampling",)
    ),
    "a watermark on drafted tokens": replace(
        GPU,
        speculation=speculating_with(
            Method.EAGLE3,
            5,
            draft_model="head3",
            draft_sampling=DraftSampling.PROBABILISTIC,
            rejection_sampling=RejectionSampling.STANDARD,
        ),
        extra_args=("--watermark-config", DUAL_KEY),
    ),
    # On model runner V2, which serves this method in every version.
    "one graph": replace(
        GPU, max_cudagraph_capture_size=1, speculation=speculating_with(Method.EAGLE3, 5, draft_model="head3")
    ),
}
"""The last values that a rule lets pass: one further, and it is a case of refusal_cases.py."""
SCHEDULES = [((1, 4, 1),), ((3, 8, 2), (20, 30, 0)), ((1, 16, 0), (17, 64, 3)), ((60, 900, 1),)]

PASSING_EXTRA = [
    "--async-sched",
    "--no_async_scheduling",
    "--seed -1",
    "--max-logpr 20",
    "--compilation-config.mode NONE",
    "-cc.mode=NONE",
    "-O3",
    "-O 3",
    "--watermark 0.5",
    "--watermark=-0.5",
]
STARTING_EXTRA = [line for line in PASSING_EXTRA if line != "--watermark=-0.5"]
"""Those whose value makes sense too: it is the engine that checks values."""

FAILING_EXTRA = [
    "--xyzzy",
    "--max-num 1",
    "--seed",
    "--watermark -0.5",
    "--seed --async-scheduling",
    "--async-scheduling=true",
    "--async-scheduling true",
    "--seed 1 2",
    "-O fast",
    "-tp2",
    "--speculative-model x",
]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 131_072,
    "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16",
}
"""A config.json of a model that nobody will ever load, with heads enough for 16 GPUs."""

QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
HEAD = LLAMA | {"num_hidden_layers": 1}
BLOCK = QWEN3 | {"num_hidden_layers": 2, "block_size": 8}
MEDUSA = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 1024, "num_heads": 5} | {
    "num_hidden_layers": 1,
    "vocab_size": 1024,
    "truncated_vocab_size": 1024,
    "max_seq_len": 131_072,
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    TARGET: LLAMA,
    DRAFT: LLAMA,
    OTHER_VOCABULARY: LLAMA | {"vocab_size": 2048},
    EAGLE_PATH: LLAMA,
    "qwen3": QWEN3,
    "eagle-house/several-heads": MEDUSA,
    "own-layer": DEEPSEEK,
    "own-layers": DEEPSEEK | {"num_nextn_predict_layers": 2},
    "head": HEAD,
    "head3": HEAD | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512},
    "several-heads": MEDUSA,
    "parallel": LLAMA | {"pard_token": 5},
    "parallel-head3": HEAD | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512, "ptd_token_id": 5},
    "parallel-speculator": {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": TARGET, "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 512,
        "mask_token_id": 5,
        "transformer_layer_config": HEAD,
    },
    "block": BLOCK
    | {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}},
    "refined-block": BLOCK
    | {"architectures": ["Qwen3XPressModel"], "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}}
    | {"xpress_block_size": 8, "xpress_rank": 64, "xpress_mlp_hidden": 64},
    "linked-block": BLOCK
    | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 16, "mask_token_id": 5, "target_layer_ids": [0, 2]},
}
"""Content of config.json by folder."""

METHODS = {
    method: replace(
        GPU,
        model=target,
        tensor_parallel_size=2,
        speculation=speculating_with(method, 4, draft_model=draft),
    )
    for method, target, draft in (
        (Method.DRAFT_MODEL, TARGET, DRAFT),
        (Method.NGRAM, TARGET, None),
        (Method.EAGLE, TARGET, "head"),
        (Method.EAGLE3, TARGET, "head3"),
        (Method.MTP, "own-layer", None),
        (Method.MEDUSA, TARGET, "several-heads"),
        (Method.DFLASH, "qwen3", "block"),
        (Method.DSPARK, "qwen3", "linked-block"),
        (Method.NGRAM_GPU, TARGET, None),
        (Method.SUFFIX, TARGET, None),
    )
}
"""The least that each method needs."""

PARD = speculating_with(Method.DRAFT_MODEL, 4, draft_model="parallel", drafts_in_parallel=True)
IN_PARALLEL = {
    f"{platform}-{draft}": replace(base, speculation=replace(PARD, method=method, draft_model=draft))
    for platform, base in (("gpu", replace(GPU, tensor_parallel_size=2)), ("cpu", CPU))
    for method, draft in (
        (Method.DRAFT_MODEL, "parallel"),
        (Method.EAGLE3, "parallel-head3"),
        (Method.EAGLE3, "parallel-speculator"),
    )
} | {
    "gpu-xpress": replace(
        GPU,
        model="qwen3",
        tensor_parallel_size=2,
        speculation=speculating_with(Method.DFLASH, 7, draft_model="refined-block", xpress_top_c=64),
    )
}
"""Drafts that propose all tokens in one pass: PARD and P-EAGLE, and a block that is refined."""

ANOTHER_VOCABULARY = {
    platform: replace(base, speculation=replace(DRAFT_MODEL, draft_model=OTHER_VOCABULARY, maps_vocabulary=True))
    for platform, base in (("gpu", replace(GPU, tensor_parallel_size=2)), ("cpu", CPU))
}
"""Drafts whose tokens are mapped to the target's."""

PARALLEL = {
    "stages": replace(GPU, tensor_parallel_size=2, pipeline_parallel_size=2, speculation=NGRAM),
    "copies": replace(GPU, data_parallel_size=2, speculation=DRAFT_MODEL),
    "experts": replace(GPU, model="own-layers", tensor_parallel_size=2, data_parallel_size=2, expert_parallel=True),
    "stages of a head": replace(METHODS[Method.EAGLE3], pipeline_parallel_size=2),
    "split of a draft": replace(
        GPU, tensor_parallel_size=2, speculation=replace(DRAFT_MODEL, draft_tensor_parallel_size=1)
    ),
    "split of own layers": replace(
        METHODS[Method.MTP], speculation=speculating_with(Method.MTP, 2, draft_tensor_parallel_size=1)
    ),
}
"""What is spread in more ways than over the GPUs of one group."""

LEADER_ADDRESS, MEETING_TIMEOUT_S = "llama-lws-0.llama-lws.models", 14_280


def on_node(settings: EngineSettings, nodes: int, rank: int) -> EngineSettings:
    """Return what one pod of an engine on several nodes is told, once the kubelet has put its variables in."""
    address = "10.0.0.7" if rank == 0 else LEADER_ADDRESS
    group = NodeGroup(nodes, str(rank), address, leads=rank == 0, meeting_timeout_s=MEETING_TIMEOUT_S)
    return replace(settings, group=group)


SEVERAL_NODES = {
    "stages": (replace(GPU, tensor_parallel_size=8, pipeline_parallel_size=2, speculation=NGRAM), 2),
    "stages of two": (replace(GPU, tensor_parallel_size=4, pipeline_parallel_size=4), 2),
    "layers": (replace(GPU, tensor_parallel_size=16, speculation=DRAFT_MODEL), 2),
    "dense copies": (replace(GPU, tensor_parallel_size=4, data_parallel_size=4, speculation=DRAFT_MODEL), 2),
    "a copy a node": (replace(GPU, tensor_parallel_size=8, data_parallel_size=2), 2),
    "dense copies in stages": (replace(GPU, tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=3), 3),
    "experts": (
        replace(GPU, model="own-layers", tensor_parallel_size=2, data_parallel_size=8, expert_parallel=True),
        2,
    ),
}
"""Engines on several nodes, each with how many; on nodes of 8 GPUs the plan comes to these."""


def write_models(folder: Path) -> None:
    """Make the folders of all models that are named here."""
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")


def with_models_under(folder: Path, settings: EngineSettings) -> EngineSettings:
    """Return the settings with real paths of models."""
    speculation = settings.speculation
    if speculation and speculation.draft_model:
        speculation = replace(speculation, draft_model=str(folder / speculation.draft_model))
    return replace(settings, model=str(folder / settings.model), speculation=speculation)
