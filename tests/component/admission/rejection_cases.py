"""Specs that the API server refuses, each with the field and the fix that its answer must name."""

from tests.component.admission.bad_spec import Bad, speculation
from tests.component.admission.model_rejection_cases import MODELS
from tests.component.admission.replay_rejection_cases import REPLAYS


def schedule(*ranges: tuple[int, int, int], k: int = 5) -> str:
    """Spec with K by batch size."""
    entries = ", ".join(f"{{from: {a}, to: {b}, numSpeculativeTokens: {c}}}" for a, b, c in ranges)
    return speculation(f"numSpeculativeTokens: {k}, numSpeculativeTokensByBatchSize: [{entries}]")


LIVE = "source: Live, live: {durationSeconds: 60}, record: {tokenIds: true, promptTokenIds: true}"
ON_A_CLAIM = ", storage: {persistentVolumeClaim: {claimName: heads}}"


def trains(
    template: str = LIVE,
    *,
    training: str = "",
    budget: str = "gpuHoursPerMonth: 10, ",
    more: str = "",
) -> str:
    """Spec with a schedule that trains."""
    return f"captures: [{trainer('weekly', template, training, budget, more)}]"


def trainer(
    name: str, template: str = LIVE, training: str = "", budget: str = "gpuHoursPerMonth: 10, ", more: str = ""
) -> str:
    """A schedule that trains."""
    run = f"training: {{{budget}template: {{trainer: {{image: a}}{training}}}}}"
    return f"{{name: {name}, schedule: 0 3 * * 1, template: {{{template}}}, {run}{more}}}"


SCHEDULE = "spec.speculation.numSpeculativeTokensByBatchSize"
BAD = {
    # Policy
    "a cool-down shorter than the window": Bad(
        "policy: {windowSeconds: 600, cooldownSeconds: 300}", "spec.policy.cooldownSeconds", "write 600 or more"
    ),
    "an unknown mode": Bad("policy: {mode: Force}", "spec.policy.mode", '"Observe", "Advise", "Enforce"'),
    "an unknown rule of acceptance": Bad(
        "policy: {acceptanceRule: Below60Percent}", "spec.policy.acceptanceRule", '"Below40Percent"'
    ),
    "no restart at all": Bad(
        "policy: {maxRestartsPerDay: 0}", "spec.policy.maxRestartsPerDay", "greater than or equal to 1"
    ),
    # Autoscaling
    "a minimum above the maximum": Bad(
        "autoscaling: {minReplicas: 5, maxReplicas: 4, metric: RunningRequests, target: 64}",
        "spec.autoscaling.minReplicas",
        "is 5, above maxReplicas 4",
    ),
    "zero replicas that nothing wakes up": Bad(
        "autoscaling: {minReplicas: 0, maxReplicas: 4, metric: RunningRequests, target: 64}",
        "spec.autoscaling.minReplicas",
        "set keda.wakeUpQuery",
    ),
    "zero replicas with KEDA that nothing wakes up": Bad(
        "autoscaling: {minReplicas: 0, maxReplicas: 4, metric: RunningRequests, target: 64,"
        " keda: {serverAddress: 'http://a'}}",
        "spec.autoscaling.minReplicas",
        "set keda.wakeUpQuery",
    ),
    "a percentage above 100": Bad(
        "autoscaling: {maxReplicas: 4, metric: KvCacheUsage, target: 101}",
        "spec.autoscaling.target",
        "is 101, but the target of KvCacheUsage is a percentage",
    ),
    "more requests than an engine runs": Bad(
        "serving: {maxNumSeqs: 32}\nautoscaling: {maxReplicas: 4, metric: RunningRequests, target: 33}",
        "spec.autoscaling.target",
        "raise serving.maxNumSeqs",
    ),
    "an unknown metric": Bad(
        "autoscaling: {maxReplicas: 4, metric: Cpu, target: 33}",
        "spec.autoscaling.metric",
        '"RunningRequests", "WaitingRequests"',
    ),
    "credentials in an address": Bad(
        "autoscaling: {maxReplicas: 4, metric: RunningRequests, target: 3, keda: {serverAddress: 'http://me:pw@a'}}",
        "spec.autoscaling.keda.serverAddress",
        "should match",
    ),
    # Expose
    "a route without a Gateway": Bad("expose: {httpRoute: {}}", "spec.expose.httpRoute.parentRefs", "Required"),
    "a hostname with a port": Bad(
        "expose: {httpRoute: {parentRefs: [{name: a}], hostnames: ['llm.example.com:443']}}",
        "spec.expose.httpRoute.hostnames[0]",
        "should match",
    ),
    "a pool without a picker": Bad(
        "expose: {inferencePool: {}}", "spec.expose.inferencePool.endpointPickerRef", "Required"
    ),
    "an unknown failure mode": Bad(
        "expose: {inferencePool: {endpointPickerRef: {name: a, failureMode: Fail}}}",
        "spec.expose.inferencePool.endpointPickerRef.failureMode",
        '"FailOpen", "FailClose"',
    ),
    "a condition without headers": Bad(
        "expose: {httpRoute: {parentRefs: [{name: a}], matches: [{headers: []}]}}",
        "spec.expose.httpRoute.matches[0].headers",
        "at least 1 items",
    ),
    "a header twice": Bad(
        "expose: {httpRoute: {parentRefs: [{name: a}], matches: [{headers: [{name: x, value: a}, {name: x, value: b}]}]"
        "}}",
        "spec.expose.httpRoute.matches[0].headers[1]",
        "Duplicate",
    ),
    "a header name with a colon": Bad(
        "expose: {httpRoute: {parentRefs: [{name: a}], matches: [{headers: [{name: 'x:', value: a}]}]}}",
        "spec.expose.httpRoute.matches[0].headers[0].name",
        "should match",
    ),
    # Speculation
    "no method": Bad("speculation: {numSpeculativeTokens: 5}", "spec.speculation.method", "Required"),
    "unknown method": Bad("speculation: {method: eagle9}", "spec.speculation.method", '"ngram_gpu", "suffix", "none"'),
    "K is 0": Bad(speculation("numSpeculativeTokens: 0"), "spec.speculation.numSpeculativeTokens", "use 1 to 32"),
    "K above 32": Bad(speculation("numSpeculativeTokens: 33"), "spec.speculation.numSpeculativeTokens", "at most 32"),
    "K above 64": Bad(
        "speculation: {method: suffix, numSpeculativeTokens: 65}",
        "spec.speculation.numSpeculativeTokens",
        "equal to 64",
    ),
    "K missing": Bad(
        "speculation: {method: ngram}",
        "spec.speculation.numSpeculativeTokens",
        "method ngram needs it: set it to 1 to 32",
    ),
    "K without a method": Bad(
        "speculation: {method: none, numSpeculativeTokens: 5}", "spec.speculation.numSpeculativeTokens", "remove it"
    ),
    "K is a text": Bad(speculation('numSpeculativeTokens: "5"'), "spec.speculation.numSpeculativeTokens", "integer"),
    "draft missing": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5}", "spec.speculation.draft", "set draft.model"
    ),
    "two element types": Bad(
        "target: {model: org/target, quantization: BF16}\nserving: {dtype: float32}",
        "spec.serving.dtype",
        "is float32, but target.quantization BF16 requires bfloat16: remove one of the two",
    ),
    "element type of another name": Bad("serving: {dtype: half}", "spec.serving.dtype", '"auto", "bfloat16"'),
    "a length that nothing multiplies": Bad(
        'target: {model: org/m, ropeScaling: {type: linear, factor: "2", originalMaxPositionEmbeddings: 4096}}',
        "spec.target.ropeScaling.originalMaxPositionEmbeddings",
        "type linear always multiplies the length in config.json: remove it",
    ),
    "a factor below 1": Bad(
        'target: {model: org/m, ropeScaling: {type: yarn, factor: "0.5"}}',
        "spec.target.ropeScaling.factor",
        "should match",
    ),
    "draft of nothing": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {}}",
        "spec.speculation.draft.model",
        "Required",
    ),
    "draft without a name": Bad(
        'speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: ""}}',
        "spec.speculation.draft.model",
        "at least 1 char",
    ),
    "ngram with a draft": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 5, draft: {model: org/draft}}",
        "spec.speculation.draft",
        "method ngram uses no draft model: remove it",
    ),
    "draft_model with ngram": Bad(
        speculation("numSpeculativeTokens: 5, ngram: {promptLookupMax: 4}"), "spec.speculation.ngram", "remove it"
    ),
    "head missing": Bad(
        "speculation: {method: eagle3, numSpeculativeTokens: 3}",
        "spec.speculation.draft",
        "method eagle3 needs a draft: set draft.model",
    ),
    "suffix with a draft": Bad(
        "speculation: {method: suffix, numSpeculativeTokens: 1, draft: {model: org/draft}}",
        "spec.speculation.draft",
        "method suffix uses no draft model: remove it",
    ),
    "dflash without K": Bad(
        "speculation: {method: dflash, draft: {model: org/head}}",
        "spec.speculation.numSpeculativeTokens",
        "method dflash needs it",
    ),
    "quantized head": Bad(
        "speculation: {method: eagle, numSpeculativeTokens: 3, draft: {model: org/head, quantization: FP8}}",
        "spec.speculation.draft.quantization",
        "is FP8, but the head of method eagle is served in its own precision: remove it",
    ),
    "head with checkpoints": Bad(
        "speculation: {method: eagle, numSpeculativeTokens: 3,"
        " draft: {model: org/head, checkpoints: [{quantization: INT4, model: org/x}]}}",
        "spec.speculation.draft.checkpoints",
        "served in its own precision: remove them",
    ),
    "ngram with bounds of suffix": Bad(
        "speculation: {method: ngram_gpu, numSpeculativeTokens: 3, suffix: {maxTreeDepth: 8}}",
        "spec.speculation.suffix",
        "or use method: suffix",
    ),
    "suffix with bounds of ngram": Bad(
        "speculation: {method: suffix, numSpeculativeTokens: 3, ngram: {promptLookupMax: 8}}",
        "spec.speculation.ngram",
        "or use method: ngram",
    ),
    "share above one": Bad(
        "speculation: {method: suffix, numSpeculativeTokens: 3, suffix: {minTokenProbabilityPercent: 101}}",
        "spec.speculation.suffix.minTokenProbabilityPercent",
        "less than or equal to 100",
    ),
    "lookup bounds the wrong way round": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 5, ngram: {promptLookupMin: 6, promptLookupMax: 2}}",
        "spec.speculation.ngram.promptLookupMin",
        "is 6, above promptLookupMax 2: lower it",
    ),
    "draft longer than the target": Bad(
        "serving: {maxModelLen: 4096}\n"
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: org/draft, maxModelLen: 8192}}",
        "spec.speculation.draft.maxModelLen",
        "is 8192, above serving.maxModelLen 4096: lower it",
    ),
    # K by batch size
    "schedule without a method": Bad(
        "speculation: {method: none, numSpeculativeTokensByBatchSize: [{from: 1, to: 8, numSpeculativeTokens: 5}]}",
        SCHEDULE,
        "remove it",
    ),
    "range ends before it begins": Bad(schedule((1, 8, 5), (20, 10, 3)), SCHEDULE, "must not be above its to"),
    "ranges overlap": Bad(schedule((1, 8, 5), (8, 16, 3)), SCHEDULE, "begin each after the to of the one before"),
    "ranges out of order": Bad(schedule((1, 4, 5), (9, 16, 1), (5, 8, 3)), SCHEDULE, "sort them by from"),
    "range asks for more than K": Bad(schedule((1, 8, 6)), SCHEDULE, "lower that range, or raise numSpeculativeTokens"),
    "range beyond maxNumSeqs": Bad(schedule((1, 257, 5)), SCHEDULE, "lower its to, or raise serving.maxNumSeqs"),
    # Accelerator and parallelism
    "CPU without cores": Bad(
        "accelerator: {type: CPU, memoryGiB: 16, kvCacheGiB: 4}",
        "spec.accelerator.cpuCores",
        "type CPU needs the cores",
    ),
    "CPU without memory": Bad(
        "accelerator: {type: CPU, cpuCores: 4, kvCacheGiB: 4}",
        "spec.accelerator.memoryGiB",
        "set it, to 16 for example",
    ),
    "CPU without KV cache": Bad(
        "accelerator: {type: CPU, cpuCores: 4, memoryGiB: 16}",
        "spec.accelerator.kvCacheGiB",
        "set it, to 4 for example",
    ),
    "cores on GPU": Bad("accelerator: {cpuCores: 4}", "spec.accelerator.cpuCores", "use type: CPU"),
    "memory on GPU": Bad("accelerator: {memoryGiB: 4}", "spec.accelerator.memoryGiB", "use type: CPU"),
    "KV cache on GPU": Bad("accelerator: {kvCacheGiB: 4}", "spec.accelerator.kvCacheGiB", "use type: CPU"),
    "product on CPU": Bad(
        "accelerator: {type: CPU, cpuCores: 4, memoryGiB: 16, kvCacheGiB: 4, products: [NVIDIA-H200]}",
        "spec.accelerator.products",
        "use type: GPU",
    ),
    "GPUs a node on CPU": Bad(
        "accelerator: {type: CPU, cpuCores: 4, memoryGiB: 16, kvCacheGiB: 4, perNode: 8}",
        "spec.accelerator.perNode",
        "use type: GPU",
    ),
    "memory a GPU on CPU": Bad(
        "accelerator: {type: CPU, cpuCores: 4, memoryGiB: 16, kvCacheGiB: 4, memoryGiBPerGPU: 48}",
        "spec.accelerator.memoryGiBPerGPU",
        "use type: GPU",
    ),
    "memory of no product": Bad(
        "accelerator: {memoryGiBPerGPU: 48}", "spec.accelerator.products", "memoryGiBPerGPU needs the products"
    ),
    "claim on CPU": Bad(
        "accelerator: {type: CPU, cpuCores: 4, memoryGiB: 16, kvCacheGiB: 4, resourceClaim: {deviceClassName: a}}",
        "spec.accelerator.resourceClaim",
        "use type: GPU",
    ),
    "claim without a class": Bad(
        "accelerator: {resourceClaim: {}}", "spec.accelerator.resourceClaim.deviceClassName", "Required"
    ),
    "class with a blank": Bad(
        "accelerator: {resourceClaim: {deviceClassName: 'a b'}}",
        "spec.accelerator.resourceClaim.deviceClassName",
        "should match",
    ),
    "devices without tensor": Bad(
        "accelerator: {resourceClaim: {deviceClassName: a, count: 2}}",
        "spec.accelerator.resourceClaim.count",
        "remove count to let the plan choose both",
    ),
    "devices that do not divide the replica": Bad(
        "accelerator: {resourceClaim: {deviceClassName: a, count: 3}}\nparallelism: {tensor: 2, data: 2}",
        "spec.accelerator.resourceClaim.count",
        "does not divide the 4 GPUs",
    ),
    "KV cache takes all memory": Bad(
        "accelerator: {type: CPU, cpuCores: 4, memoryGiB: 4, kvCacheGiB: 4}",
        "spec.accelerator.kvCacheGiB",
        "leaves no room for weights in memoryGiB 4: lower it",
    ),
    "product twice": Bad(
        "accelerator: {products: [NVIDIA-H200, NVIDIA-H100-NVL, NVIDIA-H200]}",
        "spec.accelerator.products",
        "remove one",
    ),
    "product with a blank": Bad(
        "accelerator: {products: [NVIDIA H200]}", "spec.accelerator.products[0]", "should match"
    ),
    "stages on CPU": Bad(
        "parallelism: {pipeline: 2}\naccelerator: {type: CPU, cpuCores: 8, memoryGiB: 16, kvCacheGiB: 4}",
        "spec.parallelism",
        "a replica on CPU can only be split by tensor: remove the others",
    ),
    "part of a GiB for a rank": Bad(
        "parallelism: {tensor: 2}\naccelerator: {type: CPU, cpuCores: 8, memoryGiB: 16, kvCacheGiB: 3}",
        "spec.accelerator.kvCacheGiB",
        "is 3, not a multiple of parallelism.tensor 2: use a multiple, so that ranks get equal shares",
    ),
    "experts on CPU": Bad(
        "parallelism: {expert: true}\naccelerator: {type: CPU, cpuCores: 8, memoryGiB: 16, kvCacheGiB: 4}",
        "spec.parallelism",
        "a replica on CPU can only be split by tensor: remove the others",
    ),
    "no stage": Bad("parallelism: {pipeline: 0}", "spec.parallelism.pipeline", "greater than or equal to 1"),
    "too many copies": Bad("parallelism: {data: 65}", "spec.parallelism.data", "less than or equal to 64"),
    "graphs of an eager engine": Bad(
        "serving: {enforceEager: true, maxCudagraphCaptureSize: 64}",
        "spec.serving.maxCudagraphCaptureSize",
        "there are no CUDA graphs with enforceEager: remove one of the two",
    ),
    "kind of graphs of an eager engine": Bad(
        "serving: {enforceEager: true, cudagraphMode: PIECEWISE}",
        "spec.serving.cudagraphMode",
        "there are no CUDA graphs with enforceEager: remove one of the two",
    ),
    "size of graphs that are off": Bad(
        "serving: {cudagraphMode: NONE, maxCudagraphCaptureSize: 64}",
        "spec.serving.maxCudagraphCaptureSize",
        "there are no CUDA graphs with cudagraphMode NONE: remove one of the two",
    ),
    "made-up acceptance": Bad(
        speculation("numSpeculativeTokens: 5, rejectionSampling: synthetic"),
        "spec.speculation.rejectionSampling",
        'Unsupported value: "synthetic": supported values: "standard", "block", "fly"',
    ),
    "an update in place of no trained heads": Bad(
        speculation("numSpeculativeTokens: 5, draftUpdate: InPlace"),
        "spec.speculation.draftUpdate",
        "InPlace only applies to trained heads: set trainedDrafts: true",
    ),
    "an unknown way to update": Bad(
        speculation("numSpeculativeTokens: 5, trainedDrafts: true, draftUpdate: Hot"),
        "spec.speculation.draftUpdate",
        'Unsupported value: "Hot": supported values: "Restart", "InPlace"',
    ),
    "loss that nobody accepted": Bad(
        speculation("numSpeculativeTokens: 5, rejectionSampling: fly"),
        "spec.speculation.lossy",
        "rejectionSampling fly changes the answers of the target: set lossy: true to accept that",
    ),
    "loss of nothing": Bad(
        speculation("numSpeculativeTokens: 5, rejectionSampling: block, lossy: true"),
        "spec.speculation.lossy",
        "only applies to rejectionSampling fly: remove it",
    ),
    "loss in other words": Bad(
        speculation("numSpeculativeTokens: 5, rejectionSampling: fly, lossy: maybe"),
        "spec.speculation.lossy",
        "boolean",
    ),
    "a check of the tokens after the only one": Bad(
        speculation("numSpeculativeTokens: 1, rejectionSampling: fly, lossy: true"),
        "spec.speculation.rejectionSampling",
        "fly needs tokens after a rejected one: set numSpeculativeTokens to 2 or more",
    ),
    "sampling without a draft": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 3, draftSampling: probabilistic}",
        "spec.speculation.draftSampling",
        "method ngram has no draft that could sample: remove it, or choose a method with a draft",
    ),
    "costs of a lookup": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 3, adaptiveVerification: true}",
        "spec.speculation.adaptiveVerification",
        "method ngram has no draft that reports its confidence: remove it, or choose a method with a draft",
    ),
    "vocabulary of a lookup": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 3, useHeterogeneousVocab: true}",
        "spec.speculation.useHeterogeneousVocab",
        "method ngram drafts in the vocabulary of the target: remove it, or use method: draft_model",
    ),
    "samples of another vocabulary": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 3, draft: {model: org/draft}, "
        "useHeterogeneousVocab: true, draftSampling: probabilistic}",
        "spec.speculation.draftSampling",
        "a draft of another vocabulary proposes the likeliest tokens: remove it, or useHeterogeneousVocab",
    ),
    "XPress without a head": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 3, xpressTopC: 64}",
        "spec.speculation.xpressTopC",
        "method ngram has no XPress head: remove it, or use method: dflash with such a head",
    ),
    "output head of a lookup": Bad(
        "speculation: {method: ngram, numSpeculativeTokens: 3, draftLmHeadQuantization: fp8}",
        "spec.speculation.draftLmHeadQuantization",
        "method ngram has no copy of the output head of the target: remove it, or use method: eagle or mtp",
    ),
    "checking of nothing": Bad(
        "speculation: {method: none, rejectionSampling: block}",
        "spec.speculation.rejectionSampling",
        "has no effect with method none: remove it",
    ),
    "further keys of nothing": Bad(
        "speculation: {method: none, extraConfig: {enforce_eager: true}}",
        "spec.speculation.extraConfig",
        "has no effect with method none: remove it",
    ),
    "split of no draft": Bad(
        "parallelism: {tensor: 2, draftTensor: 2}\nspeculation: {method: ngram, numSpeculativeTokens: 3}",
        "spec.parallelism.draftTensor",
        "there is no draft to split: remove it",
    ),
    "draft split otherwise": Bad(
        f"parallelism: {{tensor: 4, draftTensor: 2}}\n{speculation('numSpeculativeTokens: 5')}",
        "spec.parallelism.draftTensor",
        "is 2, but vLLM accepts 1 or the value of tensor: write 1",
    ),
    "draft split without a tensor": Bad(
        f"parallelism: {{draftTensor: 2}}\n{speculation('numSpeculativeTokens: 5')}",
        "spec.parallelism.draftTensor",
        "or set parallelism.tensor to the same",
    ),
    "draft model in stages": Bad(
        f"parallelism: {{pipeline: 2}}\n{speculation('numSpeculativeTokens: 5')}",
        "spec.parallelism.pipeline",
        "is 2, but with method draft_model vLLM would build the draft from the layers of one stage",
    ),
    "schedule with copies": Bad(
        f"parallelism: {{data: 2}}\n{schedule((1, 8, 5))}", SCHEDULE, "or use replicas instead of data"
    ),
    # Serving
    "memory over 100 %": Bad(
        "serving: {gpuMemoryUtilizationPercent: 101}",
        "spec.serving.gpuMemoryUtilizationPercent",
        "less than or equal to 100",
    ),
    "fewer tokens than requests": Bad(
        "serving: {maxNumBatchedTokens: 128}",
        "spec.serving.maxNumBatchedTokens",
        "is 128, below maxNumSeqs 256: raise it, or lower maxNumSeqs",
    ),
    "more at once than may run": Bad(
        "serving: {maxNumSeqs: 4, minConcurrency: 8}", "spec.serving.minConcurrency", "lower it, or raise maxNumSeqs"
    ),
    "served name twice": Bad("serving: {servedModelNames: [a, a]}", "spec.serving.servedModelNames", "remove one"),
    "served name with a tab": Bad(
        'serving: {servedModelNames: ["a\\tb"]}', "spec.serving.servedModelNames[0]", "should match"
    ),
    "served name like an option": Bad(
        "serving: {servedModelNames: [--x]}", "spec.serving.servedModelNames[0]", "should match"
    ),
    "port that needs root": Bad("serving: {port: 80}", "spec.serving.port", "greater than or equal to 1024"),
    "secret with a bad name": Bad(
        "serving: {apiKeySecret: {name: My_Secret, key: key}}", "spec.serving.apiKeySecret.name", "should match"
    ),
    **MODELS,
    # Engine
    # Of a message with a line break in it the API server shows nothing, and the rule instead.
    "image with a line break": Bad(
        'engine: {image: "host:5000/vl\\nlm:v1"}',
        "spec.engine.image",
        "not an image with a tag or a digest: add a tag (:v1) or a digest",
    ),
    "image without tag": Bad("engine: {image: 'host:5000/vllm'}", "spec.engine.image", "add a tag (:v1) or a digest"),
    "version in words": Bad("engine: {version: latest}", "spec.engine.version", "should match"),
    "variable twice": Bad(
        "engine: {env: [{name: A, value: one}, {name: A, value: two}]}", "spec.engine.env[1]", "Duplicate"
    ),
    "variable with a value and a source": Bad(
        "engine: {env: [{name: A, value: one, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]}",
        "spec.engine.env[0].valueFrom",
        "the variable A also has a value: remove one of them",
    ),
    "variable with two sources": Bad(
        "engine: {env: [{name: A, valueFrom:"
        " {fieldRef: {fieldPath: status.podIP}, secretKeyRef: {name: one, key: two}}}]}",
        "spec.engine.env[0].valueFrom",
        "the variable A must have one source: set exactly one of",
    ),
    "variable without a source": Bad(
        "engine: {env: [{name: A, valueFrom: {}}]}",
        "spec.engine.env[0].valueFrom",
        "the variable A must have one source: set exactly one of",
    ),
    "variable with a field that pods do not offer": Bad(
        "engine: {env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.phase}}}]}",
        "spec.engine.env[0].valueFrom.fieldRef.fieldPath",
        "should match",
    ),
    "variable with an unknown resource": Bad(
        "engine: {env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.gpu}}}]}",
        "spec.engine.env[0].valueFrom.resourceFieldRef.resource",
        "should match",
    ),
    "variable with another divisor": Bad(
        "engine: {env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 2Mi}}}]}",
        "spec.engine.env[0].valueFrom.resourceFieldRef.divisor",
        "should match",
    ),
    "variable with a blank": Bad("engine: {env: [{name: 'A B'}]}", "spec.engine.env[0].name", "should match"),
    **REPLAYS,
    # Captures by the clock
    "schedule of six fields": Bad(
        "captures: [{name: nightly, schedule: '0 0 3 * * *'}]", "spec.captures[0].schedule", "should match"
    ),
    "schedule without a time": Bad("captures: [{name: nightly}]", "spec.captures[0].schedule", "Required"),
    "schedule twice": Bad(
        "captures: [{name: nightly, schedule: 0 3 * * *}, {name: nightly, schedule: 0 4 * * *}]",
        "spec.captures[1]",
        "Duplicate",
    ),
    "retention of a claim that is given": Bad(
        "captures: [{name: nightly, schedule: 0 3 * * *, retention: {count: 3},"
        " template: {storage: {persistentVolumeClaim: {claimName: mine}}}}]",
        "spec.captures[0].retention",
        "names the existing claim mine: remove one of them",
    ),
    "queue of another form": Bad(
        "captures: [{name: nightly, schedule: 0 3 * * *, queue: {name: team/gpus}}]",
        "spec.captures[0].queue.name",
        "should match",
    ),
    "queue without a name": Bad(
        "captures: [{name: nightly, schedule: 0 3 * * *, queue: {priorityClass: low}}]",
        "spec.captures[0].queue.name",
        "Required",
    ),
    "scheduled phase without an end": Bad(
        "captures: [{name: nightly, schedule: 0 3 * * *,"
        " template: {workload: {phases: [{name: a, pattern: Closed, concurrency: 1}]}}}]",
        "spec.captures[0].template.workload.phases[0].durationSeconds",
        "set one of durationSeconds and requests",
    ),
    # Trainings of schedules
    "training without a budget": Bad(trains(budget=""), "spec.captures[0].training.gpuHoursPerMonth", "Required"),
    "training without answers": Bad(
        trains("source: Live, live: {durationSeconds: 60}"),
        "spec.captures[0].template.record.tokenIds",
        "set it to true",
    ),
    "training on live captures without prompts": Bad(
        trains("source: Live, live: {durationSeconds: 60}, record: {tokenIds: true}"),
        "spec.captures[0].template.record.promptTokenIds",
        "set it to true",
    ),
    "training on synthetic prompts": Bad(
        trains("record: {tokenIds: true}"),
        "spec.captures[0].template.workload.prompts",
        "set dataset to a file of text",
    ),
    "training on a trace": Bad(
        trains(
            "record: {tokenIds: true}, workload: {prompts: {dataset: {configMap: {name: a}, path: a, format: Trace}}}"
        ),
        "spec.captures[0].template.workload.prompts",
        "set dataset to a file of text",
    ),
    "training on captures that are deleted": Bad(
        trains(more=", successfulHistoryLimit: 0"), "spec.captures[0].successfulHistoryLimit", "set it to 1 or more"
    ),
    "two schedules that train on one claim": Bad(
        f"captures: [{trainer('a', training=ON_A_CLAIM)}, {trainer('b', training=ON_A_CLAIM)}]",
        "spec.captures",
        "name another claim in one of them",
    ),
    "starting head outside its volume": Bad(
        trains(training=", from: {model: ../a}"), "spec.captures[0].training.template.from.model", "without leading /"
    ),
    # The rest
    "fewer than no replicas": Bad("replicas: -1", "spec.replicas", "greater than or equal to 0"),
    "old name of products": Bad(
        "accelerator: {product: [NVIDIA-H200]}",
        "spec.accelerator.product",
        "was renamed to products: keep the list unchanged",
    ),
    "old name of gpuMemoryUtilizationPercent": Bad(
        "serving: {memoryUtilizationPercent: 90}",
        "spec.serving.memoryUtilizationPercent",
        "was renamed to gpuMemoryUtilizationPercent: keep the number unchanged",
    ),
    "old name of ignorePlan": Bad(
        "override: {planning: Ignore, reason: measured}",
        "spec.override.planning",
        "was renamed to ignorePlan: replace Ignore with true",
    ),
    "old name of persistentVolumeClaim": Bad(
        "captures: [{name: nightly, schedule: 0 3 * * *, template: {storage: {existingClaim: mine}}}]",
        "spec.captures[0].template.storage.existingClaim",
        "was renamed to persistentVolumeClaim: write the name into persistentVolumeClaim.claimName",
    ),
    "override without a reason": Bad("override: {ignorePlan: true}", "spec.override.reason", "Required"),
}
