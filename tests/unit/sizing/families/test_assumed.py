"""Models whose sizes a user assumes."""

import pytest

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.assumed import Assumption, assumed_geometry, usual_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.kv_cache import cached_layers
from specdecode_operator.sizing.memory.kv_pages import CacheKind
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import weight_bytes
from tests.unit.sizing.families.test_estimated import GIB, NEW, budget_of

KNOWN = "meta-llama/Llama-3.1-8B-Instruct"
HYBRID = NEW | {"layer_types": ["linear_attention", "full_attention"] * 16}


def kept(model: ModelGeometry, tensor: int = 1) -> dict[CacheKind, int]:
    """Bytes of a token, and of a request's states, in all layers."""
    (runs,) = cached_layers(model, None, tensor, 1, None)
    sizes: dict[CacheKind, int] = {}
    for run in runs:
        size = run.layer.state_bytes if run.layer.kind is CacheKind.STATE else run.layer.token_bytes
        sizes[run.layer.kind] = sizes.get(run.layer.kind, 0) + run.count * size
    return sizes


def test_assumed_sizes_override_those_of_the_config() -> None:
    new = geometry_from_config("new", HYBRID)
    model = assumed_geometry(new, Assumption(20 * GIB, 32_000, 48 * 2**20))
    assert model.knowledge is Knowledge.ASSUMED
    assert weight_bytes(model, Precision.BF16, Split(1)) == pytest.approx(20 * GIB, rel=1e-4)
    assert kept(model) == {CacheKind.FULL: 32_000, CacheKind.STATE: 48 * 2**20}
    assert kept(model, 2) == {CacheKind.FULL: 16_000, CacheKind.STATE: 24 * 2**20}
    weights_alone = assumed_geometry(new, Assumption(20 * GIB))
    assert kept(weights_alone) == kept(new)


def test_estimation_margin_excludes_assumed_numbers() -> None:
    budget = budget_of(assumed_geometry(geometry_from_config("new", NEW), Assumption(20 * GIB, 131_072)))
    assert budget.estimated_margin_bytes == pytest.approx(budget.activation_bytes / 4, abs=1)


def test_assumptions_do_not_change_a_known_model() -> None:
    known = find_geometry(KNOWN)
    assert known is not None
    assert assumed_geometry(known, Assumption(1, 1, 1)) is known


@pytest.mark.parametrize(("weights_gib", "state"), [(1, None), (16, None), (140, 64 * 2**20), (600, None)])
def test_model_without_a_config_has_the_assumed_sizes(weights_gib: int, state: int | None) -> None:
    given = Assumption(weights_gib * GIB, 65_536, state)
    usual = geometry_from_config("new", usual_config(given))
    model = assumed_geometry(usual, given)
    at_most = max(weights_gib * GIB, 2 * GIB)
    assert weights_gib * GIB * 0.999 <= weight_bytes(model, Precision.BF16, Split(1)) <= at_most * 1.001
    assert kept(model)[CacheKind.FULL] == pytest.approx(65_536, abs=32)
    assert kept(model).get(CacheKind.STATE, 0) == pytest.approx(state or 0, rel=1e-3)


def test_head_without_a_config_has_the_shape_of_its_target() -> None:
    target = find_geometry(KNOWN)
    given = Assumption(GIB, 4096)
    head = assumed_geometry(
        head_from_config("head", usual_config(given, target, is_head=True, is_draft=True), "eagle3"), given
    )
    assert target is not None
    assert (head.vocab_size, head.hidden_size, head.num_layers) == (target.vocab_size, target.hidden_size, 1)
    assert kept(head) == {CacheKind.FULL: 4096}


@pytest.mark.parametrize(
    ("weights_bytes", "width"),
    [(4 * GIB, 2048), (4 * GIB + 1, 4096), (32 * GIB, 4096), (256 * GIB, 8192), (256 * GIB + 1, 16_384)],
)
def test_hidden_size_follows_from_the_assumed_weights(weights_bytes: int, width: int) -> None:
    assert usual_config(Assumption(weights_bytes, 65_536))["hidden_size"] == width


def test_assumed_weights_are_at_least_the_embedding_tables() -> None:
    given = Assumption(GIB // 2, 65_536)
    model = assumed_geometry(geometry_from_config("new", usual_config(given)), given)
    assert weight_bytes(model, Precision.BF16, Split(1)) >= 262_144 * 2048 * 2


def test_assumed_state_of_a_head_is_refused() -> None:
    given = Assumption(GIB, 4096, 2**20)
    target = find_geometry(KNOWN)
    head = head_from_config("head", usual_config(given, target, is_head=True, is_draft=True), "eagle3")
    with pytest.raises(GeometryError) as caught:
        assumed_geometry(head, given)
    assert caught.value.field == "stateMiBPerRequest"


def test_target_without_a_config_has_the_shape_of_its_head() -> None:
    head = head_from_config("head", NEW | {"num_hidden_layers": 1, "target_hidden_size": 5120}, "eagle3")
    config = usual_config(Assumption(16 * GIB, 65_536), head)
    assert (config["hidden_size"], config["vocab_size"]) == (5120, head.vocab_size)


def test_assumed_state_without_state_layers_is_refused() -> None:
    with pytest.raises(GeometryError) as caught:
        assumed_geometry(geometry_from_config("new", NEW), Assumption(state_bytes_per_request=2**20))
    assert (caught.value.field, caught.value.value) == ("stateMiBPerRequest", 1)


def test_assumed_kv_bytes_without_attention_layers_are_refused() -> None:
    states = geometry_from_config("new", NEW | {"layer_types": ["mamba"] * 32})
    with pytest.raises(GeometryError) as caught:
        assumed_geometry(states, Assumption(kv_bytes_per_token=1))
    assert caught.value.field == "kvBytesPerToken"
