"""Settings that several engine tests start from."""

from specdecode_operator.api.deployment import Serving
from specdecode_operator.api.speculation import Ngram
from specdecode_operator.enums import Method
from specdecode_operator.vllm.settings import CpuSettings, EngineSettings, ScheduleRange
from tests.support.engine_settings import speculating_with

DRAFT_MODEL = speculating_with(Method.DRAFT_MODEL, 5, draft_model="/models/draft")
NGRAM = speculating_with(Method.NGRAM, 4, ngram=Ngram(prompt_lookup_min=2, prompt_lookup_max=4))
SCHEDULED = speculating_with(
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
    block_size=16,
    tensor_parallel_size=2,
    shutdown_timeout_s=60,
    serving=Serving(),
)
CPU = CpuSettings(kv_cache_gib=1, cores=2)
