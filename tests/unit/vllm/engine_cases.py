"""Settings that several engine tests start from."""

from specdecode_operator.enums import Method
from specdecode_operator.vllm.settings import CpuSettings, EngineSettings, ScheduleRange, SpeculationSettings

DRAFT_MODEL = SpeculationSettings(Method.DRAFT_MODEL, 5, draft_model="/models/draft")
NGRAM = SpeculationSettings(Method.NGRAM, 4, prompt_lookup_min=2, prompt_lookup_max=4)
SCHEDULED = SpeculationSettings(
    Method.DRAFT_MODEL,
    5,
    schedule=(ScheduleRange(1, 16, 5), ScheduleRange(64, 128, 0)),
    draft_model="/models/draft",
)

PLAIN = EngineSettings(
    model="/models/target",
    served_model_names=("target",),
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    kv_cache_dtype="auto",
    block_size=16,
    memory_utilization_percent=92,
    tensor_parallel_size=2,
    port=8000,
    shutdown_timeout_s=60,
)
CPU = CpuSettings(kv_cache_gib=1, cores=2)
