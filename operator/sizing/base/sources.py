"""Where the rules of advice come from. docs/explanation/advice.md says how far each was read."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Source:
    """A place to read on."""

    title: str  # Paper, page or source file; a rule that only practice supports says so
    url: str = ""  # Where it is; empty for a rule of thumb without one


_GUIDE_URL: Final = "https://www.digitalocean.com/community/tutorials/speculative-decoding-vllm-configuration-guide"

DRAFT_SIZE: Final = Source(
    "rule of thumb: 1:8 to 1:12 from DigitalOcean, Speculative Decoding on vLLM; 1 to 5 % from practice, in line with "
    "Leviathan et al. 2023, whose best drafts were far smaller still",
    _GUIDE_URL,
)

FAMILY: Final = Source("rule of thumb: DigitalOcean, Speculative Decoding on vLLM", _GUIDE_URL)

MEMORY_SHARES: Final = Source("rule of thumb; the share itself is computed")

SHARED_BLOCKS: Final = Source(
    "vLLM 0.32, v1/core/kv_cache_utils.py: target and draft share one pool of blocks",
    "https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/kv_cache_utils.py",
)

DROPPED_BLOCK: Final = Source(
    "vLLM until 0.32, v1/core/single_type_kv_cache_manager.py find_longest_cache_hit; its own manager was asked",
    "https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/single_type_kv_cache_manager.py",
)

EIGHT_BIT_FIRST: Final = Source(
    "rule of thumb, with Kurtic et al., Give Me BF16 or Give Me Death: FP8 loses nothing measurable, INT8 1-3 %, INT4 "
    "is close to 8 bits when well made",
    "https://arxiv.org/abs/2411.02355",
)

LOSSLESS: Final = Source(
    "Leviathan et al., Fast Inference from Transformers via Speculative Decoding: the output follows the target alone",
    "https://arxiv.org/abs/2211.17192",
)

SCHEDULER_SLOTS: Final = Source(
    "vLLM 0.32, config/speculative.py max_num_new_slots_for_drafting and v1/core/sched/scheduler.py schedule",
    "https://github.com/vllm-project/vllm/blob/main/vllm/v1/core/sched/scheduler.py",
)

SAMPLER_PEAK: Final = Source(
    "vLLM issues on the rejection sampler's memory; chunked since pull request 48630",
    "https://github.com/vllm-project/vllm/pull/38220",
)

TEMPERATURE: Final = Source(
    "rule of thumb for 0.5 and 0.7; that acceptance falls with temperature: Leviathan et al.",
    "https://arxiv.org/abs/2211.17192",
)

INTER_TOKEN: Final = Source(
    "vLLM documentation, Speculative Decoding: made to reduce inter-token latency",
    "https://docs.vllm.ai/en/latest/features/speculative_decoding/",
)

MIXED: Final = Source("rule of thumb; DigitalOcean, Speculative Decoding on vLLM, warns of a rising P99", _GUIDE_URL)

BUSY_SERVER: Final = Source(
    "vLLM blog, How Speculative Decoding Boosts vLLM Performance by up to 2.8x: slower by 1.4 (draft model) and 1.8 "
    "(n-grams) at high request rates",
    "https://blog.vllm.ai/2024/10/17/spec-decode.html",
)

PROMPT_LOOKUP: Final = Source(
    "vLLM blog, How Speculative Decoding Boosts vLLM Performance by up to 2.8x: prompt lookup on summaries",
    "https://blog.vllm.ai/2024/10/17/spec-decode.html",
)

LAYERS_WITHIN_NODES: Final = Source(
    "vLLM documentation, Parallelism and Scaling: tensor parallelism within a node, pipeline parallelism across nodes",
    "https://docs.vllm.ai/en/latest/serving/parallelism_scaling/",
)
