"""The answers of `plan` as text and tables, and as Markdown for a CI job summary."""

from collections.abc import Iterator, Sequence
from typing import Final

from specdecode_operator.cli.outputs import code, limited, table
from specdecode_operator.cli.plan.answers import DOES_NOT_FIT, FITS, Answer, Answers, Candidate, shown_precisions
from specdecode_operator.cli.terminal import aligned, folded
from specdecode_operator.deployment.models.checkpoints import short_name
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import Knowledge
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.geometry import ModelGeometry, precision_name
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.placement import calibration_phrase, capacity_phrase, place_phrase
from specdecode_operator.sizing.plan import NO_CHANGE_HELPS, least_change
from specdecode_operator.sizing.quantization_matrix import MatrixRow, best_places

_ON_GPU: Final = ("GiB per GPU", "budget ({percent} %)", "state, activation, graphs, NCCL", "left for KV cache")
_ON_CPU: Final = ("GiB per replica", "memory needed", "engine", "KV cache")


def plan_text(answer: Answer, *, matrix: bool, width: int | None = None) -> str:
    """Return what `plan` prints for one object; sentences are folded where lines may only be so wide."""
    facts = answer.facts
    if facts is None:
        what = "is invalid" if not answer.unknown else "names models that are unknown here"
        lines = [f"{answer.document.name} {what} ({answer.document.place}):"]
        return "\n".join([*lines, *(f"  {problem}" for problem in answer.problems)])
    parts = [folded(heading(answer, facts), width)]
    if not answer.candidates:
        parts.append(folded(f"{answer.verdict}: {answer.explanation}", width))
    elif matrix:
        parts.append(_matrix(answer.matrix))
        if answer.precisions:
            parts.append(_precisions(_shown(answer, facts)))
    else:
        parts.append(_table(answer.candidates, facts))
    if answer.candidates:
        parts[0] += folded(_conclusion(facts, answer.candidates[0]), width)
    remarks = [] if facts.on_cpu else _unconfirmed(answer.candidates, facts)
    remarks += _margin_of_estimates(answer.candidates)
    remarks += [line for candidate in answer.candidates for line in _what_to_change(candidate)]
    remarks += [f"{candidate.label}: {phrase}" for candidate, phrase in _corrected(answer.candidates)]
    if answer.choice:
        remarks.append(f"Choice: {answer.choice}")
    # What is warned of stands on standard error.
    remarks += [f"Advice: {advice}" for advice in answer.advice if advice not in answer.warnings]
    if answer.verdict == "Tight":
        remarks.append(answer.explanation)
    if remarks:
        parts.append([line for remark in remarks for line in _folded_remark(remark, width)])
    return "\n\n".join("\n".join(part) for part in parts)


def _conclusion(facts: Facts, chosen: Candidate) -> str:
    capacity = capacity_phrase(chosen.budget, facts.pair.limits.max_model_len, chosen.split)
    if chosen.verdict == FITS:
        return f"Runs on {chosen.label}: {capacity}"
    if chosen.verdict != DOES_NOT_FIT:
        return f"Runs on {chosen.label}, but tight: {capacity}"
    least = least_change(chosen.fixes)
    return f"Does not fit on {chosen.label}; {f'smallest change: {least.change}' if least else NO_CHANGE_HELPS}"


def _folded_remark(remark: str, width: int | None) -> list[str]:
    return [remark] if remark.startswith(" ") else folded(remark, width)


def summary_lines(answers: Sequence[Answer]) -> list[str]:
    """Return one line an object, with its file where it does not simply fit."""
    return aligned(
        [(answer.document.qualified_name, answer.verdict, _told_with_place(answer)) for answer in answers],
        left=3,
        indent="",
    )


def _told_with_place(answer: Answer) -> str:
    return answer.explanation if answer.verdict == FITS else f"{answer.explanation} ({answer.document.place})"


def heading(answer: Answer, facts: Facts, *, precisions: bool = True) -> str:
    """Return the line that names an object, its models and what decides their memory.

    Precisions are left out where each row or bar has its own.
    """
    pair = facts.pair
    target, draft = (
        f" {precision_name(each, pair.limits.dtype_bytes)}" if precisions and each is not None else ""
        for each in (pair.target_precision, pair.draft_precision)
    )
    models = f"{short_name(pair.target.name)}{target}{_known(pair.target)}"
    if pair.draft is not None:
        models += f" + draft {short_name(pair.draft.name)}{draft}{_known(pair.draft)}"
    elif pair.num_speculative_tokens:
        models += f" + {pair.method}"
    speculation = f", K={pair.num_speculative_tokens}" if pair.num_speculative_tokens else ", no speculation"
    version = facts.profile.version + ("" if facts.profile.tested else ", sized as the newest known version")
    return f"{answer.document.name}   {models}{speculation}, vLLM {version}, length {pair.limits.max_model_len}"


def _known(model: ModelGeometry) -> str:
    return "" if model.knowledge is Knowledge.EXACT else f" ({model.knowledge.value})"


def gib(size_bytes: int) -> str:
    """Return a size in GiB with two decimals, never ``-0.00``."""
    text = f"{size_bytes / GIB:,.2f}"
    return "0.00" if text == "-0.00" else text


def engine_bytes(budget: Budget) -> int:
    """Return what the engine needs to run beside weights and KV cache."""
    return budget.state_bytes + budget.activation_bytes + budget.cuda_graphs_bytes + budget.non_torch_bytes


def _table(candidates: Sequence[Candidate], facts: Facts) -> list[str]:
    unit, budget, engine, kv_cache = _ON_CPU if facts.on_cpu else _ON_GPU
    if facts.on_cpu and (facts.spec.parallelism.tensor or 1) > 1:
        unit = "GiB per rank"
    budgets = [candidate.budget for candidate in candidates]
    rows = [
        (unit, *(candidate.label for candidate in candidates)),
        (
            budget.format(percent=facts.pair.limits.memory_utilization_percent),
            *(gib(each.requested_bytes) for each in budgets),
        ),
        ("target weights", *(gib(each.target_weights_bytes) for each in budgets)),
        ("draft weights", *(gib(each.draft_weights_bytes) for each in budgets)),
        (engine, *(gib(engine_bytes(each)) for each in budgets)),
        (kv_cache, *(gib(each.available_kv_bytes) for each in budgets)),
        (f"tokens / full requests{candidates[0].split.each_copy}", *(capacity(each) for each in budgets)),
        ("verdict", *(candidate.verdict for candidate in candidates)),
    ]
    if not any(candidate.budget.draft_weights_bytes for candidate in candidates):
        rows = [row for row in rows if row[0] != "draft weights"]
    return aligned(rows)


def _matrix(candidates: Sequence[Candidate]) -> list[str]:
    held = f"tokens / requests{candidates[0].split.each_copy}"
    heading = ("GiB per GPU", "budget", "target", "draft", "engine", "left for KV", held, "verdict")
    rows = [
        (
            candidate.label,
            gib(candidate.budget.requested_bytes),
            gib(candidate.budget.target_weights_bytes),
            gib(candidate.budget.draft_weights_bytes),
            gib(engine_bytes(candidate.budget)),
            gib(candidate.budget.available_kv_bytes),
            capacity(candidate.budget),
            candidate.verdict,
        )
        for candidate in candidates
    ]
    return aligned([heading, *rows])


def _shown(answer: Answer, facts: Facts) -> list[MatrixRow]:
    return best_places(shown_precisions(answer, facts), facts.options.objective)


def _precisions(rows: Sequence[MatrixRow]) -> list[str]:
    held = f"tokens / requests{rows[0].spread.each_copy if rows else ''}"
    heading = ("target / draft, KV cache", "GPUs", "weights", "left for KV", held, "verdict", "needs")
    lines = [
        (
            " / ".join(str(each) for each in (row.target_precision, row.draft_precision) if each is not None)
            + f", {row.kv_cache_dtype}",
            place_phrase(row.gpus, row.nodes, row.product),
            "-" if row.budget is None else gib(row.budget.weights_bytes),
            "-" if row.budget is None else gib(row.budget.available_kv_bytes),
            "-" if row.budget is None else capacity(row.budget),
            row.verdict.value,
            "" if row.reason is None else row.reason.partition(":")[0],
        )
        for row in rows
    ]
    return aligned([heading, *lines])


def capacity(budget: Budget) -> str:
    """Return how many tokens and requests of full length a KV cache holds; ``-`` for none."""
    if budget.kv_cache_tokens <= 0:
        return "-"
    return f"{budget.kv_cache_tokens:,} / {budget.max_concurrency:.1f}"


def _unconfirmed(candidates: Sequence[Candidate], facts: Facts) -> list[str]:
    margins = [
        each.budget.margin_bytes for each in candidates if not (each.budget.calibrated or each.budget.calibration)
    ]
    if not margins:
        return []
    kept = f"the plan keeps a margin of {gib(max(margins))} GiB per GPU (docs/explanation/accuracy.md)"
    return [f"Estimates for vLLM {facts.profile.version} are not confirmed by public logs, so {kept}"]


def _margin_of_estimates(candidates: Sequence[Candidate]) -> list[str]:
    kept = max((each.budget.estimated_margin_bytes for each in candidates), default=0)
    if not kept:
        return []
    return [f"{gib(kept)} GiB per GPU of this margin are for estimated models (docs/explanation/accuracy.md)"]


def _corrected(candidates: Sequence[Candidate]) -> list[tuple[Candidate, str]]:
    phrases = [(candidate, calibration_phrase(candidate.budget)) for candidate in candidates]
    return [(candidate, phrase) for candidate, phrase in phrases if phrase is not None]


def _what_to_change(candidate: Candidate) -> list[str]:
    if candidate.verdict != DOES_NOT_FIT:
        return []
    # The plan's sentence goes on with its fixes, which are listed here.
    reason = candidate.explanation.partition("; ")[0]
    if not candidate.fixes:
        return [f"{reason}; {NO_CHANGE_HELPS}"]
    rows = [(fix.change, f"-> {fix.effect}") for fix in candidate.fixes]
    return [f"{reason}. Smallest change first:", *aligned(rows, left=2)]


_HEADING = ("object", "on", "verdict", "weights GiB", "left for KV cache GiB", "tokens / full requests")


def plan_markdown(result: Answers, *, matrix: bool) -> str:
    """Return the verdict, a table of places, and what is to be changed or known; sizes are those of a GPU."""
    rows = [
        (
            answer.document.qualified_name,
            each.label,
            each.verdict,
            gib(each.budget.weights_bytes),
            gib(each.budget.available_kv_bytes),
            capacity(each.budget),
        )
        for answer in result.answers
        for each in (answer.matrix if matrix else answer.candidates)
    ]
    remarks = [line for answer in result.answers for line in _remarks(answer)]
    remarks += [f"- **error** {code(error)}" for error in result.errors]
    parts = [[f"### specdecode plan: {result.verdict}"], table(_HEADING, rows), limited(remarks)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _remarks(answer: Answer) -> Iterator[str]:
    name = code(answer.document.qualified_name)
    if answer.verdict != FITS:
        # The sentence goes on with its fixes, which are listed here.
        reason = answer.explanation.partition("; ")[0] if answer.candidates else answer.explanation
        yield f"- **{answer.verdict}** {name} ({code(answer.document.place)}): {code(reason)}"
        for each in answer.candidates:
            yield from (f"  - {code(each.label)}: {code(fix.change)}, then {code(fix.effect)}" for fix in each.fixes)
    yield from (f"- **warning** {name}: {code(warning)}" for warning in answer.warnings)
