"""Flags that users may not pass, because the operator decides what they say."""

from specdecode_operator.engine.arguments import ARGUMENTS, COMPILATION_CONFIG

_SPLIT = "use spec.parallelism and spec.replicas; the plan counts the GPUs of a replica, and the nodes that they lie on"
_KV_CACHE = "use spec.serving.memoryUtilizationPercent, or spec.accelerator.kvCacheGiB on CPU; the plan counts on them"
_HTTP = "remove it; Service and probes speak HTTP on spec.serving.port"
_CLIENT_CERTIFICATES = "remove it; the kubelet's probes bring no client certificate, so the engine would never be ready"

_REFUSED = {
    "--model": "use spec.target.model",
    "--spec-method": "use spec.speculation.method",
    "--spec-model": "use spec.speculation.draft.model",
    "--spec-tokens": "use spec.speculation.numSpeculativeTokens",
    "--revision": "use spec.target.revision, which the plan reads its config.json at",
    "--quantization-config": "use spec.target.quantization",
    "--api-key": "use spec.serving.apiKeySecret, which keeps the key out of this object",
    "--hf-token": "use spec.models.hubTokenSecret, which keeps the token out of this object",
    "--download-dir": "use spec.models",
    "--config": "give each setting its field, or its own place in spec.engine.extraArgs; a file cannot be checked",
    "--kv-cache-memory-bytes": _KV_CACHE,
    "--num-gpu-blocks-override": _KV_CACHE,
    "--decode-context-parallel-size": _SPLIT,
    "--prefill-context-parallel-size": _SPLIT,
    f"{COMPILATION_CONFIG}.max_cudagraph_capture_size": "use spec.serving.maxCudagraphCaptureSize",
    "--master-port": _SPLIT,
    "--grpc": _HTTP,
    "--uds": _HTTP,
    "--ssl-cert-reqs": _CLIENT_CERTIFICATES,
    "--ssl-ca-certs": _CLIENT_CERTIFICATES,
    "--disable-log-stats": "remove it; without statistics nobody can see whether the engine drafts",
    "--help": "remove it; the engine would print its help and exit",
}
_REFUSED_FAMILIES = {"--data-parallel-": _SPLIT}


def refusal(flag: str) -> str | None:
    """Return what to do instead of passing a flag, or a key of its JSON value; None when it may be passed."""
    for argument in ARGUMENTS:
        if argument.flag == flag and not argument.says_more:
            return "remove it; the operator sets it" if argument.field is None else f"use {argument.field}"
    for prefix, advice in _REFUSED_FAMILIES.items():
        if flag.startswith(prefix):
            return advice
    return _REFUSED.get(flag)
