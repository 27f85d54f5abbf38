"""What our rules refuse of the engine's settings, each with what the real vLLM does instead of starting as told."""

import json
from typing import Any

from specdecode_operator.api.speculation import Draft, Ngram, Suffix
from specdecode_operator.enums import CudagraphMode, DraftHeadQuantization, DraftSampling, Method, RejectionSampling
from specdecode_operator.vllm.settings import CpuSettings, EngineSettings, ScheduleRange
from tests.engine.contract_cases import (
    ANOTHER_VOCABULARY,
    CPU,
    DRAFT,
    DRAFT_MODEL,
    DUAL_KEY,
    EAGLE_PATH,
    GPU,
    IN_PARALLEL,
    LOSSY,
    METHODS,
    NGRAM,
    OTHER_VOCABULARY,
    PARD,
)
from tests.engine.verdicts import Changed, Later, Ours, Refused, Verdict
from tests.support.engine_settings import replace


def drafting(method: Method, base: EngineSettings | None = None, **changes: Any) -> EngineSettings:
    """Return settings with a method, and changes of its own settings."""
    settings = METHODS[method]
    assert settings.speculation is not None
    speculation = replace(settings.speculation, **changes)
    if base is None:
        return replace(settings, speculation=speculation)
    return replace(base, model=settings.model, speculation=speculation)


def scheduled(*ranges: tuple[int, int, int], base: EngineSettings = GPU) -> EngineSettings:
    """Return settings with K by the number of running requests."""
    return replace(base, speculation=replace(DRAFT_MODEL, schedule=tuple(ScheduleRange(*each) for each in ranges)))


def extra(*arguments: str, base: EngineSettings = GPU) -> EngineSettings:
    """Return settings with further arguments."""
    return replace(base, extra_args=arguments)


def adapting(method: Method, **changes: Any) -> EngineSettings:
    """Return settings that verify by what it costs, and other changes."""
    return replace(drafting(method, adaptive_verification=True), **changes)


def marked(method: Method = Method.EAGLE3, **changes: Any) -> EngineSettings:
    """Return settings whose drafted tokens could carry a watermark, and changes that they could not have."""
    return drafting(method, draft_sampling=DraftSampling.PROBABILISTIC, **changes)


def further(key: str, value: Any) -> EngineSettings:
    """Return settings with a further key of --speculative-config."""
    return replace(GPU, speculation=replace(NGRAM, extra_config=json.dumps({key: value})))


ON_V1 = replace(METHODS[Method.DRAFT_MODEL], speculation=PARD)
"""What model runner V1 serves on a GPU."""

STAGES = replace(METHODS[Method.NGRAM_GPU], pipeline_parallel_size=2)
NO_GRAPHS = CudagraphMode.NONE
IGNORED_KEY = (
    "vllm/config/speculative.py, __post_init__, reads it with another method only: what is written has no effect"
)

SERVING: dict[str, tuple[EngineSettings, Verdict]] = {
    "name like a flag": (
        replace(GPU, served_model_names=("one", "-x")),
        Refused("unrecognized arguments: -x"),
    ),
    "number like a flag": (
        replace(GPU, served_model_names=("-1",)),
        Ours("argparse takes numbers and texts with blanks, and vLLM's parser sees paths in some of those"),
    ),
    "fewer tokens than requests": (
        replace(GPU, max_num_batched_tokens=63),
        Refused("must be greater than or equal to max_num_seqs (64)"),
    ),
    "a cache of another type": (
        replace(GPU, dtype="float16", kv_cache_dtype="bfloat16"),
        Refused('kv_cache_dtype="bfloat16" is incompatible'),
    ),
    "blocks without a kernel": (replace(GPU, block_size=24), Later("block_size", "No common block size")),
    "blocks without a kernel on the CPU": (replace(CPU, block_size=48), Later("block_size", "No common block size")),
    "graphs of the CPU": (replace(CPU, cudagraph_mode=CudagraphMode.FULL), Changed("cudagraph_mode", "NONE")),
    "sizes of graphs of the CPU": (replace(CPU, max_cudagraph_capture_size=48), Changed("cudagraph_mode", "NONE")),
    "graphs of an eager engine": (
        replace(GPU, enforce_eager=True, cudagraph_mode=CudagraphMode.PIECEWISE),
        Changed("cudagraph_mode", "NONE"),
    ),
    "sizes of graphs of an eager engine": (
        replace(GPU, enforce_eager=True, max_cudagraph_capture_size=48),
        Changed("--max-cudagraph-capture-size", 0),
    ),
    "sizes of no graphs": (
        replace(GPU, cudagraph_mode=NO_GRAPHS, max_cudagraph_capture_size=48),
        Changed("--max-cudagraph-capture-size", 0),
    ),
    "graphs too small for a draft": (
        replace(ON_V1, max_cudagraph_capture_size=7),
        Later("graph_sizes", "No valid cudagraph sizes after rounding to multiple of 5"),
    ),
    "whole graphs of lengths that change": (
        # On model runner V1, which serves this method up to 0.31.
        replace(
            GPU,
            speculation=replace(NGRAM, schedule=(ScheduleRange(1, 8, 2),)),
            cudagraph_mode=CudagraphMode.FULL_DECODE_ONLY,
        ),
        Changed("cudagraph_mode", "PIECEWISE"),
    ),
    "pieces of what is not compiled": (
        extra("-O0", base=replace(GPU, cudagraph_mode=CudagraphMode.PIECEWISE)),
        Changed("cudagraph_mode", "NONE"),
    ),
    "kind of graphs beside its field": (
        extra("--compilation-config", '{"cudagraph_mode": "NONE"}'),
        Ours("spec.serving.cudagraphMode says it, and the plan counts on that"),
    ),
    "two spellings of one flag": (
        extra("-cc.mode=3", base=replace(GPU, cudagraph_mode=NO_GRAPHS)),
        Changed("cudagraph_mode", "FULL_AND_PIECEWISE"),
    ),
}
"""Of everything but speculation: serving_rules.py and graph_rules.py."""

COMBINED: dict[str, tuple[EngineSettings, Verdict]] = {
    "sizes beside a largest": (
        extra("--cudagraph-capture-sizes", "8", "16", base=replace(GPU, max_cudagraph_capture_size=48)),
        Refused("customized max_cudagraph_capture_size"),
    ),
    "experts that move without any": (extra("--enable-eplb"), Refused("must be True to use EPLB")),
    "experts that move on one GPU": (
        extra("--enable-eplb", base=replace(GPU, tensor_parallel_size=1, expert_parallel=True)),
        Refused("EPLB requires tensor, prefill-context, or data parallelism"),
    ),
    "a long prefill beyond the longest sequence": (
        extra("--long-prefill-token-threshold", "513", base=replace(GPU, max_model_len=512)),
        Refused("(513) cannot be greater than the max_model_len (512)"),
    ),
    "fewer adapters on the host": (
        extra("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "2"),
        Refused("max_cpu_loras (2) must be >= max_loras (4)"),
    ),
    "detailed traces to nowhere": (
        extra("--collect-detailed-traces", "all"),
        Refused("collect_detailed_traces requires `--otlp-traces-endpoint`"),
    ),
    "whole prompts in a short step": (
        extra("--no-enable-chunked-prefill", base=replace(GPU, max_num_batched_tokens=511)),
        Refused("(511) is smaller than max_model_len (512)"),
    ),
    "ahead of stages": (extra("--async-sched", base=STAGES), Refused("pipeline parallelism with async scheduling")),
    "a connector without a role": (
        # Of the table of flag_values.py: test_flag_values.py asks about each row.
        extra("--kv-transfer-config.kv_connector=ExampleConnector"),
        Refused("Please specify kv_role when kv_connector is set"),
    ),
    "two microbatches": (extra("--enable-dbo"), Refused("Microbatching currently only supports")),
    "shards of one GPU": (extra("--enable-batch-sharded-sampling"), Refused("nothing to shard")),
    "shards of fewer requests": (
        extra("--enable-batch-sharded-sampling", base=replace(GPU, tensor_parallel_size=8, max_num_seqs=7)),
        Refused("max_num_seqs (7) is below tensor_parallel_size (8)"),
    ),
    "shards on V1": (
        extra("--enable-batch-sharded-sampling", base=ON_V1),
        Refused("does not support: batch-sharded sampling"),
    ),
    "traces on V1": (extra("--enable-trace-replay", base=ON_V1), Refused("trace replay requires Model Runner V2")),
    "tools that nobody parses": (extra("--enable-auto-tool-choice"), Refused("requires --tool-call-parser")),
    "no generation": (
        extra("--runner", "pooling"),
        Ours("vllm/config/model.py: the engine then answers no completion, which is all that is asked here"),
    ),
    "metrics of nothing": (
        extra("--per-request-spec-decode-metrics", "summary"),
        Refused("requires speculative decoding"),
    ),
    "adapters": (
        extra("--enable-lora", base=replace(GPU, speculation=DRAFT_MODEL, max_num_batched_tokens=64 * 6 - 1)),
        Refused("Consider increasing max_num_batched_tokens"),
    ),
    "fast prefill": (
        extra("--kv-sharing-fast-prefill", base=METHODS[Method.EAGLE3]),
        Refused("not compatible with EAGLE"),
    ),
    "logits processors on V1": (
        extra("--logits-processors", "a.b:C", base=ON_V1),
        Later("logits_processors", "Custom logits processors are not supported"),
    ),
    "watermark of a lookup": (
        extra("--watermark-config", DUAL_KEY, base=marked(Method.DRAFT_MODEL)),
        Refused("Watermarking supports only"),
    ),
    "watermark of drafts in one pass": (
        extra("--watermark-config", DUAL_KEY, base=marked(draft_model="parallel-head3", drafts_in_parallel=True)),
        Refused("Parallel speculative drafting is not supported with watermarking"),
    ),
    "watermark of the likeliest tokens": (
        extra("--watermark-config", DUAL_KEY, base=drafting(Method.EAGLE3)),
        Refused("draft_sample_method='probabilistic'"),
    ),
    "watermark beside a check by blocks": (
        extra("--watermark-config", DUAL_KEY, base=marked(rejection_sampling=RejectionSampling.BLOCK)),
        Refused("rejection_sample_method='standard'"),
    ),
    "watermark beside a check by entropy": (
        extra("--watermark-config", DUAL_KEY, base=marked(rejection_sampling=RejectionSampling.FLY, lossy=True)),
        Refused("rejection_sample_method='standard'"),
    ),
    "watermark of the target alone": (
        extra("--watermark-config", '{"key": 1}', base=marked()),
        Refused("does not support speculative decoding"),
    ),
    "least probability of every request": (
        extra("--override-generation-config.min_p", "0.1", base=replace(GPU, speculation=NGRAM)),
        Later("request", "not yet supported with speculative decoding"),
    ),
}
"""Of ``spec.engine.extraArgs``: combination_rules.py and feature_rules.py."""

SPECULATING: dict[str, tuple[EngineSettings, Verdict]] = {
    "no tokens": (
        replace(GPU, speculation=replace(NGRAM, num_speculative_tokens=0)),
        Refused("Input should be greater than 0"),
    ),
    "range that ends before it begins": (scheduled((5, 4, 2)), Later("schedule", "range start must be <= end")),
    "less than no tokens": (scheduled((1, 4, -1)), Later("schedule", "values must be >= 0")),
    "more tokens than K": (
        scheduled((1, 4, 6)),
        Ours("vllm/v1/spec_decode/dynamic/utils.py caps it at K and says nothing"),
    ),
    "fewer tokens of a draft in one pass": (
        replace(
            IN_PARALLEL["gpu-parallel"],
            speculation=replace(
                PARD, schedule=(ScheduleRange(1, 4, 4), ScheduleRange(5, 9, 2), ScheduleRange(10, 64, 0))
            ),
        ),
        Ours(
            "vllm/v1/spec_decode/llm_base_proposer.py, propose: the K tokens of each request are read as rows of the "
            "length that is asked for, so that requests get each other's, or the engine ends"
        ),
    ),
    "another vocabulary on V2": (ANOTHER_VOCABULARY["gpu"], Changed("runner", "V2")),
    "another vocabulary of a lookup": (
        replace(GPU, speculation=replace(NGRAM, maps_vocabulary=True)),
        Refused("use_heterogeneous_vocab only works with method='draft_model'"),
    ),
    "XPress before 0.33": (drafting(Method.DFLASH, xpress_top_c=64), Refused("xpress_topc")),
    "quantized head of a lookup": (
        replace(GPU, speculation=replace(NGRAM, draft_lm_head_quantization=DraftHeadQuantization.FP8)),
        Refused("draft_lm_head_quantization"),
    ),
    "quantized head on the CPU": (
        drafting(Method.MTP, base=CPU, draft_lm_head_quantization=DraftHeadQuantization.FP8),
        Refused("draft"),
    ),
    "quantized head before 0.33": (
        drafting(Method.MTP, draft_lm_head_quantization=DraftHeadQuantization.NVFP4),
        Refused("draft_lm_head_quantization"),
    ),
    "samples of another vocabulary": (
        replace(
            ANOTHER_VOCABULARY["gpu"],
            speculation=replace(
                DRAFT_MODEL,
                draft_model=OTHER_VOCABULARY,
                maps_vocabulary=True,
                draft_sampling=DraftSampling.PROBABILISTIC,
            ),
        ),
        Refused("only supports greedy draft sampling"),
    ),
    "ranges that overlap": (
        scheduled((1, 4, 2), (4, 6, 1)),
        Later("schedule", "ranges must be non-overlapping and sorted"),
    ),
    "ranges for drafts of one length": (
        # On model runner V1, which serves this method up to 0.31. Suffix takes a package that is not here.
        drafting(Method.NGRAM_GPU, schedule=(ScheduleRange(1, 8, 2),)),
        Later("shorter_draft", "no other length"),
    ),
    "draft of a lookup": (replace(GPU, speculation=replace(NGRAM, draft_model=DRAFT)), Ours(IGNORED_KEY)),
    "no draft": (drafting(Method.EAGLE, draft_model=None), Refused("without speculative model")),
    "draft longer than its target": (
        replace(GPU, speculation=replace(DRAFT_MODEL, draft=Draft(model=DRAFT, max_model_len=513))),
        Refused("speculative_max_model_len=513 cannot be larger than target_max_model_len=512"),
    ),
    "path that flips the method": (
        replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=EAGLE_PATH)),
        Changed("method", "eagle"),
    ),
    "suffixes of another method": (
        replace(GPU, speculation=replace(NGRAM, suffix=Suffix(max_tree_depth=8))),
        Ours(IGNORED_KEY),
    ),
    "lookup of a draft": (
        replace(GPU, speculation=replace(DRAFT_MODEL, ngram=Ngram(prompt_lookup_max=4))),
        Ours(IGNORED_KEY),
    ),
    "a method that ended": (METHODS[Method.MEDUSA], Refused("Input should be 'ngram'")),
    "lookup the wrong way round": (
        replace(GPU, speculation=replace(NGRAM, ngram=Ngram(prompt_lookup_min=5, prompt_lookup_max=4))),
        Refused("prompt_lookup_min=5 must be <= prompt_lookup_max=4"),
    ),
    "checks in blocks on V1": (
        replace(ON_V1, speculation=replace(PARD, rejection_sampling=RejectionSampling.BLOCK)),
        Ours("vllm/v1/sample/rejection_sampler.py never reads it: it checks token by token, and says nothing"),
    ),
    "lossy checks of a version without": (replace(GPU, speculation=LOSSY), Refused("Input should be 'standard'")),
    "loss that nobody accepted": (
        replace(GPU, speculation=replace(LOSSY, lossy=False)),
        Ours("vllm/config/speculative.py warns that outputs may degrade, and goes on: people shall say it twice"),
    ),
    "loss of nothing": (
        replace(GPU, speculation=replace(DRAFT_MODEL, lossy=True)),
        Ours("nothing is said to vLLM: a word that does nothing would look as if it did"),
    ),
    "lossy checks on the CPU": (replace(CPU, speculation=LOSSY), Later("rejection_sampler", "not supported on CPU")),
    "lossy checks of one token": (
        replace(GPU, speculation=replace(LOSSY, num_speculative_tokens=1)),
        Refused("FLy requires num_speculative_tokens to be at least 2"),
    ),
    "samples of a lookup": (
        replace(GPU, speculation=replace(NGRAM, draft_sampling=DraftSampling.PROBABILISTIC)),
        Ours("vllm/v1/worker/gpu/spec_decode/speculator.py alone reads it, which a lookup is not: no effect"),
    ),
    "costs of a lookup": (
        replace(GPU, speculation=replace(NGRAM, adaptive_verification=True)),
        Ours("v1/worker/gpu/model_runner.py asks the speculator, and that of a lookup has no such flag: no effect"),
    ),
    "costs on V1": (
        replace(GPU, speculation=replace(PARD, adaptive_verification=True)),
        Refused("does not support: adaptive draft verification"),
    ),
    "costs on the CPU": (
        replace(CPU, speculation=replace(DRAFT_MODEL, adaptive_verification=True)),
        Refused("does not support: adaptive draft verification"),
    ),
    "costs over stages": (
        adapting(Method.EAGLE3, pipeline_parallel_size=2),
        Refused("not currently compatible with pipeline parallelism"),
    ),
    "costs without graphs": (adapting(Method.EAGLE3, enforce_eager=True), Refused("requires full CUDA graphs")),
    "costs of pieces": (
        adapting(Method.EAGLE3, cudagraph_mode=CudagraphMode.PIECEWISE),
        Refused("requires full CUDA graphs"),
    ),
    "costs of an engine that is hardly optimized": (
        adapting(Method.DRAFT_MODEL, extra_args=("-O1",)),
        Refused("requires full CUDA graphs"),
    ),
    "costs with adapters": (
        adapting(Method.EAGLE, extra_args=("--enable-lora",)),
        Refused("not currently compatible with LoRA"),
    ),
    "costs with sampling masks": (
        adapting(Method.EAGLE3, extra_args=("--return-sampling-mask", "--logprobs-mode", "processed_logprobs")),
        Refused("requires fixed verification boundaries"),
    ),
    "dspark on the CPU": (
        drafting(Method.DSPARK, base=CPU),
        Refused("Model Runner V"),
    ),
    "lookup on a GPU that is not there": (
        drafting(Method.NGRAM_GPU, base=CPU),
        Ours(
            "vllm/v1/worker/gpu_model_runner.py, __init__, pins memory, which takes NVIDIA's driver; "
            "test_recorder_methods.py sees it fail"
        ),
    ),
    "draft model in stages": (
        replace(GPU, pipeline_parallel_size=2, speculation=DRAFT_MODEL),
        Ours(
            "vllm/v1/spec_decode/draft_model.py and vllm/v1/worker/gpu/spec_decode/standalone_ar: nothing refuses it, "
            "and each draft is built of the layers of one stage"
        ),
    ),
    "stages of a head": (
        replace(METHODS[Method.EAGLE], pipeline_parallel_size=2),
        Refused("Pipeline parallelism is not supported for this model"),
    ),
    "lengths that change, with copies": (
        replace(scheduled((1, 8, 2)), data_parallel_size=2),
        Changed("num_speculative_tokens_per_batch_size", None),
    ),
    "another split": (
        replace(GPU, tensor_parallel_size=4, speculation=replace(DRAFT_MODEL, draft_tensor_parallel_size=2)),
        Refused("cannot be other value than 1 or target model tensor_parallel_size"),
    ),
    "whole draft of a split target": (
        replace(
            CPU,
            tensor_parallel_size=2,
            cpu=CpuSettings(kv_cache_gib=2, cores=2),
            speculation=replace(DRAFT_MODEL, draft_tensor_parallel_size=1),
        ),
        Later("draft_split", "must be the same. Got 1 and 2"),
    ),
    "step too short for a draft": (
        replace(GPU, max_num_seqs=1, max_num_batched_tokens=6, speculation=DRAFT_MODEL),
        Ours("vllm/v1/core/sched/scheduler.py, schedule, cuts every draft off, so that none is ever verified whole"),
    ),
    "further key that a field says": (
        further("num_speculative_tokens", 3),
        Ours("spec.speculation.numSpeculativeTokens says it, and the plan counts on that"),
    ),
    "further key that nobody knows": (further("magic", 1), Refused("Unexpected keyword argument")),
    "further switch that is none": (further("enforce_eager", "perhaps"), Refused("Input should be a valid boolean")),
    "asynchronous lookup": (
        extra("--async-scheduling", base=replace(GPU, speculation=NGRAM)),
        Refused("async scheduling is only supported with"),
    ),
}
"""Of speculation: speculation_rules.py."""

REFUSALS = {**SERVING, **COMBINED, **SPECULATING}
"""A case for every place of the rules that says no, in the newest version or in an older one."""
