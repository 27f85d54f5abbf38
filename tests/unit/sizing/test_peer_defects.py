"""Mistakes that other memory calculators for vLLM make: each has a test that fails if we make it too."""

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import UNCALIBRATED
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.memory.budget import Verdict, estimate
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import parameter_count, weight_bytes
from tests.support.decisions import desired_state
from tests.support.objects import pair_70b, parent
from tests.unit.sizing.conftest import PairFactory

H100 = "NVIDIA-H100-80GB-HBM3"


def h100() -> Device:
    device = find_device(H100)
    assert device is not None
    return device


class TestDefect2FourBitWeightsRoundedToZero:
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
    def test_four_bit_checkpoint_takes_half_a_byte_per_weight(
        self, llama_config: dict[str, Any], quantization: dict[str, Any]
    ) -> None:
        geometry = geometry_from_config("four bits", {**llama_config, "quantization_config": quantization})
        assert geometry.checkpoint_precision is not None
        tables = 2 * 128_256 * 4096
        linear = parameter_count(geometry) - tables
        without_tables = weight_bytes(geometry, geometry.checkpoint_precision, Split(1)) - 2 * tables
        assert 0.5 * linear < without_tables < 0.6 * linear


class TestDefect6ModelCodeExecution:
    """A planner loads configs with trust_remote_code: a model's name then runs its code."""

    def test_config_with_auto_map_runs_no_code(
        self, llama_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran = tmp_path / "ran"
        (tmp_path / "configuration_of_theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Theirs: ...\n")
        monkeypatch.syspath_prepend(tmp_path)
        named = {"auto_map": {"AutoConfig": "configuration_of_theirs.Theirs"}, "_name_or_path": str(tmp_path)}
        assert geometry_from_config(str(tmp_path), {**llama_config, **named}).layers
        assert not ran.exists()
        assert "configuration_of_theirs" not in sys.modules

    def test_operator_never_sets_trust_remote_code(self) -> None:
        package = Path(__file__).parents[3] / "operator"
        sources = [path.read_text() for path in package.rglob("*.py")]
        assert sources
        assert not [text for text in sources if "trust_remote_code=True" in text]


class TestDefect9OverestimatedMemory:
    """KAITO lets the engine fit its length: a plan that fixes it must leave room for its own error."""

    @pytest.mark.parametrize(("spare_bytes", "verdict"), [(0, Verdict.FITS), (-(2**20), Verdict.TIGHT)])
    def test_fits_needs_room_for_the_margin(self, make_pair: PairFactory, spare_bytes: int, verdict: Verdict) -> None:
        pair = make_pair("FP8", "FP8")
        budget = estimate(pair, h100(), 2)
        assert budget.margin_bytes >= GIB / 2
        too_much = budget.available_kv_bytes - budget.margin_bytes - budget.needed_kv_bytes - spare_bytes
        smaller = replace(h100(), total_bytes=h100().total_bytes - int(too_much / 0.92))
        assert estimate(pair, smaller, 2).verdict is verdict


class TestDefect10HubRequestsInReconcile:
    """A reconcile that asks the hub hangs with it: a Job asks, and the answer is kept."""

    def test_decision_opens_no_network_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a decision went to the network")

        for name in ("connect", "connect_ex", "sendto"):
            monkeypatch.setattr(socket.socket, name, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        spec = pair_70b(target={"model": "nobody/knows-this"})
        intent = desired_state(parse_deployment(parent(spec)), (), {}, (), UNCALIBRATED)
        assert [child["kind"] for child in intent.children] == ["Job"]
