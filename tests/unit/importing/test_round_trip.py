"""What the operator renders, imported again, is an object that renders the same pods."""

from typing import Any

from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import desired_state
from tests.support.migrations import migrate
from tests.support.objects import H100, H200, parent

NODES = (NodeFacts("h200-0", H200, 8), NodeFacts("h100-0", H100, 8))
LLAMA_70B, LLAMA_8B, LLAMA_1B = (f"meta-llama/Llama-3.{size}-Instruct" for size in ("1-70B", "1-8B", "2-1B"))


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that have each of these fields or not."""
    return st.fixed_dictionaries({}, optional=fields)


SECRET = st.fixed_dictionaries({"name": st.sampled_from(["clients", "hub"]), "key": st.sampled_from(["key", "token"])})
SERVING = optional(
    maxModelLen=st.sampled_from([1024, 4096, 8192]),
    maxNumSeqs=st.sampled_from([16, 256, 512]),
    maxNumBatchedTokens=st.sampled_from([2048, 8192]),
    cudagraphMode=st.sampled_from(["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"]),
    maxCudagraphCaptureSize=st.sampled_from([64, 256]),
    dtype=st.sampled_from(["auto", "bfloat16", "float16"]),
    kvCacheDtype=st.sampled_from(["auto", "bfloat16", "fp8"]),
    blockSize=st.sampled_from([16, 32]),
    gpuMemoryUtilizationPercent=st.sampled_from([80, 92, 95]),
    enforceEager=st.booleans(),
    servedModelNames=st.lists(st.sampled_from(["llama", "a/b", "chat$(HOME)"]), max_size=2, unique=True),
    apiKeySecret=SECRET,
    port=st.sampled_from([8000, 9001]),
)
DRAFT = st.builds(
    lambda draft, more: {"model": draft, **more},
    st.sampled_from([LLAMA_8B, LLAMA_1B]),
    optional(
        maxModelLen=st.sampled_from([512, 1024]),
        revision=st.sampled_from(["main", "v1.0"]),
        quantization=st.sampled_from(["BF16", "FP8"]),
    ),
)


def ranges(*parts: tuple[int, int, int]) -> list[dict[str, int]]:
    """Ranges of batch sizes with their tokens."""
    return [{"from": first, "to": last, "numSpeculativeTokens": tokens} for first, last, tokens in parts]


SCHEDULE = st.sampled_from(
    [ranges((1, 8, 3), (9, 16, 0)), ranges((1, 4, 3), (9, 12, 0)), ranges((5, 8, 0)), ranges((1, 16, 1))]
)
K = st.integers(min_value=3, max_value=8)
SPECULATION = st.one_of(
    st.just({"method": "none"}),
    st.builds(
        lambda k, more: {"method": "ngram", "numSpeculativeTokens": k, **more},
        K,
        optional(
            ngram=st.just({"promptLookupMin": 2, "promptLookupMax": 4}),
            numSpeculativeTokensByBatchSize=SCHEDULE,
        ),
    ),
    st.builds(
        lambda k, draft, more: {"method": "draft_model", "numSpeculativeTokens": k, "draft": draft, **more},
        K,
        DRAFT,
        optional(
            numSpeculativeTokensByBatchSize=SCHEDULE,
            rejectionSampling=st.sampled_from(["standard", "block"]),
            draftSampling=st.sampled_from(["greedy", "probabilistic"]),
            adaptiveVerification=st.just(True),
            useHeterogeneousVocab=st.just(True),
        ),
    ),
)
TEMPLATE = optional(
    metadata=st.just({"labels": {"kueue.x-k8s.io/queue-name": "team"}, "annotations": {"a": "b"}}),
    spec=optional(
        priorityClassName=st.just("high"),
        nodeSelector=st.just({"zone": "a"}),
        tolerations=st.just(
            [
                {"key": "team", "operator": "Exists"},
                {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            ]
        ),
        volumes=st.just([{"name": "extra", "configMap": {"name": "extra"}}]),
        containers=st.just(
            [
                {
                    "name": "engine",
                    "resources": {"requests": {"cpu": "4"}},
                    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                },
                {"name": "sidecar", "image": "s:1", "volumeMounts": [{"name": "extra", "mountPath": "/e"}]},
            ]
        ),
    ),
)
ENGINE = optional(
    image=st.sampled_from(["my.io/vllm:v0.33.4", "docker.io/vllm/vllm-openai:v0.33.0"]),
    extraArgs=st.sampled_from(
        [["--enable-prefix-caching"], ["--chat-template=$(X)", "-O3"], ["--hf-overrides", '{"a": 1}', "--seed", "-1"]]
    ),
    env=st.just(
        [
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "HOME", "value": "/elsewhere"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
    ),
)
MODELS = st.sampled_from(
    [{}, {"volume": {"persistentVolumeClaim": {"claimName": "m"}}}, {"hubTokenSecret": {"name": "hub", "key": "t"}}]
)
SPECS = st.builds(
    lambda target, rest: {"target": target, **{key: value for key, value in rest.items() if value}},
    st.builds(
        lambda model, more: {"model": model, **more},
        st.sampled_from([LLAMA_70B, LLAMA_8B]),
        optional(quantization=st.sampled_from(["BF16", "FP8", "AsCheckpoint"]), revision=st.just("abc")),
    ),
    st.fixed_dictionaries(
        {
            "speculation": SPECULATION,
            "parallelism": optional(tensor=st.sampled_from([2, 4]), pipeline=st.sampled_from([1, 2])),
            "serving": SERVING,
            "engine": ENGINE,
            "models": MODELS,
            "podTemplate": TEMPLATE,
            "replicas": st.sampled_from([1, 2]),
        }
    ),
)


def rendered(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The Deployment that the operator makes of a spec, as a person's own; None where it makes none.

    Without the recorder, which no other Deployment has.
    """
    engine = {**spec.get("engine", {}), "recorder": False}
    intent = desired_state(parse_deployment(parent({**spec, "engine": engine})), NODES)
    for child in intent.children:
        if child["kind"] == "Deployment":
            # The hash counts the order of lists in, which says nothing where their elements have names.
            child["spec"]["template"]["metadata"]["annotations"].pop(TEMPLATE_HASH_ANNOTATION)
            return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "mine"}, "spec": child["spec"]}
    return None


def by_key(value: Any) -> Any:
    """The same with lists of named things sorted."""
    if isinstance(value, dict):
        return {key: by_key(part) for key, part in value.items()}
    if isinstance(value, list):
        parts = [by_key(part) for part in value]
        named = [isinstance(part, dict) and ("name" in part or "mountPath" in part) for part in parts]
        return sorted(parts, key=lambda part: str(part.get("mountPath") or part["name"])) if all(named) else parts
    return value


def check(spec: dict[str, Any]) -> None:
    before = rendered(spec)
    assert before is not None
    migration = migrate(before, name="again")
    assert migration.decisions == ()
    assert "specdecode.io" not in str(migration.body["spec"]), "what is the operator's own stays its own"
    after = rendered(migration.body["spec"])
    assert after is not None
    assert by_key(after["spec"]) == by_key(before["spec"])


# Specs are large, and condition the smallest that fails takes minutes: what fails is told by the difference.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(SPECS)
def test_object_survives_rendering_and_import(spec: dict[str, Any]) -> None:
    assume(rendered(spec) is not None)
    check(spec)


def test_cpu_object_survives_rendering_and_import() -> None:
    spec = {
        "target": {"model": LLAMA_1B},
        "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
        "accelerator": {"type": "CPU", "cpuCores": 4, "memoryGiB": 32, "kvCacheGiB": 2},
        "serving": {"maxModelLen": 1024},
        "engine": {"image": "my.io/vllm-cpu:v0.33.0"},
    }
    check(spec)
