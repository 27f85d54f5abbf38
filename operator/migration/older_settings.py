"""What has become of the flags and variables that only older vLLM versions have.

Each is one of three: said in another way now, gone without a loss, or for a person to decide, because without it the
server would answer otherwise, take other requests, or need another amount of memory. Read in the releases that had
them: vllm/engine/arg_utils.py, vllm/envs.py and their release notes, 0.4 to 0.31.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class OlderSetting:
    """What has become of one setting: ``now``, or ``gone``, or neither, which leaves it to a person."""

    now: str = ""
    """The flag, the key of its JSON value, or the variable that says the same."""

    gone: str = ""
    """Why nothing is lost without it."""

    ask: str = ""
    """What a person can write instead."""

    now_of_one: str = ""
    """The flag that says the same where a single value follows; ``now`` where this is empty."""

    value: str | None = None
    """What stands behind its successor; its own value where this is None."""

    takes: str = "1"
    """How many values follow a flag: 0, 1, ? (0 or 1) or +."""

    default: tuple[str, ...] = ()
    """Values that mean what holds without it."""

    allowed: tuple[str, ...] = ()
    """Values that its successor takes; any where this is empty."""

    def said_now(self, values: Sequence[str]) -> list[str]:
        """Return the setting with these values as it is written now; nothing where that says something else."""
        given = list(values) if self.value is None else [self.value]
        if not self.now or (self.allowed and (not given or given[0] not in self.allowed)):
            return []
        return [self.now_of_one if self.now_of_one and len(given) == 1 else self.now, *given]


def _gone(why: str, takes: str = "1") -> OlderSetting:
    return OlderSetting(gone=why, takes=takes)


def _ask(what: str, takes: str = "1", default: tuple[str, ...] = ()) -> OlderSetting:
    return OlderSetting(ask=what, takes=takes, default=default)


def _switch(now: str, value: str) -> OlderSetting:
    return OlderSetting(now=now, value=value, takes="0")


_BACKENDS: Final = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
_SCHEDULER: Final = "the scheduler needs no such setting any more: answers stay the same"
_RAY: Final = "the operator starts the processes of a replica without Ray"
_TYPICAL: Final = "typical acceptance is gone: rejection sampling keeps the target's own distribution"
_TOKENIZER: Final = "tokenizers run beside the engine now"
_LORA: Final = (
    "no vLLM that the operator launches serves such adapters: make adapters without it, or keep the Deployment"
)
_SCALES: Final = "an FP8 KV cache has its scales from the checkpoint now, or 1.0: take one that has them, or remove it"
_OTHER_HARDWARE: Final = "is for other hardware than NVIDIA GPUs and CPUs"

FLAGS: Final[Mapping[str, OlderSetting]] = {
    "--calculate-kv-scales": _ask(
        _SCALES,
        "0",
    ),
    "--chat-template-text-format": OlderSetting(now="--chat-template-content-format"),
    "--cuda-graph-sizes": OlderSetting(
        now="--cudagraph-capture-sizes", now_of_one="--max-cudagraph-capture-size", takes="+"
    ),
    "--device": _ask("only NVIDIA GPUs and CPUs are planned for: keep the Deployment", default=("auto", "cuda", "cpu")),
    "--disable-async-output-proc": _gone(_SCHEDULER, "0"),
    "--disable-frontend-multiprocessing": _gone("the API server is a process of its own in any case", "0"),
    "--disable-log-requests": _gone("requests are not logged unless --enable-log-requests is given", "0"),
    "--disable-logprobs-during-spec-decoding": _gone("log probabilities come with drafted tokens, too", "?"),
    "--disable-mm-preprocessor-cache": _switch("--mm-processor-cache-gb", "0"),
    "--enable-bf16x3-router-gemm": _ask(
        "experts are chosen in another precision without it: accept that, and remove it", "0"
    ),
    "--enable-lora-bias": _ask(_LORA, "0"),
    "--enable-mamba-fine-grained-prefix-cache": OlderSetting(now="--enable-mamba-shared-prefix-checkpoint", takes="0"),
    "--enable-multimodal-encoder-data-parallel": _switch("--mm-encoder-tp-mode", "data"),
    "--enable-prompt-adapter": _ask(_LORA, "0"),
    "--enable-reasoning": _gone("--reasoning-parser alone turns reasoning on", "0"),
    "--engine-use-ray": _gone(_RAY, "0"),
    "--eplb-log-balancedness": _switch("--eplb-config.log_balancedness", "true"),
    "--eplb-step-interval": OlderSetting(now="--eplb-config.step_interval"),
    "--eplb-window-size": OlderSetting(now="--eplb-config.window_size"),
    "--guided-decoding-backend": OlderSetting(
        now="--structured-outputs-config.backend", default=("auto",), allowed=_BACKENDS
    ),
    "--guided-decoding-disable-additional-properties": _switch(
        "--structured-outputs-config.disable_additional_properties", "true"
    ),
    "--guided-decoding-disable-any-whitespace": _switch("--structured-outputs-config.disable_any_whitespace", "true"),
    "--guided-decoding-disable-fallback": _gone("a backend that is named stands alone", "0"),
    "--long-lora-scaling-factors": _ask(_LORA, "+"),
    "--lora-extra-vocab-size": _ask(_LORA, default=("0",)),
    "--max-context-len-to-capture": _gone("CUDA graphs do not go by lengths any more"),
    "--max-long-partial-prefills": _gone(_SCHEDULER),
    "--max-num-partial-prefills": _gone(_SCHEDULER),
    "--max-prompt-adapter-token": _ask(_LORA),
    "--max-prompt-adapters": _ask(_LORA),
    "--max-seq-len-to-capture": _gone("CUDA graphs do not go by lengths any more"),
    "--multi-step-stream-outputs": _gone(_SCHEDULER, "?"),
    "--num-lookahead-slots": _gone("slots follow from the number of proposed tokens"),
    "--num-redundant-experts": OlderSetting(now="--eplb-config.num_redundant_experts"),
    "--num-scheduler-steps": _gone(_SCHEDULER),
    "--override-attention-dtype": _ask(
        "attention is computed in the model's own precision: accept that, and remove it"
    ),
    "--override-neuron-config": _gone(_OTHER_HARDWARE),
    "--override-pooler-config": OlderSetting(now="--pooler-config"),
    "--preemption-mode": _gone("a request that had to wait is computed anew"),
    "--prompt-adapters": _ask(_LORA, "+"),
    "--quantization-param-path": _ask(_SCALES),
    "--rope-scaling": OlderSetting(now="--hf-overrides.rope_parameters"),
    "--rope-theta": _ask(
        "without it the model's answers are others: say the same by"
        ' --hf-overrides \'{"rope_parameters": {"rope_theta": …}}\', and import again'
    ),
    "--scheduler-delay-factor": _gone(_SCHEDULER),
    "--spec-decoding-acceptance-method": _gone(_TYPICAL),
    "--speculative-disable-mqa-scorer": _gone("drafted tokens are scored in one step in any case", "0"),
    "--swap-space": _gone("a request that had to wait is computed anew: nothing is swapped"),
    "--task": _ask("say by --runner or --convert what it is for, and import again", default=("auto", "generate")),
    "--tokenizer-pool-extra-config": _gone(_TOKENIZER),
    "--tokenizer-pool-size": _gone(_TOKENIZER),
    "--tokenizer-pool-type": _gone(_TOKENIZER),
    "--typical-acceptance-sampler-posterior-alpha": _gone(_TYPICAL),
    "--typical-acceptance-sampler-posterior-threshold": _gone(_TYPICAL),
    "--use-gpu-for-pooling-score": _gone("is for models that pool, which do not draft", "0"),
    "--use-v2-block-manager": _gone("there is one block manager now", "0"),
    "--worker-use-ray": _gone(_RAY, "0"),
}
"""Flags, by their long names; those of speculation that have a key of --speculative-config are in speculation.py."""

_ATTENTION: Final = "--attention-config"
_KERNELS: Final = (
    "vLLM chooses its kernels by itself: say by --moe-backend or --linear-backend which it shall take, or remove it"
)

VARIABLES: Final[Mapping[str, OlderSetting]] = {
    "VLLM_ALL2ALL_BACKEND": OlderSetting(now="--all2all-backend"),
    "VLLM_ATTENTION_BACKEND": OlderSetting(
        now="--attention-backend",
        ask="vLLM has the flag --attention-backend for it now, with other names: write that, or remove it",
        allowed=(
            "CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA",
            "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_MLA",
        ),
    ),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": _gone("nothing in vLLM reads it any more"),
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": OlderSetting(now=f"{_ATTENTION}.disable_flashinfer_q_quantization"),
    "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH": OlderSetting(
        now=f"{_ATTENTION}.flash_attn_max_num_splits_for_cuda_graph"
    ),
    "VLLM_FLASH_ATTN_VERSION": OlderSetting(now=f"{_ATTENTION}.flash_attn_version"),
    "VLLM_KIMI_K3_GEMM_RS": OlderSetting(now="VLLM_ENABLE_GEMM_RS"),
    "VLLM_LOGITS_PROCESSOR_THREADS": _gone(_SCHEDULER),
    "VLLM_MM_HASHER_ALGORITHM": OlderSetting(now="--mm-hasher-algorithm"),
    "VLLM_MM_INPUT_CACHE_GIB": OlderSetting(now="--mm-processor-cache-gb"),
    "VLLM_NIXL_EP_MAX_NUM_RANKS": _ask("vLLM has --elastic-ep-max-dp-size for it now: write that, or remove it"),
    "VLLM_NO_DEPRECATION_WARNING": _gone("it only kept a warning back"),
    "VLLM_PLE_CPU_OFFLOAD": _ask("vLLM has the flag --engram-config for it now: write that, or remove it"),
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": OlderSetting(now="--prefix-cache-retention-interval"),
    "VLLM_RPC_TIMEOUT": _gone("there is no such limit any more"),
    "VLLM_TEST_FORCE_FP8_MARLIN": _ask(_KERNELS, default=("0", "false")),
    "VLLM_TORCH_PROFILER_DIR": _ask("vLLM has the flag --profiler-config for it now: write that, or remove it"),
    "VLLM_TRITON_ATTN_USE_TD": OlderSetting(now="VLLM_TRITON_USE_TD"),
    "VLLM_USE_RAY_COMPILED_DAG": _gone(_RAY),
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": _gone(_RAY),
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM": _gone(_RAY),
    "VLLM_USE_RAY_SPMD_WORKER": _gone(_RAY),
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": _gone(_RAY),
    "VLLM_USE_RAY_WRAPPED_PP_COMM": _gone(_RAY),
    "VLLM_USE_TRITON_FLASH_ATTN": _gone(_OTHER_HARDWARE),
    "VLLM_USE_TRTLLM_ATTENTION": OlderSetting(now=f"{_ATTENTION}.use_trtllm_attention"),
    "VLLM_USE_V1": _gone("there is only one engine now"),
    "VLLM_V0_USE_OUTLINES_CACHE": OlderSetting(now="VLLM_V1_USE_OUTLINES_CACHE"),
}  # fmt: skip
"""Environment variables."""

_OF_OTHERS: Final = ("VLLM_ROCM_", "VLLM_XPU_", "VLLM_TPU_", "VLLM_XLA_", "VLLM_HPU_", "VLLM_NEURON_")
_READ_UNLISTED: Final = frozenset({"VLLM_CUSTOM_ALLREDUCE_ALGO", "VLLM_SNAPSHOT_TIMEOUT_S"})
"""vLLM reads them, and its own list of variables lacks them."""


def older_variable(name: str, version: str, known: frozenset[str]) -> OlderSetting | None:
    """Return what has become of a variable by vLLM's name; None where the version reads it, or it is none of vLLM's."""
    if not name.startswith("VLLM_") or name in known or name in _READ_UNLISTED:
        return None
    if name.startswith(_OF_OTHERS):
        return _gone(_OTHER_HARDWARE)
    return VARIABLES.get(name) or _ask(
        f"vLLM {version} does not read it: find out what says the same now, or remove it from the Deployment"
    )
