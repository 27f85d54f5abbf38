"""Settings drawn at random, good and bad."""

from hypothesis import strategies as st

from specdecode_operator.api.deployment import Serving
from specdecode_operator.api.speculation import Draft, Ngram
from specdecode_operator.enums import (
    METHODS_WITH_SAMPLING,
    CudagraphMode,
    DraftSampling,
    Dtype,
    KvCacheDtype,
    Method,
    OnlineQuantization,
    RejectionSampling,
)
from specdecode_operator.vllm.settings import EngineSettings, ScheduleRange, SpeculationSettings
from tests.engine.contract_cases import CPU, DRAFT, METHODS, STARTING_EXTRA, TARGET
from tests.support.engine_settings import replace, speculating_with

ranges = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600), st.integers(0, 8)), max_size=4).map(
    lambda parts: tuple(ScheduleRange(min(a, b), max(a, b), k) for a, b, k in sorted(parts))
)
lookups = st.none() | st.integers(1, 8)
drafts = st.builds(
    speculating_with,
    method=st.just(Method.DRAFT_MODEL),
    num_speculative_tokens=st.integers(1, 32),
    schedule=ranges,
    draft_model=st.just(DRAFT),
    draft_online_quantization=st.none() | st.sampled_from(OnlineQuantization),
    draft=st.builds(Draft, model=st.just(DRAFT), max_model_len=st.none() | st.integers(1, 131_072)),
    rejection_sampling=st.none() | st.sampled_from(RejectionSampling),
    draft_sampling=st.none() | st.sampled_from(DraftSampling),
    adaptive_verification=st.none() | st.booleans(),
)
ngrams = st.builds(
    speculating_with,
    method=st.just(Method.NGRAM),
    num_speculative_tokens=st.integers(1, 32),
    schedule=ranges,
    ngram=st.builds(Ngram, prompt_lookup_min=lookups, prompt_lookup_max=lookups),
)
names = st.text(alphabet="aB3-_./:= {}@", min_size=1, max_size=12)
any_settings = st.builds(
    EngineSettings,
    model=st.just(TARGET),
    served_model_names=st.lists(names, min_size=1, max_size=3).map(tuple),
    max_model_len=st.integers(16, 131_072),
    max_num_seqs=st.integers(1, 2048),
    max_num_batched_tokens=st.integers(1, 65_536),
    block_size=st.integers(1, 16).map(lambda number: 16 * number),
    tensor_parallel_size=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline_parallel_size=st.sampled_from([1, 2, 4]),
    data_parallel_size=st.sampled_from([1, 2]),
    shutdown_timeout_s=st.integers(0, 3600),
    serving=st.builds(
        Serving,
        kv_cache_dtype=st.sampled_from(KvCacheDtype),
        gpu_memory_utilization_percent=st.integers(1, 100),
        port=st.integers(1024, 65_535),
        enforce_eager=st.booleans(),
        cudagraph_mode=st.none() | st.sampled_from(CudagraphMode),
        max_cudagraph_capture_size=st.none() | st.integers(1, 1024),
    ),
    dtype=st.sampled_from([Dtype.AUTO, Dtype.BFLOAT16, Dtype.FLOAT16]),
    online_quantization=st.none() | st.sampled_from(OnlineQuantization),
    speculation=st.none() | drafts | ngrams,
    cpu=st.none() | st.just(CPU.cpu),
    extra_args=st.sampled_from(STARTING_EXTRA).map(str.split).map(tuple) | st.just(()),
)


WITHOUT_CPU = (Method.MTP,)
"""Methods whose example has latent attention: with it an engine on the CPU has blocks and steps of its own sizes."""


@st.composite
def _drafting(draw: st.DrawFn, method: Method) -> SpeculationSettings:
    """Draw how a method drafts."""
    example = METHODS[method].speculation
    assert example is not None
    tokens = draw(st.integers(1, 8))
    edges = sorted(draw(st.just([]) | st.lists(st.integers(1, 600), max_size=4, unique=True)))
    lengths = st.integers(0, tokens)
    schedule = tuple(ScheduleRange(*ends, draw(lengths)) for ends in zip(edges[::2], edges[1::2], strict=False))
    drafted = replace(example, num_speculative_tokens=tokens, schedule=schedule)
    if method not in METHODS_WITH_SAMPLING:
        return drafted
    return replace(
        drafted,
        rejection_sampling=draw(st.none() | st.sampled_from([RejectionSampling.STANDARD, RejectionSampling.BLOCK])),
        draft_sampling=draw(st.none() | st.sampled_from(DraftSampling)),
        adaptive_verification=draw(st.none() | st.booleans()),
    )


def _speculating(settings: EngineSettings, speculation: SpeculationSettings) -> EngineSettings:
    """Return settings that speculate, less the clashes between two of them that most draws have some of."""
    cpu = None if speculation.method in WITHOUT_CPU else settings.cpu
    serving = settings.serving
    graphs = cpu is None and not serving.enforce_eager
    largest = serving.max_cudagraph_capture_size if serving.cudagraph_mode is not CudagraphMode.NONE else None
    return replace(
        settings,
        model=METHODS[speculation.method].model,
        speculation=speculation,
        max_num_batched_tokens=settings.max_num_batched_tokens + settings.max_num_seqs,
        block_size=settings.block_size * (1 if cpu is None else 2),
        cpu=cpu,
        cudagraph_mode=serving.cudagraph_mode if graphs else None,
        max_cudagraph_capture_size=largest if graphs else None,
    )


def settings_of(method: Method) -> st.SearchStrategy[EngineSettings]:
    """Draw settings with a method, and models that it drafts for and with."""
    return st.builds(_speculating, any_settings, _drafting(method))
