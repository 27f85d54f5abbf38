"""Mistakes that other memory calculators for vLLM make: each has a test that fails if we make it too."""

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import UNCALIBRATED
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Pair, Verdict, estimate
from specdecode_operator.sizing.memory.kv_cache import cached_layers, kv_bytes_per_token
from specdecode_operator.sizing.pair import EngineLimits, Parallelism
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.version_rules import find_version_rules
from specdecode_operator.sizing.weights import parameter_count, weight_bytes
from tests.support.decisions import desired_state
from tests.support.objects import pair_70b, parent
from tests.support.small_models import GEMMA4
from tests.unit.sizing.conftest import PairFactory

H100 = "NVIDIA-H100-80GB-HBM3"
LATENT_BYTES = 2 * (512 + 64)


def catalogued(model_id: str) -> ModelGeometry:
    geometry = find_geometry(model_id)
    assert geometry is not None
    return geometry


def h100() -> Device:
    device = find_device(H100)
    assert device is not None
    return device


def alone(geometry: ModelGeometry, limits: EngineLimits) -> Pair:
    return Pair(geometry, geometry.checkpoint_precision or Precision.BF16, None, None, "none", 0, limits)


class TestDefect1ActivationOnceForATensorGroup:
    """llm-d-planner took the activation of a GPU from the sum of the group, so its error grew with TP."""

    @pytest.mark.parametrize("tensor", [1, 2, 4, 8])
    def test_what_is_not_split_is_there_on_every_gpu(self, make_pair: PairFactory, tensor: int) -> None:
        pair = make_pair("INT4", None)
        hidden_states = pair.limits.max_num_batched_tokens * 2 * pair.target.hidden_size * 2
        assert estimate(pair, h100(), tensor).activation_bytes >= hidden_states

    def test_libraries_take_as_much_of_every_gpu_however_many_there_are(self, make_pair: PairFactory) -> None:
        """The same peer counted 0.6 GiB outside torch at TP 2 and more, where logs show 2.1."""
        budgets = [estimate(make_pair("FP8", None), h100(), tensor) for tensor in (2, 4, 8)]
        assert min(budget.non_torch_bytes for budget in budgets) > 2 * GIB


class TestDefect2FourBitsRoundedToNoBytes:
    """llm-d-planner takes int(bits / 8) bytes a weight: 0 for four bits."""

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True
                        },
                    }
                },
            },
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        ],
        ids=["awq", "gptq", "packed", "nvfp4"],
    )  # fmt: skip
    def test_a_checkpoint_of_four_bits_takes_half_a_byte_a_weight(
        self, llama_config: dict[str, Any], quantization: dict[str, Any]
    ) -> None:
        geometry = geometry_from_config("four bits", {**llama_config, "quantization_config": quantization})
        assert geometry.checkpoint_precision is not None
        tables = 2 * 128_256 * 4096
        linear = parameter_count(geometry) - tables
        without_tables = weight_bytes(geometry, geometry.checkpoint_precision, Split(1)) - 2 * tables
        assert 0.5 * linear < without_tables < 0.6 * linear


class TestDefect3KvHeadsDividedBelowOne:
    """A planner divides KV heads by TP; vLLM copies them where there are fewer than ranks."""

    def test_a_token_takes_no_less_beyond_the_number_of_kv_heads(self, make_pair: PairFactory) -> None:
        pair = make_pair("FP8", None)
        sizes = [kv_bytes_per_token(pair, Parallelism(tensor)) for tensor in (4, 8, 16, 32)]
        assert sizes == [80 * 2 * 2 * 128 * 2, *[80 * 2 * 1 * 128 * 2] * 3]

    def test_so_are_their_weights(self, llama_70b: ModelGeometry) -> None:
        one_head = 80 * 2 * 128 * 8192 * 2
        at_8, at_16 = (weight_bytes(llama_70b, Precision.BF16, Split(tensor)) for tensor in (8, 16))
        assert at_16 > at_8 / 2 + one_head / 2 * 0.99


class TestDefect4LatentCacheDividedByTensor:
    """The latent of multi-head latent attention lies whole on every tensor rank; pipeline stages divide it."""

    def test_a_token_takes_as_much_at_every_tensor_parallelism(self, limits: EngineLimits) -> None:
        pair = alone(catalogued("deepseek-ai/DeepSeek-V3"), limits)
        assert {kv_bytes_per_token(pair, Parallelism(tensor)) for tensor in (1, 2, 4, 8)} == {61 * LATENT_BYTES}

    def test_stages_keep_their_own_layers(self, limits: EngineLimits) -> None:
        runs = cached_layers(catalogued("deepseek-ai/DeepSeek-V3"), None, 8, 2, None)
        layers = [sum(run.count for run in stage) for stage in runs]
        assert sum(layers) == 61
        assert max(layers) == 31


class TestDefect5GigabytesForGibibytes:
    """A card of 80 "GB" has 79.2 GiB, and whole numbers of GiB lose up to one more."""

    def test_a_card_has_what_cuda_reports(self) -> None:
        assert 79.1 * GIB < h100().total_bytes < 79.3 * GIB

    def test_parts_of_a_gib_count(self, make_pair: PairFactory) -> None:
        pair = make_pair("FP8", None)
        whole, more = (estimate(pair, replace(h100(), total_bytes=size), 2) for size in (79 * GIB, 79 * GIB + GIB // 2))
        assert more.requested_bytes - whole.requested_bytes == pytest.approx(0.92 * GIB / 2, abs=2)
        assert more.kv_cache_tokens > whole.kv_cache_tokens


class TestDefect6CodeOfTheModel:
    """A planner loads configs with trust_remote_code: a model's name then runs its code."""

    def test_a_config_that_names_code_runs_none(
        self, llama_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran = tmp_path / "ran"
        (tmp_path / "configuration_of_theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Theirs: ...\n")
        monkeypatch.syspath_prepend(tmp_path)
        named = {"auto_map": {"AutoConfig": "configuration_of_theirs.Theirs"}, "_name_or_path": str(tmp_path)}
        assert geometry_from_config(str(tmp_path), {**llama_config, **named}).layers
        assert not ran.exists()
        assert "configuration_of_theirs" not in sys.modules

    def test_nothing_of_ours_asks_for_it(self) -> None:
        package = Path(__file__).parents[3] / "operator"
        sources = [path.read_text() for path in package.rglob("*.py")]
        assert sources
        assert not [text for text in sources if "trust_remote_code=True" in text]


class TestDefect7TablesHeadsAndLayersThatDiffer:
    """Tied tables, a vocabulary that TP divides, heads of other widths in some layers, states beside attention."""

    def test_tied_tables_count_once(self, llama_config: dict[str, Any]) -> None:
        tied, untied = (
            geometry_from_config("small", {**llama_config, "tie_word_embeddings": tie}) for tie in (True, False)
        )
        table = 128_256 * 4096
        assert parameter_count(untied) - parameter_count(tied) == table
        for tensor in (1, 2, 4):
            sizes = [weight_bytes(geometry, Precision.BF16, Split(tensor)) for geometry in (untied, tied)]
            assert sizes[0] - sizes[1] == 2 * table // tensor

    def test_heads_are_as_wide_as_their_layer_says(self) -> None:
        """Gemma 4: 8 KV heads of 256 in its windows, and 2 of 512, keys and values one, in the others."""
        (stage,) = cached_layers(catalogued("google/gemma-4-26B-A4B"), None, 1, 1, None)
        assert {(run.count, run.layer.token_bytes) for run in stage} == {(25, 2 * 8 * 256 * 2), (5, 2 * 2 * 512 * 2)}

    def test_layers_that_borrow_keys_and_values_keep_none(self) -> None:
        """Small Gemma 4: the last 5 of 10 layers read those of the layers before them."""
        (stage,) = cached_layers(geometry_from_config("small", GEMMA4), None, 1, 1, None)
        assert sum(run.count for run in stage) == 5

    def test_states_take_no_room_of_a_token(self) -> None:
        """Qwen3-Next: 12 of 48 layers attend."""
        (stage,) = cached_layers(catalogued("Qwen/Qwen3-Next-80B-A3B-Instruct"), None, 1, 1, None)
        assert sum(run.count for run in stage if run.layer.token_bytes) == 12
        assert sum(run.count for run in stage if run.layer.state_bytes) == 36


class TestDefect8UtilizationOfWhatIsFree:
    """vLLM takes its share of all memory, and the default share is that of its version."""

    def test_the_share_is_of_the_total(self, make_pair: PairFactory) -> None:
        pair = make_pair("FP8", None, memory_utilization_percent=50)
        assert estimate(pair, h100(), 2).requested_bytes == -(-h100().total_bytes // 2)

    def test_the_default_is_that_of_the_version(self) -> None:
        shares = [
            find_version_rules(version).default_memory_utilization_percent for version in ("0.17.0", "0.19.0", "0.32.0")
        ]
        assert shares == [90, 90, 92]


class TestDefect9AnOverEstimateThatCrashes:
    """KAITO lets the engine fit its length: a plan that fixes it must leave room for its own error."""

    @pytest.mark.parametrize(("spare_bytes", "verdict"), [(0, Verdict.FITS), (-(2**20), Verdict.TIGHT)])
    def test_what_fits_holds_its_requests_when_the_margin_is_gone(
        self, make_pair: PairFactory, spare_bytes: int, verdict: Verdict
    ) -> None:
        pair = make_pair("FP8", "FP8")
        budget = estimate(pair, h100(), 2)
        assert budget.margin_bytes >= GIB / 2
        too_much = budget.available_kv_bytes - budget.margin_bytes - budget.needed_kv_bytes - spare_bytes
        smaller = replace(h100(), total_bytes=h100().total_bytes - int(too_much / 0.92))
        assert estimate(pair, smaller, 2).verdict is verdict


class TestDefect10TheHubInsideAReconcile:
    """A reconcile that asks the hub hangs with it: a Job asks, and the answer is kept."""

    def test_no_decision_opens_a_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a decision went to the network")

        for name in ("connect", "connect_ex", "sendto"):
            monkeypatch.setattr(socket.socket, name, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        spec = pair_70b(target={"model": "nobody/knows-this"})
        intent = desired_state(parse_deployment(parent(spec)), (), {}, (), UNCALIBRATED)
        assert [child["kind"] for child in intent.children] == ["Job"]
