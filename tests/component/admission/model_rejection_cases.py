"""Specs whose models the API server refuses."""

from tests.component.admission.bad_spec import VOLUME, Bad

DRAFT_CLAIM = "persistentVolumeClaim: {claimName: trained}"

MODELS = {
    "nothing assumed": Bad(
        "target: {model: org/m, assume: {}}", "spec.target.assume.weightsGiB", "set at least one, or remove assume"
    ),
    "weights that are no decimal": Bad(
        "target: {model: org/m, assume: {weightsGiB: 14 GiB}}", "spec.target.assume.weightsGiB", "should match"
    ),
    "a token of no bytes": Bad(
        "target: {model: org/m, assume: {kvBytesPerToken: 0}}",
        "spec.target.assume.kvBytesPerToken",
        "greater than or equal to 1",
    ),
    "target is a path without a volume": Bad(
        "target: {model: /models/llama}", "spec.target.model", "set models.volume"
    ),
    "draft is a path without a volume": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: ../draft}}",
        "spec.speculation.draft.model",
        "write OWNER/NAME",
    ),
    "target from the root": Bad(
        f"target: {{model: /llama}}\nmodels: {{volume: {VOLUME}}}", "spec.target.model", "without leading /"
    ),
    "target leaves the volume": Bad(
        f"target: {{model: a/../../etc}}\nmodels: {{volume: {VOLUME}}}", "spec.target.model", "without .."
    ),
    "revision in a volume": Bad(
        f"target: {{model: llama, revision: main}}\nmodels: {{volume: {VOLUME}}}", "spec.target.revision", "remove one"
    ),
    "draft like an option": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: -draft}}\n"
        f"models: {{volume: {VOLUME}}}",
        "spec.speculation.draft.model",
        "without leading / or -",
    ),
    "draft's revision in a volume": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: draft, revision: main}}\n"
        f"models: {{volume: {VOLUME}}}",
        "spec.speculation.draft.revision",
        "remove one",
    ),
    "draft leaves its claim": Bad(
        f"speculation: {{method: eagle3, numSpeculativeTokens: 5, draft: {{model: ../head, {DRAFT_CLAIM}}}}}",
        "spec.speculation.draft.model",
        "not a path inside speculation.draft.persistentVolumeClaim",
    ),
    "draft is absolute in its claim": Bad(
        f"speculation: {{method: eagle3, numSpeculativeTokens: 5, draft: {{model: /head, {DRAFT_CLAIM}}}}}",
        "spec.speculation.draft.model",
        "without leading /",
    ),
    "draft's revision in its claim": Bad(
        "speculation: {method: eagle3, numSpeculativeTokens: 5, draft: {model: head, revision: main,"
        f" {DRAFT_CLAIM}}}}}",
        "spec.speculation.draft.revision",
        "remove one",
    ),
    "draft's checkpoints beside its claim": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: d, checkpoints:"
        f" [{{quantization: INT4, model: org/x}}], {DRAFT_CLAIM}}}}}",
        "spec.speculation.draft.checkpoints",
        "remove one",
    ),
    "draft's claim without a name": Bad(
        "speculation: {method: eagle3, numSpeculativeTokens: 5, draft: {model: d, persistentVolumeClaim: {}}}",
        "spec.speculation.draft.persistentVolumeClaim.claimName",
        "Required",
    ),
    "draft is a folder inside a repository": Bad(
        "speculation: {method: dflash, numSpeculativeTokens: 5, draft: {model: org/m/dflash}}",
        "spec.speculation.draft.model",
        "copy the folder to a volume",
    ),
    "checkpoint that is no hub id": Bad(
        "target: {model: org/m, checkpoints: [{quantization: INT4, model: a/b/c}]}",
        "spec.target.checkpoints",
        "write OWNER/NAME",
    ),
    "checkpoint outside of the volume": Bad(
        f"target: {{model: m, checkpoints: [{{quantization: INT4, model: ../x}}]}}\nmodels: {{volume: {VOLUME}}}",
        "spec.target.checkpoints",
        "without ..",
    ),
    "checkpoint's revision in a volume": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: d,"
        " checkpoints: [{quantization: INT4, model: x, revision: main}]}}\n"
        f"models: {{volume: {VOLUME}}}",
        "spec.speculation.draft.checkpoints",
        "remove one",
    ),
    "target's checkpoint's revision in a volume": Bad(
        "target: {model: m, checkpoints: [{quantization: INT4, model: x, revision: main}]}\n"
        f"models: {{volume: {VOLUME}}}",
        "spec.target.checkpoints",
        "remove one",
    ),
    "draft's checkpoint that is no hub id": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: org/d,"
        " checkpoints: [{quantization: INT4, model: a/b/c}]}}",
        "spec.speculation.draft.checkpoints",
        "write OWNER/NAME",
    ),
    "draft's checkpoint outside of the volume": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 5, draft: {model: d,"
        " checkpoints: [{quantization: INT4, model: ../x}]}}\n"
        f"models: {{volume: {VOLUME}}}",
        "spec.speculation.draft.checkpoints",
        "without ..",
    ),
    "adapter that is no hub id": Bad(
        "adapters: [{name: a, model: a/b/c, rank: 8}]", "spec.adapters", "write OWNER/NAME"
    ),
    "adapter outside of its volume": Bad(
        f"adapters: [{{name: a, model: ../a, rank: 8, {DRAFT_CLAIM}}}]", "spec.adapters", "without .."
    ),
    "adapter's revision in a volume": Bad(
        f"adapters: [{{name: a, model: a, rank: 8, revision: main, {DRAFT_CLAIM}}}]", "spec.adapters", "remove one"
    ),
    "adapter with a name of the target": Bad(
        "adapters: [{name: a, model: org/a, rank: 8}]\nserving: {servedModelNames: [b, a]}",
        "spec.adapters",
        "rename one",
    ),
    "two adapters of one name": Bad(
        "adapters: [{name: a, model: org/a, rank: 8}, {name: a, model: org/b, rank: 8}]",
        "spec.adapters[1]",
        "Duplicate",
    ),
    "adapter without a rank": Bad("adapters: [{name: a, model: org/a}]", "spec.adapters[0].rank", "Required"),
    "adapter beyond the engine's largest rank": Bad(
        "adapters: [{name: a, model: org/a, rank: 513}]", "spec.adapters[0].rank", "less than or equal to 512"
    ),
    "adapter of a module with a space": Bad(
        "adapters: [{name: a, model: org/a, rank: 8, targetModules: ['q proj']}]",
        "spec.adapters[0].targetModules[0]",
        "should match",
    ),
    "slots without adapters": Bad("adapterSlots: {gpu: 1}", "spec.adapterSlots", "set adapters"),
    "rank that vLLM does not know": Bad(
        "adapters: [{name: a, model: org/a, rank: 8}]\nadapterSlots: {maxRank: 24}",
        "spec.adapterSlots.maxRank",
        "use 1, 8, 16, 32",
    ),
    "slots of too low a rank": Bad(
        "adapters: [{name: a, model: org/a, rank: 9}]\nadapterSlots: {maxRank: 8}",
        "spec.adapterSlots.maxRank",
        "below the rank of an adapter",
    ),
    "fewer adapters on the host": Bad(
        "adapters: [{name: a, model: org/a, rank: 8}]\nadapterSlots: {gpu: 2, host: 1}",
        "spec.adapterSlots.host",
        "raise it, or lower gpu",
    ),
    "two checkpoints of one precision": Bad(
        "target: {model: org/m, checkpoints: [{quantization: INT4, model: org/a}, {quantization: INT4, model: org/b}]}",
        "spec.target.checkpoints[1]",
        "Duplicate",
    ),
    "unknown objective": Bad("objective: Speed", "spec.objective", '"Quality", "Capacity", "Cost"'),
    "temperature as a number": Bad("workload: {temperature: 0.7}", "spec.workload.temperature", "string"),
    "temperature too high": Bad('workload: {temperature: "3.5"}', "spec.workload.temperature", "should match"),
    "hub token with a volume": Bad(
        f"models: {{volume: {VOLUME}, hubTokenSecret: {{name: hub, key: token}}}}",
        "spec.models.hubTokenSecret",
        "has no effect with models.volume, which is not downloaded: remove one",
    ),
    "volume is nothing": Bad("models: {volume: {}}", "spec.models.volume.persistentVolumeClaim", "or an image"),
    "volume is two things": Bad(
        "models: {volume: {persistentVolumeClaim: {claimName: a}, hostPath: {path: /srv}}}",
        "spec.models.volume.hostPath",
        "remove it",
    ),
    "volume is a claim and an image": Bad(
        "models: {volume: {persistentVolumeClaim: {claimName: a}, image: {reference: 'a:v1'}}}",
        "spec.models.volume.image",
        "remove it",
    ),
    "image of models without a tag": Bad(
        "models: {volume: {image: {reference: registry.example.com/models/llama}}}",
        "spec.models.volume.image.reference",
        "add a tag (:v1) or a digest",
    ),
    "image of models with a scheme": Bad(
        "models: {volume: {image: {reference: 'https://registry.example.com/models/llama:v1'}}}",
        "spec.models.volume.image.reference",
        "leave out https://",
    ),
    "draft's path leaves its image": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 3,"
        " draft: {model: ../head, image: {reference: 'a:v1'}}}",
        "spec.speculation.draft.model",
        "not a path inside speculation.draft.image",
    ),
    "revision of a draft on an image": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 3,"
        " draft: {model: head, revision: main, image: {reference: 'a:v1'}}}",
        "spec.speculation.draft.revision",
        "has no effect with speculation.draft.image",
    ),
    "draft on a claim and an image": Bad(
        "speculation: {method: draft_model, numSpeculativeTokens: 3,"
        " draft: {model: head, persistentVolumeClaim: {claimName: a}, image: {reference: 'a:v1'}}}",
        "spec.speculation.draft.image",
        "remove it",
    ),
    "model at the root of an image without a name": Bad(
        "target: {model: .}\nmodels: {volume: {image: {reference: 'a:v1'}}}",
        "spec.serving.servedModelNames",
        "write the name that clients use",
    ),
    "node's directory is relative": Bad(
        "models: {volume: {hostPath: {path: srv/models}}}", "spec.models.volume.hostPath.path", "beginning with /"
    ),
    "node's directory climbs": Bad(
        "models: {volume: {hostPath: {path: /srv/models/../../etc}}}",
        "spec.models.volume.hostPath.path",
        "without . or ..",
    ),
    "cache without a claim": Bad("models: {cache: {}}", "spec.models.cache.persistentVolumeClaim", "Required"),
    "cache on the volume's claim": Bad(
        f"models: {{volume: {VOLUME}, cache: {VOLUME}}}",
        "spec.models.cache.persistentVolumeClaim.claimName",
        "name another",
    ),
    "certificate without a name": Bad("serving: {tlsSecret: {}}", "spec.serving.tlsSecret.name", "Required"),
}
