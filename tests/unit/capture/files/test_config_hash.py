"""Hashes of an engine's configuration."""

import hashlib
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.files.config_hash import (
    config_hash,
    engine_config,
    engine_hash,
    header_hash,
    speculative_label,
    version_tag,
)
from specdecode_operator.capture.recorder.segment_format import EngineConfig, Header, Speculative
from tests.support import recordings

CONFIG = EngineConfig(
    block_size=16,
    enforce_eager=True,
    enable_prefix_caching=True,
    gpu_memory_utilization=0.9,
    max_model_len=16384,
    max_num_seqs=256,
    tensor_parallel=1,
)


DIGEST = f"sha256:{'a' * 64}"
CONTEXT = {"image": "vllm:0.32", "command": ["vllm", "serve", "a"], "recording_flags": []}


def header(**changes: Any) -> Header:
    return msgspec.convert(recordings.header(**changes), Header)


class TestSchemeV3:
    """The recipe of vllm-vcr's config_hash.rs and gen-capture-jobs.py, with the inputs of its own unit test."""

    def test_engine_config_is_sorted_key_value_text(self) -> None:
        assert engine_config("Qwen/Qwen3-8B", CONFIG) == (
            "block_size=16;enable_prefix_caching=true;enforce_eager=true;gpu_memory_utilization=0.9;"
            "max_model_len=16384;max_num_seqs=256;model=Qwen/Qwen3-8B;speculative=none;tensor_parallel=1"
        )

    def test_hash_covers_four_lines(self) -> None:
        config = engine_config("Qwen/Qwen3-8B", CONFIG)
        text = b"config-fingerprint-v3\ngpu=H200\nvllm_tag=v0.23.0\nengine_config=" + config.encode() + b"\n"
        assert config_hash("H200", "v0.23.0", config) == hashlib.sha256(text).hexdigest()

    def test_ngram_label_matches_vllm_vcr(self) -> None:
        config = msgspec.structs.replace(CONFIG, speculative=Speculative(method="ngram", num_speculative_tokens=4))
        assert speculative_label(config) == "ngram-k4"

    def test_header_hash_uses_short_gpu_name_and_release_tag(self) -> None:
        expected = config_hash("H200", "v0.32.0", engine_config("tiny/target", header().config))
        assert header_hash(header()) == expected
        assert header_hash(header(vllm="0.32.0+cpu")) == expected


class TestLabels:
    @pytest.mark.parametrize(
        ("version", "tag"),
        [("0.32.0", "v0.32.0"), ("0.32.0+cpu", "v0.32.0"), ("0.32.1rc1.dev3+g12", "v0.32.1rc1"), ("dev", "vdev")],
    )
    def test_version_tag(self, version: str, tag: str) -> None:
        assert version_tag(version) == tag


class TestEngineHash:
    @pytest.mark.parametrize(
        "changes",
        [
            {"gpu": "NVIDIA H200 NVL"},
            {"vllm": "0.32.0+cpu"},
            {"model": "other"},
            {"config": recordings.header()["config"] | {"data_parallel": 2}},
            {
                "config": recordings.header()["config"]
                | {"speculative": {"method": "ngram", "num_speculative_tokens": 4, "model": "draft"}}
            },
        ],
    )
    def test_engine_hash_depends_on_engine_header(self, changes: dict[str, Any]) -> None:
        assert engine_hash(header(**changes), {}) != engine_hash(header(), {})

    @pytest.mark.parametrize(
        "changes", [{"image": "y"}, {"command": ["vllm", "serve", "b"]}, {"recording_flags": ["--more"]}]
    )
    def test_engine_hash_depends_on_image_and_command(self, changes: dict[str, Any]) -> None:
        assert engine_hash(header(), CONTEXT | changes) != engine_hash(header(), CONTEXT)

    def test_engine_hash_ignores_deployment_and_operator(self) -> None:
        """The same engine of another deployment, after a change of its replicas, or by another operator."""
        others = {"deployment": {"uid": "x", "generation": 7}, "operator_version": "9", "plan": {"verdict": "Fits"}}
        assert engine_hash(header(), CONTEXT | others) == engine_hash(header(), CONTEXT)

    def test_engine_hash_uses_image_digest_instead_of_name(self) -> None:
        ids = [f"docker.io/vllm/vllm-openai@{DIGEST}", f"mirror.example/vllm@{DIGEST}"]
        hashes = {engine_hash(header(), CONTEXT | {"image": image}, image) for image in ids}
        assert len(hashes) == 1
        assert engine_hash(header(), CONTEXT, ids[0].replace("a", "b")) not in hashes
        assert engine_hash(header(), CONTEXT, "no-digest") == engine_hash(header(), CONTEXT)

    def test_engine_hash_ignores_recording_process(self) -> None:
        assert engine_hash(header(boot="x", host="y", pid=1), {}) == engine_hash(header(), {})
