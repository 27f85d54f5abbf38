"""For each row of `flag_checks.json`: settings that vLLM rejects, and the nearest ones that it takes.

`tests/unit/vllm/test_flag_values.py` asks our table, `tests/engine/test_flag_values.py` the real vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from specdecode_operator.vllm.settings import EngineSettings
from tests.support.engine_settings import replace

PLAIN: Final = "plain"
STAGES: Final = "two pipeline stages of two GPUs, no speculation"
EXPERTS: Final = "a mixture of experts on two GPUs, spread"
EXPERT_STAGES: Final = "a mixture of experts in two stages"
ON_V1: Final = "method draft_model with a draft that proposes in one pass, which V1 serves"
ON_CPU: Final = "the CPU"
EXPERTS_ON_CPU: Final = "spread experts on two ranks of the CPU"
FP8: Final = "quantized to FP8 while loading"
FLOAT16: Final = "float16"
FULL_GRAPHS: Final = "CUDA graphs of mode FULL"
COPIES: Final = "four data-parallel copies of a mixture of experts"
EAGLE3: Final = "method eagle3"
ADAPTING: Final = "method eagle3 with adaptive verification"
MAPPED: Final = "method draft_model with a mapped vocabulary"
MTP: Final = "method mtp"
EAGER: Final = "without CUDA graphs"


def settings(base: EngineSettings, line: str) -> EngineSettings:
    """Return settings with further arguments, or with keys of extraConfig."""
    if line.startswith("{"):
        assert base.speculation is not None
        return replace(base, speculation=replace(base.speculation, extra_config=line))
    return replace(base, extra_args=tuple(line.split()))


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes
    ----------
    bad, good
        Further arguments that vLLM rejects, and takes; with keys of extraConfig, their JSON.
    base
        Settings that ``bad`` is added to.
    good_base
        Settings that ``good`` is added to.
    env
        Variables of spec.engine.env, of the bad one.
    asked
        Whether the real vLLM can be asked without a GPU and a model that is loaded.
    """

    bad: str
    good: str
    base: str = PLAIN
    good_base: str | None = None
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    asked: bool = True


_KV = "--kv-transfer-config"
_KV_GOOD = f"{_KV}.kv_connector=ExampleConnector {_KV}.kv_role=kv_both"
_HISPARSE = (
    f"{_KV}.kv_connector=HiSparseConnector {_KV}.kv_role=kv_both {_KV}.kv_connector_extra_config.host_pool_gib=1"
)
_CC = "--compilation-config"
_PROFILER = "--profiler-config"
_OUTPUTS = "--structured-outputs-config"
_EPLB = "--enable-eplb --eplb-config"
_ROUTED = "--enable-return-routed-experts"
_MASK = "--return-sampling-mask"
_ROUNDING = "--enable-mamba-cache-stochastic-rounding"
_EC = "--ec-transfer-config"
_ENCODER = f"{_CC}.cudagraph_mm_encoder=true {_CC}"

_BUCKETS = "--custom-histogram-buckets"
_BUCKETS_GOOD = f'{_BUCKETS} {{"iteration_tokens":[1,2.5]}}'
_PROTON = f"{_PROFILER}.profiler=proton {_PROFILER}.proton_profiler_dir=/tmp/p"
_PROTON_GOOD = f"{_PROTON} {_PROFILER}.proton_graph_attribution=true"
_HISPARSE_TWICE = (
    f'{_KV} {{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{{"connectors":['
    '{"kv_connector":"HiSparseConnector","kv_connector_extra_config":{"host_pool_gib":1}},'
    '{"kv_connector":"HiSparseConnector","kv_connector_extra_config":{"host_pool_gib":1}}]}}'
)
_ENGRAM = "--engram-config"

CASES: Final = {
    # The engine reads the pool when it plans the cache, after the model is loaded.
    f"config/kv_transfer.py:38 {_KV}.kv_connector_extra_config": Case(_HISPARSE_TWICE, "--seed 1", asked=False),
    f"config/kv_transfer.py:43 {_KV}.kv_connector_extra_config": Case(
        f"{_KV}.kv_connector=HiSparseConnector {_KV}.kv_role=kv_both", _HISPARSE, asked=False
    ),
    f"config/kv_transfer.py:46 {_KV}.kv_connector_extra_config": Case(
        _HISPARSE.replace("host_pool_gib=1", "host_pool_gib=0"), _HISPARSE, asked=False
    ),
    # The stubbed H100 has no allocator that sleep mode could use.
    "config/vllm.py:1264 --enable-sleep-mode": Case(
        f"--enable-sleep-mode {_KV}.kv_connector=NixlPushConnector {_KV}.kv_role=kv_both",
        f"--enable-sleep-mode {_KV_GOOD}",
        asked=False,
    ),
    f"config/profiler.py:225 {_PROFILER}.torch_profiler_activities": Case(
        f'{_PROFILER} {{"profiler":"torch","torch_profiler_dir":"/tmp/p","torch_profiler_activities":["CPU","CPU"]}}',
        f'{_PROFILER} {{"profiler":"torch","torch_profiler_dir":"/tmp/p","torch_profiler_activities":["CPU","CUDA"]}}',
    ),
    f"config/profiler.py:275 {_PROFILER}.proton_profiler_dir": Case(
        _PROTON_GOOD.replace("/tmp/p", "s3://bucket/p"), _PROTON_GOOD
    ),
    f"config/profiler.py:283 {_PROFILER}.proton_graph_attribution": Case(
        f"{_PROTON_GOOD} {_PROFILER}.proton_data=trace", f"{_PROTON_GOOD} {_PROFILER}.proton_data=tree"
    ),
    f"config/profiler.py:289 {_PROFILER}.proton_graph_attribution": Case(
        f"{_PROTON_GOOD} {_PROFILER}.proton_mode=periodic_flushing:a", _PROTON_GOOD
    ),
    f"config/profiler.py:294 {_PROFILER}.proton_output_format": Case(
        f"{_PROTON_GOOD} {_PROFILER}.proton_output_format=chrome_trace",
        f"{_PROTON_GOOD} {_PROFILER}.proton_output_format=hatchet",
    ),
    f"config/profiler.py:299 {_PROFILER}.proton_output_format": Case(
        f"{_PROTON} {_PROFILER}.proton_output_format=hatchet {_PROFILER}.proton_data=trace",
        f"{_PROTON_GOOD} {_PROFILER}.proton_output_format=hatchet_msgpack",
    ),
    f"config/vllm.py:3271 {_PROFILER}.profiler": Case(_PROTON, "--seed 1", ON_CPU),
    f"config/vllm.py:3276 {_PROFILER}.proton_graph_attribution": Case(_PROTON_GOOD, _PROTON_GOOD, ON_V1, PLAIN),
    f"config/vllm.py:3291 {_PROFILER}.proton_mode": Case(
        f"{_PROTON_GOOD} {_PROFILER}.proton_mode=pcsampling",
        f"{_PROTON} {_PROFILER}.proton_mode=pcsampling",
        PLAIN,
        EAGER,
    ),
    f"config/vllm.py:3296 {_PROFILER}.profiler": Case(_PROTON, _PROTON_GOOD),
    f"config/observability.py:177 {_BUCKETS}": Case(f'{_BUCKETS} {{"iteration_tokens":[1,true]}}', _BUCKETS_GOOD),
    f"config/observability.py:194 {_BUCKETS}": Case(f'{_BUCKETS} {{"e2e_latency":[1,2]}}', _BUCKETS_GOOD),
    f"config/observability.py:199 {_BUCKETS}": Case(f'{_BUCKETS} {{"iteration_tokens":[]}}', _BUCKETS_GOOD),
    f"config/observability.py:205 {_BUCKETS}": Case(f'{_BUCKETS} {{"iteration_tokens":[0,1]}}', _BUCKETS_GOOD),
    f"config/observability.py:210 {_BUCKETS}": Case(f'{_BUCKETS} {{"iteration_tokens":[1,1]}}', _BUCKETS_GOOD),
    # The engine reads the variable when attention layers choose a layout.
    "config/cache.py:38 env.VLLM_KV_CACHE_LAYOUT": Case(
        "--seed 1", "--seed 1", env={"VLLM_KV_CACHE_LAYOUT": "NDH"}, asked=False
    ),
    f"config/engram.py:61 {_ENGRAM}.dp_shared_memory": Case(
        f"{_ENGRAM}.dp_shared_memory=true {_ENGRAM}.cpu_offload=false", "--seed 1"
    ),
    f"config/engram.py:63 {_ENGRAM}.use_thp": Case(
        f"{_ENGRAM}.use_thp=true {_ENGRAM}.dp_shared_memory=true", "--seed 1"
    ),
    "config/lora.py:129 env.VLLM_LORA_ENABLE_DUAL_STREAM": Case(
        "--enable-lora", "--enable-lora", ON_CPU, env={"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}
    ),
    "config/parallel.py:492 --numa-bind-nodes": Case(
        "--numa-bind-nodes=-1 --numa-bind", "--numa-bind-nodes=0 --numa-bind"
    ),
    "config/parallel.py:507 --numa-bind-cpus": Case(
        "--numa-bind-cpus 0:3 --numa-bind", "--numa-bind-cpus 0,2,4-7 --numa-bind"
    ),
    "config/parallel.py:516 --numa-bind-cpus": Case(
        "--numa-bind-cpus 0,7-4 --numa-bind", "--numa-bind-cpus 0,4-4 --numa-bind"
    ),
    "engine/arg_utils.py --compilation-config": Case(f"{_CC} 3", f"{_CC} {{}}"),
    "engine/arg_utils.py --kv-transfer-config": Case(f"{_KV} ExampleConnector", _KV_GOOD),
    "engine/arg_utils.py --structured-outputs-config": Case(f"{_OUTPUTS} xgrammar", f"{_OUTPUTS}.backend xgrammar"),
    "engine/arg_utils.py --eplb-config": Case("--eplb-config 32", "--eplb-config {}"),
    "engine/arg_utils.py --profiler-config": Case(f"{_PROFILER} torch", f"{_PROFILER} {{}}"),
    f"config/kv_transfer.py:115 {_KV}.kv_role": Case(f"{_KV}.kv_connector=A {_KV}.kv_role=both", _KV_GOOD),
    f"config/kv_transfer.py:121 {_KV}.kv_connector": Case(f"{_KV}.kv_connector=ExampleConnector", _KV_GOOD),
    "config/vllm.py:1291 env.PYTORCH_CUDA_ALLOC_CONF": Case(
        _KV_GOOD, _KV_GOOD, env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    ),
    f"config/vllm.py:1885 {_KV}.kv_connector": Case(_HISPARSE, "--seed 1", ON_CPU),
    f"config/vllm.py:1887 {_KV}.kv_connector": Case(_HISPARSE, "--seed 1", STAGES),
    f"config/vllm.py:1893 {_KV}.kv_connector": Case(_HISPARSE, "--seed 1", FULL_GRAPHS),
    "config/vllm.py:1902 --scheduler-reserve-full-isl": Case(
        f"{_HISPARSE} --no-scheduler-reserve-full-isl", "--no-scheduler-reserve-full-isl"
    ),
    f"config/vllm.py:1199 {_ROUTED}": Case(_ROUTED, f"--no{_ROUTED[1:]}", ON_V1),
    f"config/vllm.py:1208 {_ROUTED}": Case(f"{_ROUTED} --no-enable-prefix-caching", _ROUTED, EXPERTS),
    f"config/vllm.py:1218 {_ROUTED}": Case(_ROUTED, _ROUTED, EXPERT_STAGES, EXPERTS),
    f"config/vllm.py:1241 {_ROUTED}": Case(
        f"{_ROUTED} {_KV}.kv_connector=NixlConnector {_KV}.kv_role=kv_both", _ROUTED, EXPERTS
    ),
    f"config/vllm.py:1309 {_MASK}": Case(f"{_MASK} --logprobs-mode processed_logprobs", "--seed 1", ON_V1),
    f"config/vllm.py:1325 {_MASK}": Case(
        f"{_MASK} --logprobs-mode processed_logprobs --logits-processors a.b:C",
        f"{_MASK} --logprobs-mode processed_logprobs",
    ),
    f"config/vllm.py:1329 {_MASK}": Case(_MASK, f"{_MASK} --logprobs-mode processed_logprobs"),
    f"config/structured_outputs.py:68 {_OUTPUTS}.disable_any_whitespace": Case(
        f"{_OUTPUTS}.disable_any_whitespace=true",
        f"{_OUTPUTS}.disable_any_whitespace=true {_OUTPUTS}.backend=xgrammar",
    ),
    f"config/structured_outputs.py:73 {_OUTPUTS}.disable_additional_properties": Case(
        f"{_OUTPUTS}.disable_additional_properties=true {_OUTPUTS}.backend=xgrammar",
        f"{_OUTPUTS}.disable_additional_properties=true {_OUTPUTS}.backend=guidance",
    ),
    "config/mamba.py:20 --mamba-backend": Case("--mamba-backend cuda", "--mamba-backend triton"),
    "config/mamba.py:72 --mamba-ssu-algorithm": Case(
        "--mamba-backend flashinfer --mamba-ssu-algorithm fast", "--mamba-backend flashinfer --mamba-ssu-algorithm auto"
    ),
    "config/mamba.py:77 --mamba-ssu-algorithm": Case(
        "--mamba-ssu-algorithm auto", "--mamba-backend flashinfer --mamba-ssu-algorithm auto"
    ),
    "config/vllm.py:1599 --mamba-ssm-cache-dtype": Case(
        f"{_ROUNDING} --mamba-backend flashinfer --mamba-ssm-cache-dtype float32",
        f"{_ROUNDING} --mamba-backend flashinfer --mamba-ssm-cache-dtype float16",
    ),
    "config/vllm.py:3449 --mamba-block-size": Case(
        "--mamba-block-size 64 --no-enable-prefix-caching", "--mamba-block-size 64"
    ),
    "config/offload.py:102 --offload-num-in-group": Case(
        "--offload-group-size 2 --offload-num-in-group 3", "--offload-group-size 2 --offload-num-in-group 2"
    ),
    "config/offload.py:108 --offload-prefetch-step": Case(
        "--offload-group-size 2 --offload-prefetch-step 0", "--offload-prefetch-step 0"
    ),
    "config/parallel.py:123 --eplb-config.policy": Case(f"{_EPLB}.policy=other", f"{_EPLB}.policy=default", EXPERTS),
    "config/parallel.py:125 --eplb-config.communicator": Case(
        f"{_EPLB}.communicator=pynccl",
        f"{_EPLB}.communicator=pynccl --eplb-config.use_async=false",
        EXPERTS,
    ),
    "config/parallel.py:132 --eplb-config.log_balancedness_interval": Case(
        f"{_EPLB}.log_balancedness_interval=0", f"{_EPLB}.log_balancedness_interval=1", EXPERTS
    ),
    "config/parallel.py:587 --eplb-config.num_redundant_experts": Case(
        "--eplb-config.num_redundant_experts=2", f"{_EPLB}.num_redundant_experts=2", EXPERTS
    ),
    "config/parallel.py:565 --enable-eplb": Case("--enable-eplb", "--seed 1", EXPERTS_ON_CPU),
    "config/parallel.py:976 --enable-elastic-ep": Case("--enable-elastic-ep", "--no-enable-elastic-ep", EXPERTS),
    "config/parallel.py:978 --enable-elastic-ep": Case(
        "--enable-elastic-ep --enable-eplb", "--enable-eplb", EXPERT_STAGES, EXPERTS
    ),
    "config/parallel.py:1043 --elastic-ep-max-dp-size": Case(
        "--enable-elastic-ep --enable-eplb --eplb-config.use_async=false --elastic-ep-max-dp-size 3",
        "--elastic-ep-max-dp-size 3",
        COPIES,
    ),
    "config/parallel.py:531 --enable-fault-tolerance": Case(
        "--enable-fault-tolerance --api-server-count 2", "--api-server-count 2", asked=False
    ),
    "config/parallel.py:1184 --enable-dbo": Case(
        "--enable-dbo --all2all-backend deepep_low_latency --dbo-decode-token-threshold 1",
        "--enable-dbo --all2all-backend deepep_low_latency --dbo-decode-token-threshold 2",
        EXPERTS,
    ),
    "config/parallel.py:559 --numa-bind-nodes": Case("--numa-bind-nodes 0", "--numa-bind-nodes 0 --numa-bind"),
    "config/parallel.py:559 --numa-bind-cpus": Case("--numa-bind-cpus 0-3", "--numa-bind-cpus 0-3 --numa-bind"),
    "config/kernel.py:211 --all2all-backend": Case(
        "--moe-backend flashinfer_moe_ep_cutedsl --all2all-backend deepep_low_latency",
        "--all2all-backend deepep_low_latency",
        EXPERTS,
    ),
    "config/lora.py:142 --moe-backend": Case(
        "--moe-backend deep_gemm_mega_moe --enable-lora", "--moe-backend triton --enable-lora"
    ),
    "config/vllm.py:2111 --all2all-backend": Case("--all2all-backend moonep", "--all2all-backend moonep", FP8, PLAIN),
    "config/vllm.py:2121 --all2all-backend": Case(
        "--all2all-backend moonep", "--all2all-backend moonep", FLOAT16, PLAIN
    ),
    "config/vllm.py:2127 --all2all-backend": Case(
        "--all2all-backend moonep --enable-eplb", "--all2all-backend moonep", EXPERTS
    ),
    "config/vllm.py:2134 --all2all-backend": Case(
        "--all2all-backend moonep --expert-placement-strategy round_robin", "--all2all-backend moonep", EXPERTS
    ),
    f"config/compilation.py:865 {_CC}.mode": Case(f"{_CC}.mode=FAST", f"{_CC}.mode=none"),
    f"config/compilation.py:893 {_CC}.compile_cache_save_format": Case(
        f"{_CC}.compile_cache_save_format=zip", f"{_CC}.compile_cache_save_format=binary"
    ),
    f"config/compilation.py:1015 {_CC}.custom_ops": Case(
        f'{_CC} {{"custom_ops":["rms_norm"]}}', f'{_CC} {{"custom_ops":["+rms_norm"]}}'
    ),
    f"config/compilation.py:1023 {_CC}.custom_ops": Case(
        f'{_CC} {{"custom_ops":["all","none"]}}', f'{_CC} {{"custom_ops":["none"]}}'
    ),
    f"config/compilation.py:1031 {_CC}.custom_ops": Case(
        f'{_CC} {{"custom_ops":["none","+rms_norm","-rms_norm"]}}', f'{_CC} {{"custom_ops":["none","+rms_norm"]}}'
    ),
    f"config/compilation.py:1044 {_CC}.backend": Case(
        f"{_CC}.mode=3 {_CC}.backend=fast", f"{_CC}.mode=3 {_CC}.backend=eager"
    ),
    f"config/compilation.py:1049 {_CC}.decoder_replay_cudagraph_capture_sizes": Case(
        f'{_CC} {{"decoder_replay_cudagraph_capture_sizes":[0]}}',
        f'{_CC} {{"decoder_replay_cudagraph_capture_sizes":[1]}}',
    ),
    f"config/compilation.py:1058 {_CC}.encoder_cudagraph_max_vision_items_per_batch": Case(
        f"{_ENCODER}.encoder_cudagraph_max_vision_items_per_batch=-1",
        f"{_CC}.encoder_cudagraph_max_vision_items_per_batch=0",
    ),
    f"config/compilation.py:1067 {_CC}.encoder_cudagraph_max_frames_per_batch": Case(
        f"{_ENCODER}.encoder_cudagraph_max_frames_per_batch=-1",
        f"{_CC}.encoder_cudagraph_max_frames_per_batch=0",
    ),
    f"config/compilation.py:1075 {_CC}.encoder_cudagraph_token_budgets": Case(
        f'{_CC} {{"encoder_cudagraph_token_budgets":[0]}}', f'{_CC} {{"encoder_cudagraph_token_budgets":[1]}}'
    ),
    f"config/profiler.py:220 {_PROFILER}.torch_profiler_activities": Case(
        f'{_PROFILER} {{"torch_profiler_activities":["CPU"]}}',
        f'{_PROFILER} {{"profiler":"torch","torch_profiler_dir":"/tmp/p","torch_profiler_activities":["CPU"]}}',
    ),
    f"config/profiler.py:236 {_PROFILER}.torch_profiler_dir": Case(
        f"{_PROFILER}.torch_profiler_dir=/tmp/p", f"{_PROFILER}.profiler=torch {_PROFILER}.torch_profiler_dir=/tmp/p"
    ),
    f"config/profiler.py:240 {_PROFILER}.profiler": Case(
        f"{_PROFILER}.profiler=torch", f"{_PROFILER}.profiler=torch {_PROFILER}.torch_profiler_dir=/tmp/p"
    ),
    f"config/profiler.py:266 {_PROFILER}.proton_profiler_dir": Case(
        f"{_PROFILER}.proton_profiler_dir=/tmp/p", f"{_PROFILER} {{}}"
    ),
    f"config/profiler.py:270 {_PROFILER}.profiler": Case(f"{_PROFILER}.profiler=proton", f"{_PROFILER} {{}}"),
    f"config/profiler.py:302 {_PROFILER}.capture_torch_profiler": Case(
        f"{_PROFILER}.capture_torch_profiler=true", f"{_PROFILER}.capture_torch_profiler=false"
    ),
    f"config/ec_transfer.py:85 {_EC}.ec_role": Case(
        f"{_EC}.ec_connector=ECExampleConnector {_EC}.ec_role=both", "--seed 1"
    ),
    f"config/ec_transfer.py:91 {_EC}.ec_connector": Case(f"{_EC}.ec_connector=ECExampleConnector", "--seed 1"),
    "config/ec_manager_config.py:22 --ec-manager-config.manager_config": Case(
        '--ec-manager-config {"manager_config":{"a":1}}', "--ec-manager-config {}"
    ),
    "config/watermarking.py:61 --watermark-config.key": Case(
        f"--watermark-config.key={2**64}", f"--watermark-config.key={2**64 - 1}"
    ),
    "v1/core/sched/request_queue.py:207 --scheduling-policy": Case(
        "--scheduling-policy lifo", "--scheduling-policy priority"
    ),
    "config/model.py:668 --enable-sleep-mode": Case("--enable-sleep-mode", "--no-enable-sleep-mode", ON_CPU),
    "config/model.py:678 --enable-cumem-allocator": Case(
        "--enable-cumem-allocator", "--no-enable-cumem-allocator", ON_CPU
    ),
    "config/model.py:1551 --enable-hc-sp": Case("--enable-hc-sp", "--no-enable-hc-sp", EXPERTS_ON_CPU),
    "config/model.py:1555 --enable-hc-sp": Case("--enable-hc-sp", "--no-enable-hc-sp", STAGES),
    "config/speculative.py:1641 speculation.dspark_draft_topk": Case('{"dspark_draft_topk":4}', "{}", EAGLE3),
    "config/speculative.py:1706 speculation.index_share_for_mtp_iteration": Case(
        '{"index_share_for_mtp_iteration":true}', '{"index_share_for_mtp_iteration":true}', EAGLE3, MTP
    ),
    "config/speculative.py:1718 speculation.use_local_argmax_reduction": Case(
        '{"use_local_argmax_reduction":true}', '{"use_local_argmax_reduction":true}', ADAPTING, EAGLE3
    ),
    "config/speculative.py:2008 speculation.use_local_argmax_reduction": Case(
        '{"use_local_argmax_reduction":true}', '{"use_local_argmax_reduction":true}', MAPPED, EAGLE3
    ),
}
"""By source and name of the row. A line is split at blanks."""
