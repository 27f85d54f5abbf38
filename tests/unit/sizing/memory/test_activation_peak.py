"""The activation peak is the largest of encoding, target pass, draft pass and sampling; some tensors stay beside it.

Sums are written out tensor by tensor, as vLLM's source has them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.geometry import ModelGeometry, QuantizationMethod, Scales, WeightFormat
from specdecode_operator.sizing.memory.activation import (
    activation_bytes,
    encoder_items,
    profiled_sampling_bytes,
    verification_bytes,
)
from specdecode_operator.sizing.memory.budget import Pair, Parallelism, Term, estimate, slack_bytes
from specdecode_operator.sizing.rank_layers import stages
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


def test_the_forward_pass_of_the_target(make_pair: PairFactory) -> None:
    """V1 as logs show it. V2 as its rows alone, to which the one public run of it is nearer."""
    assert activation_bytes(make_pair("BF16", None, **FEW), Parallelism(2)) == CUBLAS + FORWARD_70B_TENSOR_2
    assert activation_bytes(make_pair(), Parallelism(2)) == ROWS_70B_TENSOR_2


def test_a_flush_of_the_cache_is_part_of_compiling(make_pair: PairFactory) -> None:
    compiled, eager = make_pair("BF16", None, **FEW), make_pair("BF16", None, **FEW, enforce_eager=True)
    assert activation_bytes(compiled, Parallelism(2)) - activation_bytes(eager, Parallelism(2)) == L2


def test_int8_copies_the_inputs_of_the_feed_forward_layer(make_pair: PairFactory) -> None:
    copies = 8192 * (28672 // 2 + 8192)
    pairs = (make_pair(precision, None, **FEW) for precision in ("FP8", "INT8"))
    plain, int8 = (activation_bytes(pair, Parallelism(2)) for pair in pairs)
    assert int8 - plain == copies


def test_the_draft_runs_beside_the_hidden_states_of_the_target(
    make_pair: PairFactory, llama_70b: ModelGeometry
) -> None:
    as_large = replace(make_pair(), draft=llama_70b)
    assert activation_bytes(as_large, Parallelism(2)) == HIDDEN_STATES_70B + ROWS_70B_TENSOR_2
    older = replace(as_large, limits=replace(as_large.limits, **FEW))
    assert activation_bytes(older, Parallelism(2)) == CUBLAS + HIDDEN_STATES_70B + FORWARD_70B_TENSOR_2


def test_eagle3_holds_three_more_states_of_the_target(make_pair: PairFactory) -> None:
    head = find_geometry("sgl-project/SpecForge:configs/llama3-70B-ealge3.json")
    assert head is not None
    assert head.head is not None
    reading_none = replace(head, head=replace(head.head, auxiliary_states=0))
    pairs = (replace(make_pair(), method="eagle3", draft=draft) for draft in (head, reading_none))
    three, none = (activation_bytes(pair, Parallelism(2)) for pair in pairs)
    assert three - none == 3 * HIDDEN_STATES_70B


@pytest.mark.parametrize(("tensor", "copies_halved"), [(1, 2), (2, 5)])
def test_sampling_many_sequences(make_pair: PairFactory, tensor: int, copies_halved: int) -> None:
    """Logits of this rank, gathered from all, and their copy; alone there is nothing to gather."""
    requests = 8192
    logits = requests * 128_256 * 2
    pair = make_pair(max_num_seqs=requests, engine_version="0.32.0")
    rows = requests * 8192 * 2
    assert activation_bytes(pair, Parallelism(tensor)) == HIDDEN_STATES_70B + rows + logits * copies_halved // 2


def test_v2_samples_from_0_33_on_with_all_that_a_request_can_ask_for(make_pair: PairFactory) -> None:
    """The logits, and in float32 what they are copied to, masked, and their softmax."""
    requests = 8192
    pair = make_pair(max_num_seqs=requests, engine_version="0.33.0")
    sampling = 2 * requests * 8192 * 2 + requests * 128_256 * (2 + 3 * 4)
    assert activation_bytes(pair, Parallelism()) == sampling


def test_cublas_is_outside_the_budget_from_0_33_on(make_pair: PairFactory) -> None:
    """On V1, whose pass is counted with its workspace; it is free beside the budget instead."""
    head = replace(make_pair(), method="suffix", draft=None, num_speculative_tokens=3)
    older, newer = (
        replace(head, limits=replace(head.limits, engine_version=version)) for version in ("0.32.0", "0.33.0")
    )
    assert activation_bytes(older, Parallelism()) - activation_bytes(newer, Parallelism()) == CUBLAS
    free = [slack_bytes(pair, 80 * 2**30, 70 * 2**30, Parallelism()) for pair in (older, newer)]
    assert free[0] - free[1] == CUBLAS


def test_v2_copied_its_logits_at_first(alone: PairFactory, llama_8b: ModelGeometry) -> None:
    requests = 8192
    copied, in_place = (
        activation_bytes(alone(llama_8b, engine_version=version, max_num_seqs=requests), Parallelism())
        for version in ("0.25.0", "0.26.0")
    )
    assert copied - in_place == requests * 128_256 * 4


def test_the_pass_through_experts(alone: PairFactory) -> None:
    """Mixtral: attention's output, residual before and after, the experts' sum; the workspace stays beside it."""
    pair = alone("mistralai/Mixtral-8x7B-Instruct-v0.1", **FEW)
    row = 4096 + 3 * 4096
    workspace = 8192 * 2 * (14_336 + 28_672) * 2
    assert activation_bytes(pair, Parallelism()) == CUBLAS + workspace + 8192 * row * 2 + L2


def test_no_more_rows_are_sampled_than_a_step_has_tokens(make_pair: PairFactory) -> None:
    peaks = {activation_bytes(make_pair(max_num_seqs=requests), Parallelism(2)) for requests in (8192, 16_384)}
    assert len(peaks) == 1


def test_v1_filters_in_its_profile(alone: PairFactory, llama_8b: ModelGeometry) -> None:
    """vLLM 0.19: logits, float32 copy, softmax, noise, a row of Triton's for each multiprocessor."""
    pair = alone(llama_8b, engine_version=V1, max_num_seqs=1024)
    sampled = 1024 * 128_256 * (2 + 4 + 4 + 4) + 132 * 128_256 * 4
    states = (8192 + 2 * 1024) * 4096 * 2
    assert activation_bytes(pair, Parallelism()) == CUBLAS + states + sampled
    with_flashinfer = alone(llama_8b, engine_version="0.21.0", max_num_seqs=1024)
    assert activation_bytes(pair, Parallelism()) - activation_bytes(with_flashinfer, Parallelism()) == 132 * 128_256 * 4


def test_a_first_start_compiles_beside_a_second_embedding(make_pair: PairFactory) -> None:
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


def test_eagle_3_is_compiled_while_states_of_the_target_are_held(alone: PairFactory) -> None:
    """Public logs of vLLM 0.24 on A100, with 2048 and 8192 tokens, have 10 states of a step more than the table."""
    head = find_geometry("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3")
    assert head is not None
    limits = {"engine_version": "0.24.0", "max_num_seqs": 256, "max_num_batched_tokens": 2048, "compiles_anew": True}
    target = alone("meta-llama/Llama-3.1-8B-Instruct", **limits)
    pair = replace(target, draft=head, draft_precision=Precision.BF16, method="eagle3", num_speculative_tokens=5)
    # Of the kernel: the states that it reads, two side by side, and their clone. Held: states of four layers.
    assert activation_bytes(pair, Parallelism()) == 128_256 * 4096 * 2 + L2 + (5 + 4) * 2048 * 4096 * 2


def test_images_are_put_in_before_what_is_compiled(alone: PairFactory) -> None:
    anew, later = (alone("google/gemma-3-4b-it", compiles_anew=each, max_num_seqs=8) for each in (True, False))
    assert activation_bytes(anew, Parallelism()) == activation_bytes(later, Parallelism())


def test_v1_profiles_one_proposed_token_a_request(make_pair: PairFactory) -> None:
    limits = {"engine_version": V1, "max_num_seqs": 1024}
    with_draft = activation_bytes(make_pair(**limits), Parallelism(2))
    without = activation_bytes(make_pair("BF16", None, **limits), Parallelism(2))
    assert with_draft - without == 1024 * 128_256 * (30 - 14)


def test_verification_beyond_the_profile(make_pair: PairFactory) -> None:
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


def test_entropy_takes_a_copy_of_a_float32_piece_on_v2(make_pair: PairFactory) -> None:
    checking = replace(make_pair(), checks_by_entropy=True)
    assert verification_bytes(checking, 2) - verification_bytes(make_pair(), 2) == 256 * 6 * 128_256 * 4
    full_step = make_pair(max_num_seqs=2048)
    more = verification_bytes(replace(full_step, checks_by_entropy=True), 1) - verification_bytes(full_step, 1)
    assert more == GIB, "a piece is no larger"
    on_v1 = make_pair(engine_version=V1)
    assert verification_bytes(replace(on_v1, checks_by_entropy=True), 2) == verification_bytes(on_v1, 2)


def test_probabilities_of_a_draft_that_samples_on_v1(make_pair: PairFactory) -> None:
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


def test_a_draft_that_samples_on_v1_can_break_the_slack(make_pair: PairFactory) -> None:
    greedy = make_pair("FP8", engine_version="0.30.0", memory_utilization_percent=96)
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    assert estimate(greedy, device, 2).binding_term is None
    assert estimate(replace(greedy, samples_drafts=True), device, 2).binding_term is Term.SLACK


@pytest.mark.parametrize(
    ("version", "in_kernel"), [("0.19.0", False), ("0.20.0", True), ("0.22.0", True), ("0.23.0", False)]
)
def test_the_workspace_of_experts_stays_or_is_the_kernels(alone: PairFactory, version: str, *, in_kernel: bool) -> None:
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


def test_fp8_with_a_scale_for_each_tensor_runs_in_the_same_kernels(alone: PairFactory) -> None:
    pair = alone("mistralai/Mixtral-8x7B-Instruct-v0.1", "FP8", engine_version=V1, max_num_seqs=8192)
    static = WeightFormat(Precision.FP8, Scales.TENSOR, method=QuantizationMethod.FP8, static_inputs=True)
    kept, free_again = (
        activation_bytes(replace(pair, target=replace(pair.target, checkpoint=stored)), Parallelism())
        for stored in (replace(static, static_inputs=False), static)
    )
    assert kept - free_again == 8192 * 2 * (14_336 + 28_672) * 2 - 8192 * 4096 * 2


def test_the_kernels_of_gpt_oss_keep_nothing(alone: PairFactory) -> None:
    """A log of vLLM 0.19 with 1024 requests has 2.87 GiB: the logits alone. With few requests their scratch decides."""
    many = alone("openai/gpt-oss-20b", "MXFP4", engine_version=V1, max_num_seqs=1024)
    assert activation_bytes(many, Parallelism()) / GIB == pytest.approx(2.87, abs=0.005)
    few = alone("openai/gpt-oss-20b", "MXFP4", **FEW)
    scratch = 8192 * 4 * (2880 + 5760) * 2
    assert activation_bytes(few, Parallelism()) == CUBLAS + scratch + 8192 * (64 * 64 + 3 * 2880) * 2 + L2


def test_experts_on_several_ranks(alone: PairFactory) -> None:
    """Split over ranks an expert is narrower; whole ones are not; data-parallel ranks compute all ranks' tokens."""
    model = "mistralai/Mixtral-8x7B-Instruct-v0.1"
    pair = alone(model, engine_version=V1)
    split, whole = Parallelism(2), Parallelism(2, expert=True)
    rows = {split: 7168 + 14_336, whole: 14_336 + 28_672}
    difference = activation_bytes(pair, whole) - activation_bytes(pair, split)
    assert difference == 8192 * 2 * (rows[whole] - rows[split]) * 2
    assert activation_bytes(pair, Parallelism(1, data=2)) > activation_bytes(pair, Parallelism(2))


def test_latent_attention_sets_up_a_chunk_of_context(alone: PairFactory) -> None:
    """DeepSeek-V3 at tensor 8: 64 Ki tokens x 16 heads x 256 wide, half a GiB; eight of them at tensor 1."""
    pair = alone("deepseek-ai/DeepSeek-V3", "FP8", engine_version="0.32.0", max_model_len=65_536)
    short = alone("deepseek-ai/DeepSeek-V3", "FP8", max_model_len=512, max_num_seqs=16)
    chunk = 64 * 1024 * 128 * 256 * 2
    assert chunk == 4 * GIB
    assert activation_bytes(pair, Parallelism()) - activation_bytes(short, Parallelism()) > chunk // 2
    assert activation_bytes(pair, Parallelism(8)) < activation_bytes(pair, Parallelism()) - chunk // 2


def test_a_model_with_images_encodes_in_the_profile(alone: PairFactory) -> None:
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
def test_no_more_images_are_profiled_than_the_requests_of_a_step_can_hold(
    alone: PairFactory, length: int, requests: int, images: int
) -> None:
    assert encoder_items(alone("google/gemma-3-27b-it", max_model_len=length, max_num_seqs=requests)) == images


def test_stages_without_logits_need_no_more_than_the_last(make_pair: PairFactory) -> None:
    for version in (V1, "0.32.0"):
        pair = make_pair("FP8", engine_version=version, max_num_seqs=8192)
        first, middle, _, last = (activation_bytes(pair, Parallelism(1, 4), stage) for stage in stages(pair.target, 4))
        assert first <= middle < last
    v1 = make_pair("FP8", None, engine_version=V1, max_num_seqs=8)
    first, middle, _, _ = (activation_bytes(v1, Parallelism(1, 4), stage) for stage in stages(v1.target, 4))
    assert middle - first == 2 * HIDDEN_STATES_70B, "hidden states and residual of the stage before"
