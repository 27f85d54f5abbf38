"""Verifying only as many drafted tokens as pay: what the target's layers and the GPU's kernels make of it."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.kernel_support import adaptive_doubt, adaptive_problem
from specdecode_operator.sizing.pair import Pair
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.plan import plan_on_gpus
from tests.support.objects import STATES_CONFIG
from tests.unit.sizing.conftest import PairFactory

H100, A100 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB"


def adapting(pair: Pair, model: str | None = None, version: str = "0.33.0", backend: str | None = None) -> Pair:
    target = pair.target if model is None else find_geometry(model)
    assert target is not None, model
    limits = replace(pair.limits, engine_version=version, attention_backend=backend)
    return replace(pair, target=target, limits=limits, adaptive_verification=True)


def message(pair: Pair, product: str = H100) -> str:
    problem = adaptive_problem(product, pair)
    return "" if problem is None else f"{problem.field}: {problem.message}"


def test_dense_attention_goes_with_it_on_hopper_and_takes_another_kernel_on_ampere(make_pair: PairFactory) -> None:
    pair = make_pair()
    assert message(adapting(pair)) == ""
    on_ampere = message(adapting(pair), A100)
    assert on_ampere.startswith("speculation.adaptiveVerification: on NVIDIA-A100-SXM4-80GB vLLM 0.33.0 chooses")
    assert "add --attention-backend TRITON_ATTN to engine.extraArgs" in on_ampere
    assert message(adapting(pair, backend="TRITON_ATTN"), A100) == ""
    assert message(adapting(pair, "openai/gpt-oss-20b"), A100) == "", "vLLM chooses Triton for sinks"
    assert message(replace(adapting(pair), adaptive_verification=False), A100) == ""
    assert message(adapting(pair), "48GiB") == "", "a GPU of which nothing is known"


def test_a_backend_that_takes_whole_drafts_is_refused_by_its_own_field(make_pair: PairFactory) -> None:
    said = message(adapting(make_pair(), backend="FLASHINFER"))
    assert said.startswith("engine.extraArgs: with speculation.adaptiveVerification vLLM 0.33.0 refuses")
    assert "FLASH_ATTN, " in said
    assert "FLASH_ATTN," not in message(adapting(make_pair(), backend="FLASH_ATTN"), A100)


@pytest.mark.parametrize("product", [H100, A100])
def test_latent_attention_has_no_such_kernel(make_pair: PairFactory, product: str) -> None:
    assert "has no kernel on" in message(adapting(make_pair(), "deepseek-ai/DeepSeek-V3"), product)


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("nvidia/Nemotron-H-56B-Base-8K", "0.33.0"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", None),
    ],
)
def test_states_are_planned_for_whole_drafts_but_of_mamba_2_since_0_33(
    make_pair: PairFactory, model: str, first: str | None
) -> None:
    assert "plans the states of" in message(adapting(make_pair(), model, "0.32.0"))
    assert (message(adapting(make_pair(), model, "0.33.0")) == "") == (first == "0.33.0")


@pytest.mark.parametrize("architecture", ["Qwen3XPressModel", "DFlashQwen3XPressModel"])
def test_heads_that_nobody_asks_how_sure_they_are_are_refused(make_pair: PairFactory, architecture: str) -> None:
    pair = adapting(make_pair())
    assert pair.draft is not None
    refined = replace(pair, method="dflash", draft=replace(pair.draft, architecture=architecture))
    assert "does not ask" in message(refined)


def test_a_target_without_attention_needs_no_kernel_for_it(make_pair: PairFactory) -> None:
    pair = replace(make_pair(), target=geometry_from_config("states", STATES_CONFIG))
    assert message(adapting(pair), A100) == ""


def test_versions_before_it_do_not_have_it(make_pair: PairFactory) -> None:
    assert "is of vLLM 0.28 and later" in message(adapting(make_pair(), version="0.20.0"))


def test_a_plan_leaves_out_the_gpus_without_and_says_why_where_none_is_left(make_pair: PairFactory) -> None:
    pair = adapting(make_pair())
    assert plan_on_gpus(pair, [GpuPool(A100, 8), GpuPool(H100, 8)], None).chosen.product == H100
    with pytest.raises(PlanError, match="add --attention-backend TRITON_ATTN"):
        plan_on_gpus(pair, [GpuPool(A100, 8)], None)


def test_where_the_kernels_were_not_read_the_plan_says_so(make_pair: PairFactory) -> None:
    pair = adapting(make_pair())
    assert adaptive_doubt(H100, pair) is None
    assert "NVIDIA-B200 was not read" in str(adaptive_doubt("NVIDIA-B200", pair))
    assert adaptive_doubt("NVIDIA-B200", make_pair()) is None
