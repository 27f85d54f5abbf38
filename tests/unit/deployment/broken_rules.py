"""Specs and settings that break each rule of docs/reference/vllm-rules.md, with words of the message."""

import json
from typing import Any

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import Draft, Ngram
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.enums import CudagraphMode, DraftHeadQuantization, DraftSampling, Method, RejectionSampling
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.serving_rules import serving_problems
from specdecode_operator.vllm.settings import AdapterSettings, EngineSettings, ScheduleRange, SpeculationSettings
from specdecode_operator.vllm.speculation_rules import speculation_problems
from tests.support.engine_settings import replace, speculating_with
from tests.support.objects import TINY_CONFIG, Body, pair_70b, tiny_cpu
from tests.unit.vllm.engine_cases import CPU, DRAFT_MODEL, NGRAM, PLAIN

LARGE, SMALL = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
QWEN, QWEN_HEAD, LONG = "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3", {"maxModelLen": 8192}
VL, OLD = "Qwen/Qwen3-VL-2B-Instruct", {"version": "0.29"}
HEAD, MTP = speculating_with(Method.EAGLE3, 3, draft_model="/models/head"), speculating_with(Method.MTP, 1)


def drafting(method: str, target: str, draft: str | None = None, k: int = 3, **more: Any) -> Body:
    """A spec with a method."""
    speculation: Body = {"method": method, "numSpeculativeTokens": k} | more.pop("asking", {})
    if draft is not None:
        speculation["draft"] = {"model": draft}
    return {"target": {"model": target}, "speculation": speculation, "serving": LONG, **more}


def typed(dtype: str, target: str, draft: Body | None = None, **more: Any) -> Body:
    """A spec with an element type."""
    spec = drafting("ngram" if draft is None else "draft_model", target)
    spec["speculation"] |= {} if draft is None else {"draft": draft}
    return {**spec, "target": {**spec["target"], **more}, "serving": {**LONG, "dtype": dtype}}


def cached(target: str) -> Body:
    """A spec whose KV cache is fp8_e5m2."""
    return {"target": {"model": target}, "serving": {**LONG, "kvCacheDtype": "fp8_e5m2"}}


def adapted(target: str, name: str = "sql", config: Body | None = None, **more: Any) -> Body:
    """A spec with an adapter."""
    model = {"model": target} | ({} if config is None else {"config": config})
    return {"target": model, "adapters": [{"name": name, "model": "org/a", "rank": 8}], "serving": LONG, **more}


def spread_experts(*arguments: str) -> Body:
    """A spec with an adapter and experts that are spread."""
    split = {"tensor": 2, "expert": True}
    return adapted("Qwen/Qwen3-30B-A3B", parallelism=split, engine={"extraArgs": [*arguments]})


ADAPTERS = AdapterSettings((("sql", "/models/a"),), gpu_slots=1, host_slots=1, max_rank=8)
WIDE = {**TINY_CONFIG, "architectures": ["LlamaForCausalLM"], "vocab_size": 262_144}
CONNECTED = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
EXPANDING = {"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"}
YARN = {"type": "yarn", "factor": "4", "originalMaxPositionEmbeddings": 32_768}
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "rope_theta": 1_000_000}
TOLD = {"rope_parameters": ROPE}


def told(overrides: Body) -> Body:
    """An engine that is told keys of a config.json."""
    return {"extraArgs": ["--hf-overrides", json.dumps(overrides)]}


def stretched(scaling: Body | None, engine: Body | None = None, target: str = "Qwen/Qwen3-32B", **more: Any) -> Body:
    """A spec of 131,072 tokens."""
    named: Body = {"model": target} | ({} if scaling is None else {"ropeScaling": scaling})
    if config := more.pop("config", None):
        named["config"] = config
    return {"target": named, "serving": {"maxModelLen": 131_072}, "engine": engine or {}, **more}


def without_base() -> Body:
    """A config.json that leaves the base of its positions to its class."""
    entry = find_entry(QWEN)
    assert entry is not None
    return {key: value for key, value in entry.config.items() if key != "rope_theta"}


UNROTATED = without_base()


def ranges(*parts: tuple[int, int, int], k: int = 4) -> SpeculationSettings:
    """Settings with K by the number of requests."""
    schedule = tuple(ScheduleRange(*part) for part in parts)
    return replace(DRAFT_MODEL, num_speculative_tokens=k, schedule=schedule)


def given(*extra_args: str, **changes: Any) -> EngineSettings:
    """Settings with further arguments."""
    return replace(PLAIN, extra_args=extra_args, **changes)


def speculating(speculation: SpeculationSettings, **changes: Any) -> EngineSettings:
    """Settings that speculate."""
    return replace(PLAIN, speculation=speculation, **changes)


def by_cpu(speculation: SpeculationSettings) -> EngineSettings:
    """Settings of an engine on the CPU."""
    return speculating(speculation, cpu=CPU, block_size=128)


def state_of_old_granite() -> Body:
    """A target that hands out hidden states from a later version on."""
    entry = find_entry(QWEN)
    assert entry is not None
    config = {**entry.config, "architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    spec = drafting("eagle3", QWEN, QWEN_HEAD, engine={"version": "0.31"})
    return {**spec, "target": {"model": "org/granite", "config": config}}


def refining(engine: Body | None = None, **more: Any) -> Body:
    """A spec with an XPress head that refines blocks of 7 tokens."""
    entry = find_entry("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
    assert entry is not None
    config = {**entry.config, "architectures": ["Qwen3XPressModel"], "xpress_block_size": 8}
    spec = drafting("dflash", QWEN, "org/xpress", k=7, engine=engine or {})
    spec["speculation"] |= {"draft": {"model": "org/xpress", "config": config}} | more
    return spec


def too_many_heads() -> Body:
    """A head that proposes fewer tokens than are asked for."""
    spec = drafting("medusa", QWEN, "org/medusa", k=6)
    config = {"model_type": "medusa", "hidden_size": 4096, "num_heads": 5, "num_layers": 1}
    spec["speculation"]["draft"]["config"] = config
    return spec


LOSSY = pair_70b()["speculation"] | {"rejectionSampling": "fly", "lossy": True}

BROKEN: dict[str, list[tuple[EngineSettings | Body, str]]] = {
    "ranges start at 1 or later, are sorted and do not overlap; no negative number of tokens": [
        (speculating(ranges((0, 8, 1))), "at least 1"),
        (speculating(ranges((4, 8, 1), (1, 2, 1))), "sorted"),
        (speculating(ranges((1, 8, 1), (8, 9, 1))), "do not overlap"),
        (speculating(ranges((1, 8, -1))), "not be negative"),
    ],
    "no range drafts more than `numSpeculativeTokens`": [
        (speculating(ranges((1, 8, 5))), "exceeds numSpeculativeTokens")
    ],
    "a multiple of the block size of the attention backend": [(replace(PLAIN, block_size=24), "multiple of 16")],
    "no float16 with Gemma 2, Gemma 3, GLM-4 0414 and MXFP4; no float32 with quantized models or latent attention": [
        (typed("float16", "google/gemma-3-27b-it"), "is not stable in it"),
        (typed("float16", "openai/gpt-oss-20b"), "only in bfloat16"),
        (typed("float32", "openai/gpt-oss-20b"), "is served in MXFP4, which vLLM multiplies in 16 bits"),
        (typed("float32", QWEN, quantization="FP8"), "is served in FP8"),
        (typed("float32", QWEN, quantization="Auto"), "write AsCheckpoint"),
        (typed("float32", "deepseek-ai/DeepSeek-V2-Lite"), "latent attention"),
        (typed("float32", LARGE, draft={"model": SMALL, "quantization": "FP8"}), "is served in FP8"),
        (typed("float32", LARGE, draft={"model": SMALL, "quantization": "Auto"}), "write AsCheckpoint"),
    ],
    "no fp8_e5m2 with latent attention, or with a checkpoint in the format fp8 or modelopt": [
        (cached("deepseek-ai/DeepSeek-V2-Lite"), "latent attention"),
        (cached("Qwen/Qwen3-32B-FP8"), "whose format scales the cache: write fp8"),
        (cached("nvidia/Llama-3.1-70B-Instruct-FP8"), "whose format scales the cache"),
    ],
    "not above the maximum sequence length of the target, including `target.ropeScaling` and `--hf-overrides`; vLLM"
    " multiplies this length by a YaRN factor only up to 0.29": [
        (stretched(None), "use that or less, or set target.ropeScaling"),
        (stretched({**YARN, "factor": "2"}), "reaches 65536 tokens with target.ropeScaling"),
        (stretched(None, told(TOLD)), "was made for at most 40960 tokens"),
    ],
    "one base for all layers, in `config.json`; not together with `--hf-overrides`": [
        (stretched(YARN, target="google/gemma-3-27b-it"), "different rope parameters"),
        (stretched(YARN, target="openai-community/gpt2", config=UNROTATED), "has no rope_theta"),
    ],
    "rope parameters in `--hf-overrides` include `rope_theta`, because they replace all others": [
        (
            stretched(None, told({"rope_parameters": {**ROPE, "rope_theta": None}})),
            "rope_theta 1000000",
        ),
        (stretched(None, {"extraArgs": ["--hf-overrides=[]"]}), "JSON object"),
        (stretched(YARN, told(TOLD)), "vLLM keeps only one override"),
    ],
    "room for a complete verification: drafted tokens, one more, and the extra slots of the method": [
        (speculating(DRAFT_MODEL, max_num_seqs=1, max_num_batched_tokens=6), "at least 7 to verify")
    ],
    "a path that does not contain the name of another method, such as `eagle-`": [
        (speculating(replace(DRAFT_MODEL, draft_model="/models/eagle-x")), "to eagle")
    ],
    "the target's vocabulary size, or `useHeterogeneousVocab`": [
        (drafting("draft_model", QWEN, "meta-llama/Llama-3.1-8B-Instruct"), "vocabulary")
    ],
    "not above the target's": [
        (speculating(replace(DRAFT_MODEL, draft=Draft(model="org/draft", max_model_len=8193))), "exceeds the target's")
    ],
    "not above `promptLookupMax`": [
        (speculating(replace(NGRAM, ngram=Ngram(prompt_lookup_min=5, prompt_lookup_max=4))), "promptLookupMax")
    ],
    "at least 1": [(speculating(replace(NGRAM, num_speculative_tokens=0)), "at least 1")],
    "not below `maxNumSeqs`": [(replace(PLAIN, max_num_batched_tokens=8), "at least serving.maxNumSeqs")],
    "no `--async-scheduling` with ngram, suffix and medusa on model runner V1": [
        (given("--async-scheduling", speculation=replace(NGRAM, method=Method.SUFFIX)), "does not combine"),
    ],
    "no `--async-scheduling` with ngram up to 0.32": [
        (
            drafting("ngram", QWEN, engine={"version": "0.32", "extraArgs": ["--async-scheduling"]}),
            "0.32 does not combine",
        ),
    ],
    "no `--async-scheduling` on model runner V1 with pipeline stages, from 0.31 on": [
        (
            replace(PLAIN, target_on_v1=True, pipeline_parallel_size=2, extra_args=("--async-scheduling",)),
            "over pipeline stages",
        ),
    ],
    "with `mtp`, a path that does not contain the name of another method": [
        (speculating(MTP, model="/models/dflash"), "to dflash")
    ],
    "a head of the kind that the method uses, for the hidden size and the vocabulary of the target": [
        (drafting("eagle", QWEN, QWEN_HEAD), "use that, or name a head"),
        (drafting("eagle3", "Qwen/Qwen3-4B", QWEN_HEAD), "hidden states of width"),
        (drafting("eagle3", "meta-llama/Llama-3.1-8B-Instruct", QWEN_HEAD), "vocabulary"),
    ],
    "eagle3, dflash and dspark: a target that provides hidden states of inner layers": [
        (state_of_old_granite(), "does not hand out"),
        (drafting("eagle3", "google/gemma-3-27b-it", QWEN_HEAD), "does not hand out"),
    ],
    "mtp: a target whose checkpoint has MTP layers": [(drafting("mtp", QWEN, k=1), "no layers for multi-token")],
    "no dspark on the CPU": [(by_cpu(replace(HEAD, method=Method.DSPARK)), "model runner V2")],
    "no ngram_gpu on the CPU": [(by_cpu(replace(NGRAM, method=Method.NGRAM_GPU)), "use method ngram")],
    "mtp: a multiple of the number of modules, if larger; heads: at most the number for which they were trained": [
        (too_many_heads(), "write 5 or less")
    ],
    "suffix: a custom image with `arctic-inference`": [(drafting("suffix", QWEN), "arctic-inference")],
    "not with `parallelism.data` above 1": [(speculating(ranges((1, 8, 1)), data_parallel_size=2), "ignores it")],
    "with a draft that proposes in one pass, 0 or `numSpeculativeTokens` in each range": [
        (
            speculating(
                replace(ranges((1, 8, 1)), method=Method.DRAFT_MODEL, draft_model="pard", drafts_in_parallel=True)
            ),
            "mixes up",
        )
    ],
    "an XPress head from 0.33 on, on model runner V2": [
        (refining({"version": "0.32"}), "use 0.33 or later"),
        ({**refining({"image": "org/vllm-cpu:1"}), "accelerator": tiny_cpu()["accelerator"]}, "model runner V2"),
    ],
    "an XPress head: the number of positions that its blocks fill": [
        (refining(numSpeculativeTokens=6), "write 7"),
        (refining(numSpeculativeTokens=8), "write 7"),
    ],
    "an XPress head: only greedy": [(refining(draftSampling="probabilistic"), "only proposes the likeliest")],
    "dflash with an XPress head; at most its vocabulary": [
        (refining(xpressTopC=151_937), "use 151936 or less"),
        (refining(draft={"model": QWEN_HEAD}, method="eagle3", xpressTopC=64), "has no XPress refiner"),
    ],
    "eagle or mtp, on model runner V2, from 0.33 on; not with `dtype: float32`": [
        (
            speculating(replace(NGRAM, draft_lm_head_quantization=DraftHeadQuantization.FP8)),
            "no copy of the target's output head",
        )
    ],
    "with `useHeterogeneousVocab` only greedy": [
        (
            speculating(replace(DRAFT_MODEL, maps_vocabulary=True, draft_sampling=DraftSampling.PROBABILISTIC)),
            "proposes the likeliest",
        )
    ],
    "with `draft_model`; not with vLLM 0.31 on a GPU": [
        (
            pair_70b(
                engine={"version": "0.31"},
                speculation=pair_70b()["speculation"] | {"useHeterogeneousVocab": True},
            ),
            "skips the token mapping",
        ),
    ],
    "1 with `draft_model`": [(speculating(DRAFT_MODEL, pipeline_parallel_size=2), "layers of one stage")],
    "1 with Qwen3-VL up to 0.29": [(drafting("ngram", VL, engine=OLD, parallelism={"pipeline": 2}), "several stages")],
    "with eagle3, dflash and dspark, a target that passes hidden states between stages": [
        (drafting("eagle3", "Qwen/Qwen3-30B-A3B", "AngelSlim/Qwen3-a3B_eagle3", parallelism={"pipeline": 2}), "between")
    ],
    "a target with experts": [({**drafting("ngram", QWEN), "parallelism": {"expert": True}}, "experts")],
    "1, or the target's; the target's with `draft_model` on model runner V1": [
        (speculating(replace(HEAD, draft_tensor_parallel_size=4)), "accepts 1 or the target's"),
        (
            pair_70b(engine={"version": "0.30"}, parallelism={"tensor": 2, "draftTensor": 1}),
            "another tensor parallelism",
        ),
    ],
    "with adapters, `maxNumSeqs` x (K + 1)": [
        (given("--enable-lora", speculation=DRAFT_MODEL, max_num_batched_tokens=300), "x (K + 1)"),
        (replace(PLAIN, adapters=ADAPTERS, speculation=DRAFT_MODEL, max_num_batched_tokens=300), "x (K + 1)"),
    ],
    "a class of vLLM that supports LoRA; for Inkling, `INKLING_MULTIMEM_AR=0` in `env`": [
        (adapted("stepfun-ai/Step-3.5-Flash"), "does not support LoRA"),
        (adapted("thinkingmachines/Inkling"), "INKLING_MULTIMEM_AR=0"),
    ],
    "a vocabulary of at most 258,048 tokens if the output head takes adapters": [
        (adapted("org/wide", config=WIDE, serving={"maxModelLen": 2048}), "at most 258048"),
    ],
    "a target with experts only on GPUs": [
        (
            adapted("Qwen/Qwen3-30B-A3B", accelerator={"type": "CPU", "cpuCores": 4, "memoryGiB": 90, "kvCacheGiB": 4}),
            "do not support adapters",
        ),
    ],
    "names that the target does not have": [(adapted(QWEN, name="Qwen3-8B"), "could not tell the two apart")],
    "no LoRA flags together with `adapters`": [
        (adapted(QWEN, engine={"extraArgs": ["--enable-lora", "--max-loras", "2"]}), "remove --enable-lora and --max"),
    ],
    "with `adapters` of a target with experts and `parallelism.expert`, no `--fully-sharded-loras`, and"
    " `--all2all-backend` only `allgather_reducescatter`": [
        (spread_experts("--fully-sharded-loras"), "parallelism.expert for adapters"),
        (spread_experts("--all2all-backend", "deepep_low_latency"), "only supports allgather_reducescatter"),
    ],
    "no `block` on model runner V1, which CPUs, medusa and suffix use": [
        (by_cpu(replace(DRAFT_MODEL, rejection_sampling=RejectionSampling.BLOCK)), "runner V1"),
        (speculating(replace(NGRAM, method=Method.SUFFIX, rejection_sampling=RejectionSampling.BLOCK)), "runner V1"),
    ],
    "`fly` from 0.33 on, on GPUs, with at least 2 proposed tokens, and only with `lossy: true`": [
        (
            drafting("ngram", QWEN, asking={"rejectionSampling": "fly", "lossy": True}, engine={"version": "0.32"}),
            '"0.33" or',
        ),
        (pair_70b(speculation=LOSSY | {"numSpeculativeTokens": 1}), "2 or more"),
    ],
    "a method whose draft has a distribution to sample from": [
        (speculating(replace(NGRAM, draft_sampling=DraftSampling.PROBABILISTIC)), "no draft that samples")
    ],
    "on model runner V1 at least the capture size (1, 2, 4, 8, 16, 24 …) for K + 1 tokens, unless `cudagraphMode` is"
    " PIECEWISE; not on the CPU or with `enforceEager`": [
        (speculating(replace(NGRAM, method=Method.SUFFIX), max_cudagraph_capture_size=7), "at least 8"),
        (replace(PLAIN, cpu=CPU, block_size=128, max_cudagraph_capture_size=64), "on the CPU"),
        (replace(PLAIN, enforce_eager=True, max_cudagraph_capture_size=64), "enforceEager"),
    ],
    "not on the CPU or with `enforceEager`; NONE not with `maxCudagraphCaptureSize`": [
        (replace(PLAIN, enforce_eager=True, cudagraph_mode=CudagraphMode.FULL), "enforceEager"),
    ],
    "not with `suffix`, `medusa` and `ngram_gpu` on model runner V1": [
        (speculating(replace(ranges((1, 8, 1)), method=Method.SUFFIX)), "cannot shorten its drafts"),
    ],
    "NONE or PIECEWISE with `numSpeculativeTokensByBatchSize` on model runner V1": [
        (
            speculating(replace(ranges((1, 8, 1)), method=Method.SUFFIX), cudagraph_mode=CudagraphMode.FULL),
            "in pieces only",
        ),
    ],
    "no piecewise graphs if `extraArgs` disable compilation, for example with `-O0`": [
        (given("-O0", cudagraph_mode=CudagraphMode.PIECEWISE), "turn off the compilation")
    ],
    "with `cudagraphMode`, no `-cc`, and no complete JSON value for `--compilation-config`": [
        (given("-cc.mode=3", cudagraph_mode=CudagraphMode.FULL), "keeps only one")
    ],
    "on the CPU a multiple of `parallelism.tensor`": [
        (
            tiny_cpu(
                parallelism={"tensor": 2},
                accelerator={"type": "CPU", "cpuCores": 2, "memoryGiB": 8, "kvCacheGiB": 3},
            ),
            "multiple of parallelism.tensor",
        )
    ],
    "no `--kv-sharing-fast-prefill` with methods that read hidden states": [
        (given("--kv-sharing-fast-prefill", speculation=HEAD), "hidden states")
    ],
    "no `--logits-processors` with speculation on model runner V1": [
        (
            drafting("eagle3", QWEN, QWEN_HEAD, engine={"version": "0.30", "extraArgs": ["--logits-processors=a:B"]}),
            "custom logits processors",
        )
    ],
    "on model runner V1, all draft layers must be in one KV cache group, together with target layers": [
        (drafting("draft_model", "openai/gpt-oss-120b", "openai/gpt-oss-20b", engine={"version": "0.30"}), "2 groups")
    ],
    "on model runner V1, no draft model with M-RoPE, which vision models use": [
        (
            drafting(
                "draft_model",
                "Qwen/Qwen3-VL-32B-Instruct",
                "Qwen/Qwen3-VL-2B-Instruct",
                engine={"version": "0.30"},
            ),
            "M-RoPE",
        )
    ],
    "no `--cudagraph-capture-sizes` together with `maxCudagraphCaptureSize`": [
        (
            given("--cudagraph-capture-sizes", "8", max_cudagraph_capture_size=8),
            "conflicts with serving.maxCudagraphCaptureSize",
        )
    ],
    "no `--enable-eplb` without `parallelism.expert`": [(given("--enable-eplb"), "parallelism.expert")],
    "no `--enable-eplb` on one GPU": [
        (given("--enable-eplb", tensor_parallel_size=1, expert_parallel=True), "tensor or data above 1")
    ],
    "no `--max-num-active-seqs` above `maxNumSeqs` and no `--long-prefill-token-threshold` above `maxModelLen`": [
        (given("--max-num-active-seqs", "257", max_num_seqs=256), "exceeds serving.maxNumSeqs, 256"),
        (given("--long-prefill-token-threshold", "8193", max_model_len=8192), "exceeds serving.maxModelLen, 8192"),
    ],
    "with `--enable-lora`, no `--max-cpu-loras` below `--max-loras`": [
        (given("--enable-lora", "--max-loras", "4", "--max-cpu-loras=2"), "at least --max-loras, 4")
    ],
    "no `--collect-detailed-traces` without `--otlp-traces-endpoint`": [
        (given("--collect-detailed-traces", "all"), "--otlp-traces-endpoint")
    ],
    "with `--no-enable-chunked-prefill`, not below `maxModelLen`": [
        (given("--no-enable-chunked-prefill", max_num_batched_tokens=4096), "without chunked prefill")
    ],
    "no `--enable-dbo` without `--all2all-backend` of DeepEP or NIXL": [(given("--enable-dbo"), "all2all")],
    "no `--enable-batch-sharded-sampling` with `parallelism.tensor` 1 or unset, with fewer requests than GPUs, or on"
    " model runner V1": [
        (given("--enable-batch-sharded-sampling", tensor_parallel_size=1), "tensor above 1"),
        (given("--enable-batch-sharded-sampling", max_num_seqs=1), "maxNumSeqs of 2"),
        (given("--enable-batch-sharded-sampling", speculation=replace(NGRAM, method=Method.SUFFIX)), "runner V2"),
    ],
    "no `--enable-trace-replay` on model runner V1": [
        (given("--enable-trace-replay", speculation=replace(NGRAM, method=Method.SUFFIX)), "runner V2")
    ],
    "`--runner` only `generate` or `auto`": [(given("--runner=pooling"), "turns off generation")],
    "`--watermark-config` with speculation needs: method dflash (from 0.33), dspark, eagle, eagle3 or mtp; drafting"
    " token by token; `draftSampling: probabilistic`; `rejectionSampling: standard`; and the algorithm"
    " dual_key_gumbel or `allow_target_only_watermarking`": [
        (given("--watermark-config", '{"key": 1}', speculation=NGRAM), "marks no tokens"),
        (given("--watermark-config", '{"algorithm": "dual_key_gumbel"}', speculation=HEAD), "draftSampling"),
    ],
    "no `min_p` in `--override-generation-config` with speculation": [
        (given("--override-generation-config.min_p=0.1", speculation=NGRAM), "min_p")
    ],
    "no `--per-request-spec-decode-metrics` without speculation": [
        (given("--per-request-spec-decode-metrics=summary"), "no speculation")
    ],
    "no flag values or combinations that vLLM rejects; [startup checks](startup-checks.md) lists them": [
        (
            drafting("ngram", QWEN, engine={"extraArgs": ["--kv-transfer-config.kv_connector=NixlConnector"]}),
            "needs kv_role",
        ),
        (drafting("ngram", QWEN, engine={"extraArgs": ["--compilation-config", "3"]}), "must be a JSON object"),
    ],
    "no `PYTORCH_CUDA_ALLOC_CONF` with `expandable_segments:True` together with a KV connector": [
        (drafting("ngram", QWEN, engine={"extraArgs": CONNECTED, "env": [EXPANDING]}), "expandable_segments")
    ],
}
"""What breaks each rule, and words of the answer, by the rule as docs/reference/vllm-rules.md writes it."""


def problems(broken: EngineSettings | Body) -> list[Problem]:
    """What is wrong with settings of the newest engine, or with a spec."""
    if isinstance(broken, EngineSettings):
        profile = find_profile(KNOWN_VERSIONS[-1])
        rules = (speculation_problems, serving_problems)
        return [problem for rule in rules for problem in rule(broken, profile)]
    try:
        valid_facts(SpecDecodeDeploymentSpec.model_validate(broken))
    except InvalidSpecError as error:
        return list(error.problems)
    return []
