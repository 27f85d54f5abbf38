"""Activation peak."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    Experts,
    LatentAttention,
    Layer,
    ModelGeometry,
    QuantizationMethod,
    Scales,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
    WeightFormat,
)
from specdecode_operator.sizing.memory.activation import (
    activation_bytes,
    encoder_items,
    expert_workspace_bytes,
    forward_bytes,
    latent_parts_bytes,
    on_product,
    profiled_sampling_bytes,
    proposing_bytes,
    verification_bytes,
)
from specdecode_operator.sizing.memory.budget import Budget, Term, estimate, slack_bytes
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, loaded_draft, profiled_requests
from specdecode_operator.sizing.rank_layers import Stage, stages
from specdecode_operator.sizing.version_rules import Runner

PairFactory = Callable[..., Pair]

MIB = 2**20
CUBLAS = 32 * MIB
L2 = 50 * MIB
HIDDEN_STATES_70B = 8192 * 8192 * 2
ROWS_70B_TENSOR_2 = 8192 * 2 * (2 * 8192 + 3 * 28672 // 2)
FORWARD_70B_TENSOR_2 = ROWS_70B_TENSOR_2 + 8192 * 2 * (8192 // 2) + L2
V1 = "0.19.0"
FEW = {"engine_version": V1, "max_num_seqs": 8}
"""So few requests that sampling does not decide under V1."""


@pytest.fixture
def alone(make_pair: PairFactory) -> PairFactory:
    """Return a maker of pairs that are a target alone, catalogued under a name; limits by keyword."""

    def make(model: str | ModelGeometry, precision: str = "BF16", **limits: Any) -> Pair:
        geometry = find_geometry(model) if isinstance(model, str) else model
        assert geometry is not None
        return replace(make_pair("BF16", None, **limits), target=geometry, target_precision=Precision(precision))

    return make


def test_forward_pass_peak_of_the_target(make_pair: PairFactory) -> None:
    """V1 as logs show it. V2 as its rows alone, to which the one public run of it is nearer."""
    assert activation_bytes(make_pair("BF16", None, **FEW), Parallelism(2)) == CUBLAS + FORWARD_70B_TENSOR_2
    assert activation_bytes(make_pair(), Parallelism(2)) == ROWS_70B_TENSOR_2


def test_l2_cache_flush_is_counted_only_with_compilation(make_pair: PairFactory) -> None:
    compiled, eager = make_pair("BF16", None, **FEW), make_pair("BF16", None, **FEW, enforce_eager=True)
    assert activation_bytes(compiled, Parallelism(2)) - activation_bytes(eager, Parallelism(2)) == L2


def test_int8_copies_the_feed_forward_inputs(make_pair: PairFactory) -> None:
    copies = 8192 * (28672 // 2 + 8192)
    pairs = (make_pair(precision, None, **FEW) for precision in ("FP8", "INT8"))
    plain, int8 = (activation_bytes(pair, Parallelism(2)) for pair in pairs)
    assert int8 - plain == copies


def test_draft_pass_adds_to_the_target_hidden_states(make_pair: PairFactory, llama_70b: ModelGeometry) -> None:
    as_large = replace(make_pair(), draft=llama_70b)
    assert activation_bytes(as_large, Parallelism(2)) == HIDDEN_STATES_70B + ROWS_70B_TENSOR_2
    older = replace(as_large, limits=replace(as_large.limits, **FEW))
    assert activation_bytes(older, Parallelism(2)) == CUBLAS + HIDDEN_STATES_70B + FORWARD_70B_TENSOR_2


def test_eagle3_adds_three_target_hidden_states(make_pair: PairFactory) -> None:
    head = find_geometry("sgl-project/SpecForge:configs/llama3-70B-ealge3.json")
    assert head is not None
    assert head.head is not None
    reading_none = replace(head, head=replace(head.head, auxiliary_states=0))
    pairs = (replace(make_pair(), method="eagle3", draft=draft) for draft in (head, reading_none))
    three, none = (activation_bytes(pair, Parallelism(2)) for pair in pairs)
    assert three - none == 3 * HIDDEN_STATES_70B


@pytest.mark.parametrize(("tensor", "copies_halved"), [(1, 2), (2, 5)])
def test_peak_of_sampling_many_sequences(make_pair: PairFactory, tensor: int, copies_halved: int) -> None:
    """Logits of this rank, gathered from all, and their copy; alone there is nothing to gather."""
    requests = 8192
    logits = requests * 128_256 * 2
    pair = make_pair(max_num_seqs=requests, engine_version="0.32.0")
    rows = requests * 8192 * 2
    assert activation_bytes(pair, Parallelism(tensor)) == HIDDEN_STATES_70B + rows + logits * copies_halved // 2


def test_v2_profiles_full_sampling_since_0_33(make_pair: PairFactory) -> None:
    """The logits, and in float32 what they are copied to, masked, and their softmax."""
    requests = 8192
    pair = make_pair(max_num_seqs=requests, engine_version="0.33.0")
    sampling = 2 * requests * 8192 * 2 + requests * 128_256 * (2 + 3 * 4)
    assert activation_bytes(pair, Parallelism()) == sampling


def test_cublas_workspace_is_outside_the_budget_since_0_33(make_pair: PairFactory) -> None:
    """On V1, whose pass is counted with its workspace; it is free beside the budget instead."""
    head = replace(make_pair(), method="suffix", draft=None, num_speculative_tokens=3)
    older, newer = (
        replace(head, limits=replace(head.limits, engine_version=version)) for version in ("0.32.0", "0.33.0")
    )
    assert activation_bytes(older, Parallelism()) - activation_bytes(newer, Parallelism()) == CUBLAS
    free = [slack_bytes(pair, 80 * 2**30, 70 * 2**30, Parallelism()) for pair in (older, newer)]
    assert free[0] - free[1] == CUBLAS


def test_v2_copies_logits_before_0_26(alone: PairFactory, llama_8b: ModelGeometry) -> None:
    requests = 8192
    copied, in_place = (
        activation_bytes(alone(llama_8b, engine_version=version, max_num_seqs=requests), Parallelism())
        for version in ("0.25.0", "0.26.0")
    )
    assert copied - in_place == requests * 128_256 * 4


def test_forward_pass_peak_of_mixtral_experts(alone: PairFactory) -> None:
    """Mixtral: attention's output, residual before and after, the experts' sum; the workspace stays beside it."""
    pair = alone("mistralai/Mixtral-8x7B-Instruct-v0.1", **FEW)
    row = 4096 + 3 * 4096
    workspace = 8192 * 2 * (14_336 + 28_672) * 2
    assert activation_bytes(pair, Parallelism()) == CUBLAS + workspace + 8192 * row * 2 + L2


def test_sampled_rows_are_capped_at_the_step_tokens(make_pair: PairFactory) -> None:
    peaks = {activation_bytes(make_pair(max_num_seqs=requests), Parallelism(2)) for requests in (8192, 16_384)}
    assert len(peaks) == 1


def test_v1_profile_includes_sampling_filters(alone: PairFactory, llama_8b: ModelGeometry) -> None:
    """vLLM 0.19: logits, float32 copy, softmax, noise, a row of Triton's for each multiprocessor."""
    pair = alone(llama_8b, engine_version=V1, max_num_seqs=1024)
    sampled = 1024 * 128_256 * (2 + 4 + 4 + 4) + 132 * 128_256 * 4
    states = (8192 + 2 * 1024) * 4096 * 2
    assert activation_bytes(pair, Parallelism()) == CUBLAS + states + sampled
    with_flashinfer = alone(llama_8b, engine_version="0.21.0", max_num_seqs=1024)
    assert activation_bytes(pair, Parallelism()) - activation_bytes(with_flashinfer, Parallelism()) == 132 * 128_256 * 4


def test_first_start_compiles_with_a_second_embedding_table(make_pair: PairFactory) -> None:
    """The kernel behind the embedding is timed on tensors of its own: table, residual and normed states."""
    first = make_pair("BF16", None, max_num_batched_tokens=2048, compiles_anew=True)
    table = 128_256 // 2 * 8192 * 2
    assert activation_bytes(first, Parallelism(2)) == table + 2 * 2048 * 8192 * 2 + L2
    eager = replace(first, limits=replace(first.limits, enforce_eager=True))
    later = replace(first, limits=replace(first.limits, compiles_anew=False))
    assert activation_bytes(eager, Parallelism(2)) == activation_bytes(later, Parallelism(2)) < table
    # Many tokens need more than the table when they run.
    many = [make_pair("BF16", None, max_num_batched_tokens=32_768, compiles_anew=anew) for anew in (True, False)]
    assert len({activation_bytes(each, Parallelism(2)) for each in many}) == 1


def test_eagle3_compilation_adds_to_held_target_states(alone: PairFactory) -> None:
    """Public logs of vLLM 0.24 on A100, with 2048 and 8192 tokens, have 10 states of a step more than the table."""
    head = find_geometry("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3")
    assert head is not None
    limits = {"engine_version": "0.24.0", "max_num_seqs": 256, "max_num_batched_tokens": 2048, "compiles_anew": True}
    target = alone("meta-llama/Llama-3.1-8B-Instruct", **limits)
    pair = replace(target, draft=head, draft_precision=Precision.BF16, method="eagle3", num_speculative_tokens=5)
    # Of the kernel: the states that it reads, two side by side, and their clone. Held: states of four layers.
    assert activation_bytes(pair, Parallelism()) == 128_256 * 4096 * 2 + L2 + (5 + 4) * 2048 * 4096 * 2


def test_compilation_adds_nothing_for_multimodal_models(alone: PairFactory) -> None:
    anew, later = (alone("google/gemma-3-4b-it", compiles_anew=each, max_num_seqs=8) for each in (True, False))
    assert activation_bytes(anew, Parallelism()) == activation_bytes(later, Parallelism())


def test_v1_profiles_one_draft_token_per_request(make_pair: PairFactory) -> None:
    limits = {"engine_version": V1, "max_num_seqs": 1024}
    with_draft = activation_bytes(make_pair(**limits), Parallelism(2))
    without = activation_bytes(make_pair("BF16", None, **limits), Parallelism(2))
    assert with_draft - without == 1024 * 128_256 * (30 - 14)


def test_verification_bytes_beyond_the_profiling_run(make_pair: PairFactory) -> None:
    assert verification_bytes(make_pair("BF16", None), 2) == 0
    v2 = verification_bytes(make_pair(), 2)
    assert v2 == 256 * 6 * 128_256 * 2 * 5 // 2 + 256 * 6 * 128_256 * 4
    assert verification_bytes(make_pair(), 1) == 256 * 6 * 128_256 * (2 + 2 + 4), "nothing to gather"
    full_step = make_pair(max_num_seqs=2048)
    assert verification_bytes(full_step, 1) == 8192 * 128_256 * (2 + 2) + GIB, "as many rows as a step has tokens"
    one, five = (
        verification_bytes(replace(make_pair(engine_version=V1), num_speculative_tokens=tokens), 2) for tokens in (1, 5)
    )
    assert one == 0, "the profiling run of V1 verified as much"
    assert five == 256 * 128_256 * 4 * (2 + 4 + 4 + 4)


def test_entropy_check_adds_a_float32_copy_on_v2(make_pair: PairFactory) -> None:
    checking = replace(make_pair(), checks_by_entropy=True)
    assert verification_bytes(checking, 2) - verification_bytes(make_pair(), 2) == 256 * 6 * 128_256 * 4
    full_step = make_pair(max_num_seqs=2048)
    more = verification_bytes(replace(full_step, checks_by_entropy=True), 1) - verification_bytes(full_step, 1)
    assert more == GIB, "a piece is no larger"
    on_v1 = make_pair(engine_version=V1)
    assert verification_bytes(replace(on_v1, checks_by_entropy=True), 2) == verification_bytes(on_v1, 2)


def test_sampling_draft_probabilities_on_v1(make_pair: PairFactory) -> None:
    """256 requests x 5 tokens x 128,256 in float32: kept while the next step runs, and gathered when it is verified.

    The profiling run has one of them a request. V2 keeps logits instead, which are state.
    """
    greedy = make_pair(engine_version="0.30.0")
    assert greedy.era.runner is Runner.V1
    sampling = replace(greedy, samples_drafts=True)
    all_rows, one_a_request = 256 * 5 * 128_256 * 4, 256 * 128_256 * 4
    more = verification_bytes(sampling, 2) - verification_bytes(greedy, 2)
    assert more == 2 * all_rows - one_a_request
    assert 1.1 * GIB < more < 1.2 * GIB
    profiled = profiled_sampling_bytes(sampling, 2) - profiled_sampling_bytes(greedy, 2)
    assert profiled == one_a_request
    one = replace(sampling, num_speculative_tokens=1)
    assert verification_bytes(one, 2) == one_a_request, "profiled but for what outlives the step"
    on_v2 = make_pair(engine_version="0.32.0")
    assert verification_bytes(replace(on_v2, samples_drafts=True), 2) == verification_bytes(on_v2, 2)
    alone = make_pair("BF16", None, engine_version="0.30.0")
    assert profiled_sampling_bytes(replace(alone, samples_drafts=True), 2) == profiled_sampling_bytes(alone, 2)


def test_sampling_draft_on_v1_can_exceed_the_slack(make_pair: PairFactory) -> None:
    greedy = make_pair("FP8", engine_version="0.30.0", memory_utilization_percent=96)
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    assert estimate(greedy, device, 2).binding_term is None
    assert estimate(replace(greedy, samples_drafts=True), device, 2).binding_term is Term.SLACK


@pytest.mark.parametrize(
    ("version", "in_kernel"), [("0.19.0", False), ("0.20.0", True), ("0.22.0", True), ("0.23.0", False)]
)
def test_expert_workspace_is_kept_or_freed_by_version(alone: PairFactory, version: str, *, in_kernel: bool) -> None:
    """Qwen3-30B-A3B: rows of hidden state in and out for eight experts a token. In FP8 they always stay."""
    workspace = 8192 * 8 * (2048 + 2048) * 2
    output = 8192 * 2048 * 2
    for requests, saved in ((8, -output), (4096, workspace - output)):
        # Where sampling decides, what the kernel took is free again; where the pass does, only its output is kept.
        bf16, fp8 = (
            activation_bytes(
                alone("Qwen/Qwen3-30B-A3B", precision, engine_version=version, max_num_seqs=requests), Parallelism()
            )
            for precision in ("BF16", "FP8")
        )
        assert fp8 - bf16 == (saved if in_kernel else 0)
        assert fp8 > workspace


def test_static_per_tensor_fp8_frees_the_expert_workspace(alone: PairFactory) -> None:
    pair = alone("mistralai/Mixtral-8x7B-Instruct-v0.1", "FP8", engine_version=V1, max_num_seqs=8192)
    static = WeightFormat(Precision.FP8, Scales.TENSOR, method=QuantizationMethod.FP8, static_inputs=True)
    kept, free_again = (
        activation_bytes(replace(pair, target=replace(pair.target, checkpoint=stored)), Parallelism())
        for stored in (replace(static, static_inputs=False), static)
    )
    assert kept - free_again == 8192 * 2 * (14_336 + 28_672) * 2 - 8192 * 4096 * 2


def test_gpt_oss_kernels_keep_no_workspace(alone: PairFactory) -> None:
    """A log of vLLM 0.19 with 1024 requests has 2.87 GiB: the logits alone. With few requests their scratch decides."""
    many = alone("openai/gpt-oss-20b", "MXFP4", engine_version=V1, max_num_seqs=1024)
    assert activation_bytes(many, Parallelism()) / GIB == pytest.approx(2.87, abs=0.005)
    few = alone("openai/gpt-oss-20b", "MXFP4", **FEW)
    scratch = 8192 * 4 * (2880 + 5760) * 2
    assert activation_bytes(few, Parallelism()) == CUBLAS + scratch + 8192 * (64 * 64 + 3 * 2880) * 2 + L2


def test_expert_peak_on_several_ranks(alone: PairFactory) -> None:
    """Split over ranks an expert is narrower; whole ones are not; data-parallel ranks compute all ranks' tokens."""
    model = "mistralai/Mixtral-8x7B-Instruct-v0.1"
    pair = alone(model, engine_version=V1)
    split, whole = Parallelism(2), Parallelism(2, expert=True)
    rows = {split: 7168 + 14_336, whole: 14_336 + 28_672}
    difference = activation_bytes(pair, whole) - activation_bytes(pair, split)
    assert difference == 8192 * 2 * (rows[whole] - rows[split]) * 2
    assert activation_bytes(pair, Parallelism(1, data=2)) > activation_bytes(pair, Parallelism(2))


def test_latent_attention_context_chunk_of_deepseek_v3(alone: PairFactory) -> None:
    """DeepSeek-V3 at tensor 8: 64 Ki tokens x 16 heads x 256 wide, half a GiB; eight of them at tensor 1."""
    pair = alone("deepseek-ai/DeepSeek-V3", "FP8", engine_version="0.32.0", max_model_len=65_536)
    short = alone("deepseek-ai/DeepSeek-V3", "FP8", max_model_len=512, max_num_seqs=16)
    chunk = 64 * 1024 * 128 * 256 * 2
    assert chunk == 4 * GIB
    assert activation_bytes(pair, Parallelism()) - activation_bytes(short, Parallelism()) > chunk // 2
    assert activation_bytes(pair, Parallelism(8)) < activation_bytes(pair, Parallelism()) - chunk // 2


def test_image_encoder_is_in_the_profile_since_0_27(alone: PairFactory) -> None:
    """Gemma 3: 32 images of 256 tokens fill a step; the encoder's rows decide where few requests are sampled."""
    pair = alone("google/gemma-3-27b-it", max_num_seqs=64)
    assert encoder_items(pair) == 32
    patches = 32 * 4096
    pixels = 32 * 3 * 896**2 * 2
    encoding = patches * (2 * 1152 + 2 * 4304) * 2 + pixels
    assert activation_bytes(pair, Parallelism()) == encoding
    unprofiled = replace(pair, limits=replace(pair.limits, engine_version="0.25.0"))
    assert unprofiled.era.runner is Runner.V2
    assert activation_bytes(unprofiled, Parallelism()) < encoding, "no encoder ran in V2's profile before 0.27"


@pytest.mark.parametrize(("length", "requests", "images"), [(512, 3, 6), (767, 3, 6), (128, 3, 3), (8192, 1, 32)])
def test_profiled_images_are_capped_by_requests_and_length(
    alone: PairFactory, length: int, requests: int, images: int
) -> None:
    assert encoder_items(alone("google/gemma-3-27b-it", max_model_len=length, max_num_seqs=requests)) == images


def test_last_pipeline_stage_has_the_highest_peak(make_pair: PairFactory) -> None:
    for version in (V1, "0.32.0"):
        pair = make_pair("FP8", engine_version=version, max_num_seqs=8192)
        first, middle, _, last = (activation_bytes(pair, Parallelism(1, 4), stage) for stage in stages(pair.target, 4))
        assert first <= middle < last
    v1 = make_pair("FP8", None, engine_version=V1, max_num_seqs=8)
    first, middle, _, _ = (activation_bytes(v1, Parallelism(1, 4), stage) for stage in stages(v1.target, 4))
    assert middle - first == 2 * HIDDEN_STATES_70B, "hidden states and residual of the stage before"


# The peak of a forward pass, tensor by tensor: what stands around attention, beside rows, and in workspaces.

HIDDEN, TOKENS = 1000, 8192
TWO = Parallelism(2)
AROUND_ATTENTION: dict[str, tuple[SingleMixer, Parallelism, int]] = {
    "queries, keys, values, output": (SelfAttention(64, 8, 128), TWO, 32 * 128 + 4 * (128 + 128) + 32 * 128),
    "copies of keys and values": (SelfAttention(64, 4, 128), Parallelism(8), 8 * 128 + (128 + 128) + 8 * 128),
    "a gate as wide as the queries": (
        SelfAttention(64, 8, 128, gated=True),
        TWO,
        2 * 32 * 128 + 4 * (128 + 128) + 32 * 128,
    ),
    "narrow values": (SelfAttention(64, 8, 192, value_head_dim=128), TWO, 32 * 192 + 4 * (192 + 128) + 32 * 128),
    "a linear state": (
        DeltaNet(16, 32, 128, 128, 4),
        TWO,
        (2 * 16 * 128 + 2 * 32 * 128) // 2 + 2 * 32 * 128 // 2,
    ),
    "a state of Mamba 2": (
        StateSpace(128, 64, 8, 128, 4),
        TWO,
        (2 * 8192 + 128) // 2 + 2 * 4 * 128 + 8192 // 2 + 2 * (8192 + 2 * 8 * 128) // 2,
    ),
    "a state of Mamba 1": (SelectiveScan(8192, 16, 160, 4), TWO, 2 * 8192 // 2 + 2 * 8192 // 2),
}


def with_layer(model: ModelGeometry, layer: Layer) -> tuple[ModelGeometry, Stage]:
    """Return the model as one layer, and its one stage."""
    return replace(model, hidden_size=HIDDEN, layers=(layer,)), Stage((layer,), is_first=True, is_last=True)


def peak(pair: Pair, layer: Layer, split: Parallelism, precision: Precision = Precision.BF16) -> int:
    model, stage = with_layer(pair.target, layer)
    return forward_bytes(pair, model, stage, precision, split)


@pytest.mark.parametrize(("mixer", "split", "width"), AROUND_ATTENTION.values(), ids=AROUND_ATTENTION)
def test_peak_around_each_attention_kind(
    make_pair: PairFactory, mixer: SingleMixer, split: Parallelism, width: int
) -> None:
    assert peak(make_pair(), Layer(mixer, None), split) == TOKENS * (HIDDEN + width) * 2


@pytest.mark.parametrize(
    ("changes", "context"),
    [({"max_model_len": 2048}, 8 * 2048), ({"max_model_len": 1024}, 4 * 256 * 16), ({"max_model_len": 9000}, 65536)],
    ids=["eight full requests", "four blocks a request", "64 Ki tokens at most"],
)
def test_latent_attention_context_chunk_length(make_pair: PairFactory, changes: dict[str, int], context: int) -> None:
    latent = LatentAttention(128, 1536, 512, 128, 64, 96)
    around = HIDDEN + 64 * (128 + 64) + 512 + 64 + 64 * 96
    expected = (TOKENS * around + context * 64 * (128 + 96)) * 2
    assert peak(make_pair(**changes), Layer(latent, None), TWO) == expected


SMALL = SelfAttention(2, 2, 8)
RETURNED = 8
FEED_FORWARD = {
    "gated": (DenseMlp(9000), Precision.BF16, (2 * HIDDEN + 3 * 4500 + RETURNED) * 2),
    "not gated": (DenseMlp(9000, gated=False), Precision.BF16, (2 * HIDDEN + 2 * 4500 + RETURNED) * 2),
    "inputs in eight bits": (DenseMlp(9000), Precision.INT8, (2 * HIDDEN + 3 * 4500 + RETURNED) * 2 + HIDDEN + 4500),
    "experts": (
        Experts(8, 2, 3000, shared_intermediate_size=5000),
        Precision.BF16,
        (3 * HIDDEN + 3 * 2500 + RETURNED) * 2,
    ),
    "experts without gates": (
        Experts(8, 2, 3000, shared_intermediate_size=5000, gated=False),
        Precision.BF16,
        (3 * HIDDEN + 2 * 2500 + RETURNED) * 2,
    ),
    "inputs of experts in eight bits": (
        Experts(8, 2, 3000),
        Precision.INT8,
        (3 * HIDDEN + RETURNED) * 2 + HIDDEN + 2 * 1500,
    ),
    "inputs of shared experts in eight bits": (
        Experts(8, 2, 3000, shared_intermediate_size=9000),
        Precision.INT8,
        (3 * HIDDEN + 3 * 4500 + RETURNED) * 2 + HIDDEN + 4500,
    ),
}


@pytest.mark.parametrize(("feed_forward", "precision", "row"), FEED_FORWARD.values(), ids=FEED_FORWARD)
def test_peak_of_each_feed_forward_kind(
    make_pair: PairFactory, feed_forward: DenseMlp | Experts, precision: Precision, row: int
) -> None:
    older = make_pair("BF16", None, engine_version="0.19.0", enforce_eager=True)
    assert peak(older, Layer(SMALL, feed_forward), TWO, precision) == TOKENS * row


def test_widest_layer_decides_the_peak(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, engine_version="0.19.0", enforce_eager=True)
    layers = (Layer(SMALL, DenseMlp(9000)), Layer(SMALL, None), Layer(SMALL, DenseMlp(2000)))
    stage = Stage(layers, is_first=True, is_last=True)
    model = replace(pair.target, hidden_size=HIDDEN, layers=layers)
    row = (2 * HIDDEN + 3 * 4500 + RETURNED) * 2
    assert forward_bytes(pair, model, stage, Precision.BF16, TWO) == TOKENS * row


WORKSPACES = {
    "split over ranks": (Experts(8, 2, 3000), TWO, 2 * (1500 + 3000)),
    "whole": (Experts(8, 2, 3000), Parallelism(2, expert=True), 2 * (3000 + 6000)),
    "narrower than the hidden state": (Experts(8, 2, 600), TWO, 2 * (HIDDEN + HIDDEN)),
    "without gates": (Experts(8, 2, 3000, gated=False), TWO, 2 * (1500 + 1500)),
    "of a compressed hidden state": (Experts(8, 2, 600, latent_size=400), TWO, 2 * (400 + 600)),
    "tokens of all copies": (Experts(8, 2, 6000), Parallelism(2, data=2), 2 * 2 * (1500 + 3000)),
}


@pytest.mark.parametrize(("experts", "split", "row"), WORKSPACES.values(), ids=WORKSPACES)
def test_expert_workspace_bytes_per_split(
    llama_8b: ModelGeometry, experts: Experts, split: Parallelism, row: int
) -> None:
    model, stage = with_layer(llama_8b, Layer(SMALL, experts))
    assert expert_workspace_bytes(model, stage, Precision.BF16, 100, split) == 100 * row * 2
    dense, its_stage = with_layer(llama_8b, Layer(SMALL, DenseMlp(9000)))
    assert expert_workspace_bytes(dense, its_stage, Precision.BF16, 100, split) == 0


# What proposing takes in the profiling run of model runner V2: logits of all proposed places at once for block heads.

T, H, V, K = 8192, 4096, 151_936, 7
ONE_GPU = Parallelism()
HEADS = "sgl-project/SpecForge:configs/qwen3-8b-"


def catalogued(name: str) -> ModelGeometry:
    geometry = find_geometry(name)
    assert geometry is not None
    return geometry


def qwen(limits: EngineLimits, method: str, tokens: int = K, **limited: object) -> Pair:
    """Qwen3-8B with the published head of a method; with DSpark that of DFlash, whose layers it has."""
    limits = replace(limits, **{"max_num_seqs": 512, "engine_version": "0.33.0"} | limited)
    draft = catalogued(f"{HEADS}{method.replace('dspark', 'dflash')}.json")
    return Pair(catalogued("Qwen/Qwen3-8B"), Precision.BF16, draft, Precision.BF16, method, tokens, limits)


def with_vocabulary(pair: Pair, rows: int) -> Pair:
    assert pair.draft is not None
    assert pair.draft.head is not None
    return replace(pair, draft=replace(pair.draft, head=replace(pair.draft.head, output_rows=rows)))


def proposing(pair: Pair, tensor: int = 1) -> int:
    draft = loaded_draft(pair)
    assert draft is not None
    return proposing_bytes(pair, draft[0], tensor)


def test_dflash_peak_has_logits_of_all_draft_tokens(limits: EngineLimits) -> None:
    """2.2 GiB of them with 512 requests and 15 tokens, beside all states that the target returned."""
    pair = qwen(limits, "dflash", 15)
    assert pair.draft is not None
    assert pair.draft.head is not None
    returned = T * H * 2 * (1 + pair.draft.head.auxiliary_states)
    assert activation_bytes(pair, ONE_GPU) == returned + (512 * 16 + 512 * 15) * H * 2 + 512 * 15 * V * 2


def test_dflash_logits_are_gathered_over_several_gpus(limits: EngineLimits) -> None:
    pair = qwen(limits, "dflash")
    assert proposing(pair, 4) - proposing(pair) == 512 * K * V * 2 * 5 // 4


def test_own_draft_vocabulary_adds_target_sized_logits(limits: EngineLimits) -> None:
    rows = 512 * K
    states = (512 * (K + 1) + rows) * H * 2
    assert proposing(with_vocabulary(qwen(limits, "dflash"), 32_000)) == states + rows * (32_000 + V) * 2


def test_draft_vocabulary_is_padded_as_in_vllm(limits: EngineLimits) -> None:
    pair = qwen(limits, "dflash")
    assert proposing(with_vocabulary(pair, 32_001)) == proposing(with_vocabulary(pair, 32_064))


def test_block_states_are_capped_at_the_step_tokens_up_to_0_30(limits: EngineLimits) -> None:
    """Up to 0.30 nothing makes room for each block."""
    pair = qwen(limits, "dflash", engine_version="0.30.0", max_num_batched_tokens=2048)
    assert proposing(pair) == (2048 + 512 * K) * H * 2 + 512 * K * V * 2


def test_dspark_proposing_adds_logits_of_three_positions(limits: EngineLimits) -> None:
    rows = 512 * K
    assert proposing(qwen(limits, "dspark")) == (rows + rows) * H * 2 + (rows + 3 * 512) * V * 2


def test_sampling_dspark_keeps_one_position_of_target_logits(limits: EngineLimits) -> None:
    pair = replace(qwen(limits, "dspark"), samples_drafts=True)
    assert state_bytes(with_vocabulary(pair, 32_000), ONE_GPU) - state_bytes(pair, ONE_GPU) == 512 * V * 2


def test_eagle3_and_draft_models_propose_one_token_at_a_time(limits: EngineLimits) -> None:
    """EAGLE-3 returns two tensors beside the states that it joined."""
    pair = with_vocabulary(qwen(limits, "eagle3"), 32_000)
    assert proposing(pair) == (3 * T + 512) * H * 2 + 512 * (32_000 + V) * 2
    model = replace(pair, method="draft_model", draft=catalogued("Qwen/Qwen3-0.6B"))
    assert proposing(model) == (T + 512) * 1024 * 2 + 512 * V * 2


def test_auxiliary_states_are_joined_beside_the_originals(limits: EngineLimits) -> None:
    """Where the layers are so divided, and the requests so few, that nothing else takes as much."""
    pair = qwen(limits, "dflash", max_num_seqs=16)
    assert pair.draft is not None
    assert pair.draft.head is not None
    states = pair.draft.head.auxiliary_states
    assert activation_bytes(pair, Parallelism(8)) == T * H * 2 * (1 + states + states + 1)
    older = replace(pair, limits=replace(pair.limits, engine_version="0.23.0"))
    assert activation_bytes(older, Parallelism(8)) < activation_bytes(pair, Parallelism(8))


@pytest.mark.parametrize(
    ("version", "method", "requests"),
    [("0.30.0", "dflash", 512), ("0.31.0", "dflash", 256), ("0.31.0", "dspark", 292), ("0.31.0", "eagle3", 512)],
)
def test_profiled_requests_leave_room_for_blocks_since_0_31(
    limits: EngineLimits, version: str, method: str, requests: int
) -> None:
    pair = qwen(limits, method, engine_version=version, max_num_batched_tokens=2048)
    assert profiled_requests(pair) == requests
    assert profiled_sampling_bytes(pair, 1) == (2048 + requests) * H * 2 + requests * V * 2


def test_v1_dflash_peak_does_not_depend_on_draft_tokens(limits: EngineLimits) -> None:
    pair = qwen(limits, "dflash", 15, engine_version="0.23.0", max_num_batched_tokens=2048)
    assert profiled_requests(pair) == 512
    assert activation_bytes(pair, ONE_GPU) == activation_bytes(replace(pair, num_speculative_tokens=1), ONE_GPU)


# What Triton's latent attention reserves on Ampere is counted; elsewhere other kernels serve.

A100, H200, LATENT, TRITON = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H200", "deepseek-ai/DeepSeek-V2-Lite", "TRITON_MLA"


def alone_latent_parts(make_pair: PairFactory, model: str = LATENT, **limits: Any) -> Pair:
    geometry = find_geometry(model)
    assert geometry is not None
    settings = {
        "max_model_len": 32_768,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "engine_version": "0.33.0",
    }
    return replace(make_pair("BF16", None, **settings | limits), target=geometry)


def on(pair: Pair, product: str, tensor: int = 1) -> Budget:
    device = find_device(product)
    assert device is not None
    return estimate(pair, device, tensor)


@pytest.mark.parametrize(
    ("length", "tensor", "tokens", "gib"),
    [
        # 256 requests, 64 parts of the context, 16 heads, 513 numbers of 4 bytes
        (32_768, 1, 0, 256 * 64 * 16 * 513 * 4 / GIB),
        (32_768, 1, 3, 4 * 256 * 64 * 16 * 513 * 4 / GIB),
        (32_768, 2, 3, 4 * 256 * 64 * 8 * 513 * 4 / GIB),
        (131_072, 1, 0, 256 * 216 * 16 * 513 * 4 / GIB),
    ],
    ids=["alone", "with drafts", "on two GPUs", "no more parts than the GPU has room for"],
)
def test_triton_mla_workspace_on_ampere(
    make_pair: PairFactory, length: int, tensor: int, tokens: int, gib: float
) -> None:
    pair = replace(alone_latent_parts(make_pair, max_model_len=length), num_speculative_tokens=tokens)
    assert latent_parts_bytes(on_product(pair, A100), tensor) / GIB == gib


def test_triton_mla_shares_the_expert_workspace_since_0_33(make_pair: PairFactory) -> None:
    """0.5 GiB in place of the 0.26 GiB that 2048 tokens at 6 experts take: it is one workspace."""
    pair = alone_latent_parts(make_pair)
    with_triton = on(pair, A100).activation_bytes - on(replace_backend(pair, "FLASHMLA"), A100).activation_bytes
    experts = 2048 * 6 * (2 * 1408 + 2048) * 2
    assert with_triton == 256 * 64 * 16 * 513 * 4 - experts
    many = alone_latent_parts(make_pair, max_num_batched_tokens=16_384)
    assert on(many, A100).activation_bytes == on(replace_backend(many, "FLASHMLA"), A100).activation_bytes


def test_triton_mla_workspace_uses_the_slack_before_0_33(make_pair: PairFactory) -> None:
    """So that the KV cache has as much, and less is free outside the budget."""
    pair = alone_latent_parts(make_pair, engine_version="0.32.0")
    triton, other = on(pair, A100), on(replace_backend(pair, "FLASHMLA"), A100)
    assert triton.available_kv_bytes == other.available_kv_bytes
    assert other.slack_bytes - triton.slack_bytes == 256 * 64 * 16 * 513 * 4 - 2048 * 6 * (2 * 1408 + 2048) * 2


def test_hopper_and_dense_attention_have_no_triton_mla_workspace(make_pair: PairFactory) -> None:
    latent, dense = alone_latent_parts(make_pair), alone_latent_parts(make_pair, "Qwen/Qwen3-8B")
    assert on_product(latent, H200) is latent
    assert on_product(dense, A100) is dense
    assert latent_parts_bytes(latent, 1) == 0


def test_explicit_triton_mla_has_the_workspace_on_hopper(make_pair: PairFactory) -> None:
    asked = replace_backend(alone_latent_parts(make_pair), TRITON)
    assert on_product(asked, H200) is asked
    assert latent_parts_bytes(asked, 1) == latent_parts_bytes(on_product(alone_latent_parts(make_pair), A100), 1) > 0


def replace_backend(pair: Pair, backend: str) -> Pair:
    return replace(pair, limits=replace(pair.limits, attention_backend=backend))
