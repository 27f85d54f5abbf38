"""Answers as data, for -o json and -o yaml: the keys that CI reads."""

from typing import Any

from specdecode_operator.cli.plan.answers import Answer, Answers, Candidate
from specdecode_operator.sizing.choice.quantization_matrix import MatrixRow


def plan_data(result: Answers) -> dict[str, Any]:
    """Return everything that `plan` knows: all candidates, whatever the table shows. Sizes are in bytes."""
    return {
        "verdict": result.verdict,
        "objects": [_object(answer) for answer in result.answers],
        "errors": [str(error) for error in result.errors],
    }


def _object(answer: Answer) -> dict[str, Any]:
    return {
        "name": answer.document.name,
        "namespace": (answer.document.body.get("metadata") or {}).get("namespace"),
        "place": answer.document.place,
        "verdict": answer.verdict,
        "explanation": answer.explanation,
        "choice": answer.choice or None,
        "candidates": [_candidate(candidate) for candidate in answer.matrix],
        "precisions": [_precision(row) for row in answer.precisions],
        "fixes": {
            candidate.label: [
                {
                    "change": fix.change,
                    "changes": [{"field": f"spec.{each.field}", "value": each.value} for each in fix.changes],
                    "verdict": fix.verdict.value,
                    "kv_cache_tokens": fix.tokens,
                    "max_concurrency": fix.concurrency,
                }
                for fix in candidate.fixes
            ]
            for candidate in answer.candidates
            if candidate.fixes
        },
        "advice": list(answer.advice),
        "problems": [
            {"field": problem.field, "value": problem.value, "message": problem.message} for problem in answer.problems
        ],
        "unknown_models": [{"model": each.source.model, "revision": each.source.revision} for each in answer.unknown],
        "read_models": [
            {"model": source.model, "revision": source.revision, "commit": checkpoint.commit}
            for source, checkpoint in answer.known.items()
        ],
    }


def _precision(row: MatrixRow) -> dict[str, Any]:
    budget = row.budget
    return {
        "target": row.target_precision.value,
        "draft": None if row.draft_precision is None else row.draft_precision.value,
        "kv_cache_dtype": row.kv_cache_dtype.value,
        "product": row.product,
        "gpus": row.gpus,
        "tensor": row.tensor,
        "verdict": row.verdict.value,
        "launchable": row.launchable,
        "reason": row.reason,
        "available_kv": None if budget is None else budget.available_kv_bytes,
        "kv_cache_tokens": None if budget is None else budget.kv_cache_tokens,
        "max_concurrency": None if budget is None else budget.max_concurrency,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    budget = candidate.budget
    return {
        "product": candidate.product,
        "gpus": candidate.gpus,
        "nodes": candidate.nodes,
        "tensor": candidate.tensor,
        "pipeline": candidate.split.pipeline,
        "data": candidate.split.data,
        "expert": candidate.split.expert,
        "target_precision": candidate.target_precision.value,
        "draft_precision": None if candidate.draft_precision is None else candidate.draft_precision.value,
        "verdict": candidate.verdict,
        "binding_term": None if budget.binding_term is None else budget.binding_term.value,
        "per_gpu": {
            "total": budget.total_bytes,
            "requested": budget.requested_bytes,
            "target_weights": budget.target_weights_bytes,
            "draft_weights": budget.draft_weights_bytes,
            "state": budget.state_bytes,
            "activation": budget.activation_bytes,
            "cuda_graphs": budget.cuda_graphs_bytes,
            "non_torch": budget.non_torch_bytes,
            "available_kv": budget.available_kv_bytes,
        },
        "needed_kv_bytes": budget.needed_kv_bytes,
        "margin_bytes": budget.margin_bytes,
        "calibrated": budget.calibrated,
        "correction_bytes": budget.correction_bytes,
        "calibration": budget.calibration,
        "kv_bytes_per_token": budget.kv_bytes_per_token,
        "kv_cache_tokens": budget.kv_cache_tokens,
        "max_concurrency": budget.max_concurrency,
    }
