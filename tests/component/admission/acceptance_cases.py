"""Specs that the API server takes."""

import yaml

MINIMAL = "target: {model: org/target}"
LLAMA = """
target: {model: meta-llama/Llama-3.1-70B-Instruct}
speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: meta-llama/Llama-3.1-8B-Instruct}}
accelerator: {products: [NVIDIA-H100-80GB-HBM3, NVIDIA-H200]}
"""


def _training_on(number: int) -> str:
    """A schedule that trains on a claim of its own."""
    live = "{source: Live, live: {requests: 5000}, record: {tokenIds: true, promptTokenIds: true}}"
    run = f"{{trainer: {{image: a}}, storage: {{persistentVolumeClaim: {{claimName: heads-{number}}}}}}}"
    training = f"{{gpuHoursPerMonth: 10, template: {run}}}"
    return f"{{name: s{number}, schedule: 0 3 * * 1, template: {live}, training: {training}}}"


GOOD = {
    "minimal": MINIMAL,
    "llama": LLAMA,
    "none": "{target: {model: gpt2}, speculation: {method: none}}",
    "ngram": """
target: {model: Qwen/Qwen2.5-7B-Instruct, revision: refs/pr/3}
speculation: {method: ngram, numSpeculativeTokens: 4, ngram: {promptLookupMin: 2, promptLookupMax: 5}}
""",
    "claim": """
target: {model: org/target}
parallelism: {tensor: 4, pipeline: 2}
accelerator:
  resourceClaim:
    deviceClassName: gpu.nvidia.com
    selectors: ["device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('80Gi')) >= 0"]
    count: 4
  products: [NVIDIA-H200]
  perNode: 8
""",
    "route": """
target: {model: org/target}
expose: {httpRoute: {parentRefs: [{name: public, namespace: infra}], hostnames: ["*.example.com", llm.example.com]}}
""",
    "autoscaling": """
target: {model: org/target}
autoscaling: {maxReplicas: 4, metric: RunningRequests, target: 64}
""",
    "autoscaling from zero": """
target: {model: org/target}
autoscaling:
  minReplicas: 0
  maxReplicas: 4
  metric: KvCacheUsage
  target: 100
  keda: {serverAddress: "https://prometheus.monitoring:9090/prometheus", wakeUpQuery: sum(gateway_queue)}
""",
    "pool": """
target: {model: org/target}
expose:
  inferencePool: {endpointPickerRef: {name: epp}}
  httpRoute:
    parentRefs: [{name: public}]
    matches: [{headers: [{name: X-Traffic, value: "batch; nightly"}]}, {headers: [{name: X-Traffic, value: bulk}]}]
""",
    "images": """
target: {model: .}
speculation: {method: eagle3, numSpeculativeTokens: 3, draft: {model: head, image: {reference: "registry/head:v1"}}}
serving: {servedModelNames: [llama]}
models: {volume: {image: {reference: "registry.example.com:5000/models/llama@sha256:DIGEST"}}}
""".replace("DIGEST", "0" * 64),
    "head": """
target: {model: Qwen/Qwen3-8B}
speculation: {method: eagle3, numSpeculativeTokens: 3, draft: {model: AngelSlim/Qwen3-8B_eagle3, maxModelLen: 2048}}
parallelism: {tensor: 2, pipeline: 2, draftTensor: 1}
""",
    "assumed": """
target: {model: org/m, assume: {weightsGiB: "14.5", kvBytesPerToken: 131072, stateMiBPerRequest: 24}}
speculation: {method: draft_model, numSpeculativeTokens: 3, draft: {model: org/d, assume: {weightsGiB: "0.9"}}}
""",
    "stretched": """
target: {model: Qwen/Qwen3-32B, ropeScaling: {type: yarn, factor: "4.0", originalMaxPositionEmbeddings: 32768}}
serving: {maxModelLen: 131072, dtype: bfloat16}
""",
    "stretched otherwise": """
target: {model: Qwen/Qwen3-32B, quantization: BF16, ropeScaling: {type: linear, factor: "1.5"}}
""",
    "own layers": """
target: {model: Qwen/Qwen3-Next-80B-A3B-Instruct}
speculation: {method: mtp, numSpeculativeTokens: 2, draftLmHeadQuantization: fp8}
parallelism: {tensor: 2, data: 4, expert: true, draftTensor: 2}
accelerator: {products: [NVIDIA-H200], perNode: 8}
""",
    "layers of another checkpoint": """
target: {model: google/gemma-4-31B-it}
speculation: {method: mtp, numSpeculativeTokens: 4, draft: {model: google/gemma-4-31B-it-assistant}}
""",
    "stages inside the target": """
target: {model: deepseek-ai/DeepSeek-V4-Flash-0731}
speculation: {method: dspark, numSpeculativeTokens: 7}
""",
    "further keys": """
target: {model: Qwen/Qwen3.5-27B}
speculation:
  method: mtp
  numSpeculativeTokens: 3
  extraConfig: {attention_backend: TRITON_ATTN, enforce_eager: true, draft_load_config: {load_format: safetensors}}
serving: {servedModelNames: [one, Qwen 3.5 27B]}
""",
    "suffix of many tokens": """
target: {model: Qwen/Qwen3-8B}
speculation: {method: suffix, numSpeculativeTokens: 64}
""",
    "suffix": """
target: {model: Qwen/Qwen3-8B}
speculation:
  method: suffix
  numSpeculativeTokens: 24
  suffix: {maxTreeDepth: 32, maxCachedRequests: 0, maxSpecFactorPercent: 150, minTokenProbabilityPercent: 5}
engine: {image: "registry.example/vllm-arctic:v0.32.0"}
""",
    "lookup on the GPU": """
target: {model: Qwen/Qwen3-8B}
speculation: {method: ngram_gpu, numSpeculativeTokens: 4, ngram: {promptLookupMax: 5}, adaptiveVerification: false}
parallelism: {data: 2}
""",
    "another vocabulary": """
target: {model: Qwen/Qwen3-8B}
speculation:
  method: draft_model
  numSpeculativeTokens: 4
  draft: {model: meta-llama/Llama-3.2-1B}
  useHeterogeneousVocab: true
  draftSampling: greedy
""",
    "loss": """
target: {model: Qwen/Qwen3-8B}
speculation: {method: ngram, numSpeculativeTokens: 4, rejectionSampling: fly, lossy: true}
""",
    "ranks on CPU": """
target: {model: target}
speculation: {method: draft_model, numSpeculativeTokens: 4, draft: {model: draft}, draftSampling: probabilistic}
parallelism: {tensor: 2}
accelerator: {type: CPU, cpuCores: 2, memoryGiB: 10, kvCacheGiB: 2}
models: {volume: {persistentVolumeClaim: {claimName: tiny-models}}}
engine: {image: "localhost:5000/specdecode/engine-cpu:dev"}
""",
    "sampling and graphs": """
target: {model: Qwen/Qwen3-8B}
speculation:
  method: eagle3
  numSpeculativeTokens: 3
  draft: {model: AngelSlim/Qwen3-8B_eagle3}
  rejectionSampling: block
  draftSampling: probabilistic
  adaptiveVerification: true
serving: {maxCudagraphCaptureSize: 128}
""",
    "cpu": """
target: {model: target}
speculation: {method: draft_model, numSpeculativeTokens: 4, draft: {model: draft}}
accelerator: {type: CPU, cpuCores: 2, memoryGiB: 4, kvCacheGiB: 1}
models: {volume: {persistentVolumeClaim: {claimName: tiny-models}}}
serving: {maxModelLen: 512, maxNumSeqs: 8, enforceEager: true}
engine: {image: "localhost:5000/specdecode/engine-cpu:dev"}
""",
    "from a cache, over TLS": """
target: {model: org/target, revision: v1}
serving: {tlsSecret: {name: llama.tls}}
models: {cache: {persistentVolumeClaim: {claimName: hub}}, hubTokenSecret: {name: hub, key: token}}
""",
    "a draft on its own claim": """
target: {model: org/target, revision: v1}
speculation:
  method: eagle3
  numSpeculativeTokens: 3
  trainedDrafts: true
  draftUpdate: InPlace
  draft: {model: team/chat/head, persistentVolumeClaim: {claimName: chat-training}}
""",
    "of the nodes, with a cache": """
target: {model: llama}
models: {volume: {hostPath: {path: /mnt/models..old/x}}, cache: {persistentVolumeClaim: {claimName: compiled}}}
""",
    # As many ranges as the schema takes: the rules over them must stay within the API server's cost limit.
    "256 ranges": yaml.safe_dump(
        {
            "target": {"model": "org/target"},
            "speculation": {
                "method": "ngram",
                "numSpeculativeTokens": 32,
                "numSpeculativeTokensByBatchSize": [
                    {"from": number, "to": number, "numSpeculativeTokens": 32 - number // 8} for number in range(1, 257)
                ],
            },
        }
    ),
    "everything": """
target: {model: models--org/snapshots/..a, quantization: FP8, config: {rope_theta: 10000.5, layers: [1, 2]}}
speculation:
  method: draft_model
  numSpeculativeTokens: 8
  numSpeculativeTokensByBatchSize:
  - {from: 1, to: 8, numSpeculativeTokens: 8}
  - {from: 9, to: 64, numSpeculativeTokens: 3}
  - {from: 100, to: 256, numSpeculativeTokens: 0}
  draft: {model: draft, quantization: INT8, maxModelLen: 4096}
parallelism: {tensor: 8}
accelerator: {type: GPU, products: [NVIDIA-H200], perNode: 8, memoryGiBPerGPU: 141}
serving:
  maxModelLen: 4096
  maxNumSeqs: 256
  maxNumBatchedTokens: 256
  kvCacheDtype: fp8_e4m3
  blockSize: 32
  gpuMemoryUtilizationPercent: 100
  minConcurrency: 256
  servedModelNames: [one, org/two]
  apiKeySecret: {name: api, key: KEY_1}
  port: 1024
replicas: 0
models: {volume: {persistentVolumeClaim: {claimName: models}}}
engine:
  version: "0.32"
  image: host/vllm@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  extraArgs: [--seed=1]
  env: [{name: VLLM_LOGGING_LEVEL, value: DEBUG}, {name: EMPTY}]
suspend: true
override: {ignorePlan: true, reason: measured by hand}
podTemplate:
  metadata: {labels: {team: a}}
  spec: {priorityClassName: high, tolerations: [{key: gpus, operator: Exists}]}
""",
    "drafts of its own but with many requests": """
target: {model: Qwen/Qwen3-8B}
speculation:
  method: ngram
  numSpeculativeTokens: 4
  numSpeculativeTokensByBatchSize: [{from: 17, to: 64, numSpeculativeTokens: 0}]
""",
    "replay": """
target: {model: org/target}
engine: {replay: {trace: {configMap: {name: recording}, path: trace.jsonl}}}
""",
    "emulated": """
target: {model: org/target}
engine: {replay: {trace: {configMap: {name: recording}, path: model.json}, mode: Emulated, seed: 3}}
""",
    "replay by a model": """
target: {model: org/target}
engine: {replay: {trace: {configMap: {name: recording}, path: model.json}, mode: Modelled}}
""",
    "replay of a capture, with everything": """
target: {model: org/target}
engine:
  replay:
    trace: {persistentVolumeClaim: {claimName: captures}, path: team/nightly}
    match: Prefix
    unmatched: Refuse
    acceptance: [{percent: 80}, {fromSeconds: 60, percent: 30}]
    timeScalePercent: 50
    loadFactor: 10
    seed: 7
    failures: {startSeconds: 60, errorPercent: 5, hangAfterSeconds: 600, crashAfterSeconds: 900}
""",
    "a policy, as usual": """
target: {model: org/target}
policy: {}
""",
    "a policy, with everything": """
target: {model: org/target}
policy:
  mode: Enforce
  paused: true
  evidence: nightly
  minGainPercent: 5
  windowSeconds: 600
  cooldownSeconds: 600
  maxRestartsPerDay: 2
  acceptanceRule: Below40Percent
""",
    "variables from elsewhere": """
target: {model: org/target}
engine:
  env:
  - {name: A, valueFrom: {secretKeyRef: {name: proxy, key: url, optional: true}}}
  - {name: B, valueFrom: {configMapKeyRef: {name: settings, key: level}}}
  - {name: C, valueFrom: {fieldRef: {fieldPath: "metadata.labels['team']", apiVersion: v1}}}
  - {name: D, valueFrom: {resourceFieldRef: {resource: limits.memory, containerName: engine, divisor: 1Mi}}}
  - {name: E, value: "", valueFrom: {fieldRef: {fieldPath: status.podIP}}}
""",
    "adapters": """
target: {model: org/target}
adapters:
- {name: a, model: org/a, rank: 16, revision: main, targetModules: [q_proj, v_proj]}
- {name: b, model: folder/b, rank: 24, persistentVolumeClaim: {claimName: adapters}}
adapterSlots: {gpu: 1, host: 4, maxRank: 32}
serving: {servedModelNames: [base]}
""",
    "adapters in a volume": """
target: {model: target}
adapters: [{name: a, model: folder/a, rank: 512}]
models: {volume: {persistentVolumeClaim: {claimName: models}}}
""",
    "captured by the clock, as usual": """
target: {model: org/target}
captures: [{name: nightly, schedule: 0 3 * * *}]
""",
    "captured by the clock, into a claim that is there": """
target: {model: org/target}
captures: [{name: nightly, schedule: 0 3 * * *, template: {storage: {persistentVolumeClaim: {claimName: mine}}}}]
""",
    "captured by the clock": """
target: {model: org/target}
captures:
- name: nightly
  schedule: 0 3 * * *
  retention: {count: 3}
  queue: {name: gpus, priorityClass: measurements}
  template:
    workload:
      phases: [{name: a, pattern: Closed, concurrency: 4, requests: 100}]
      temperatures: [{temperature: "0.0", sharePercent: 60}, {temperature: "0.7", sharePercent: 40}]
""",
    "trained by the clock, on answers to prompts": """
target: {model: org/target}
captures:
- name: weekly
  schedule: 0 3 * * 1
  template:
    record: {tokenIds: true}
    workload: {prompts: {dataset: {configMap: {name: prompts}, path: prompts.jsonl, format: JSONL}}}
  training: {when: Always, gpuHoursPerMonth: 0, template: {trainer: {image: a}}}
""",
    # As many as the schema takes: the rules over them must stay within the API server's cost limit.
    "trained by eight clocks": f"""
target: {{model: org/target}}
captures: [{", ".join(map(_training_on, range(8)))}]
""",
}
