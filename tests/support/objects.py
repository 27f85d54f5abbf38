"""Kubernetes objects as tests need them."""

import copy
from typing import Any

Body = dict[str, Any]

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"

TINY_CONFIG: Body = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

STATES_CONFIG: Body = {
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 2560,
    "num_heads": 80,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 50_288,
}
"""Of a model that has states and no attention."""


HUB_TOKEN: Body = {"hubTokenSecret": {"name": "hf-token", "key": "token"}}
"""The models of a spec whose pods may download gated ones."""


def pair_70b(**changes: Any) -> Body:
    """Spec of Llama-3.1-70B with an 8B draft on two GPUs; changes replace whole top-level fields."""
    return {
        "target": {"model": "meta-llama/Llama-3.1-70B-Instruct"},
        "speculation": {
            "method": "draft_model",
            "numSpeculativeTokens": 5,
            "draft": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        "parallelism": {"tensor": 2},
        "serving": {"maxModelLen": 8192},
        **changes,
    }


def tiny_cpu(**changes: Any) -> Body:
    """Spec of the tiny pair on CPU."""
    return {
        "target": {"model": "pair/target", "config": TINY_CONFIG},
        "speculation": {
            "method": "draft_model",
            "numSpeculativeTokens": 3,
            "draft": {"model": "pair/draft", "config": {**TINY_CONFIG, "num_hidden_layers": 1}},
        },
        "accelerator": {"type": "CPU", "cpuCores": 1, "memoryGiB": 8, "kvCacheGiB": 1},
        "serving": {"maxModelLen": 1024},
        "models": {"volume": {"persistentVolumeClaim": {"claimName": "tiny-models"}}},
        "engine": {"image": "localhost/engine:1"},
        **changes,
    }


def parent(spec: Body, *, name: str = "llama", generation: int = 1, status: Body | None = None) -> Body:
    """A SpecDecodeDeployment as the API server has it."""
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": "uid-1",
            "generation": generation,
            "resourceVersion": "1",
        },
        "spec": copy.deepcopy(spec),
        "status": status or {},
    }


def deployment(*, replicas: int, updated: int, available: int, generation: int = 1, observed: int = 1) -> Body:
    """An apps/v1 Deployment with the counters that its controller writes."""
    return {
        "metadata": {"name": "llama", "namespace": "default", "generation": generation},
        "status": {
            "observedGeneration": observed,
            "replicas": replicas,
            "updatedReplicas": updated,
            "availableReplicas": available,
            "readyReplicas": available,
        },
    }


def pod(name: str = "llama-1", *, created: str = "2026-01-01T00:00:00Z", **status: Any) -> Body:
    """An engine pod with parts of a status."""
    return {"metadata": {"name": name, "namespace": "default", "creationTimestamp": created}, "status": status}


def waiting(reason: str, message: str = "", container: str = "engine") -> Body:
    """Status of a container that waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": container, "ready": False, "image": "i:1", "state": state}


def ended(exit_code: int, message: str = "", container: str = "engine", reason: str = "Error") -> Body:
    """Status of a container that failed and waits to be started again."""
    last = {"exitCode": exit_code, "message": message, "reason": reason}
    return {
        "name": container,
        "ready": False,
        "image": "i:1",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": last},
    }
