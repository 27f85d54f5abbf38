"""Format plans as text and tables, and as Markdown for a CI job summary."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from specdecode_operator.cli.outputs import code, limited, table
from specdecode_operator.cli.plan.answers import (
    DOES_NOT_FIT,
    FITS,
    TIGHT,
    Answer,
    Answers,
    Candidate,
    PlannedStartup,
    duration,
    precision_pair,
    shown_precisions,
)
from specdecode_operator.cli.terminal import aligned, folded
from specdecode_operator.deployment.models.checkpoints import short_name
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.geometry import ModelGeometry, precision_name
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.placement import calibration_phrase, capacity_phrase, place_phrase
from specdecode_operator.sizing.plan import NO_CHANGE_HELPS, least_change, least_change_title
from specdecode_operator.sizing.quantization_matrix import MatrixRow, best_places
from specdecode_operator.sizing.startup_time import Phase, Seconds

ACCURACY_PAGE: Final = "How accurate sizing is"
ESTIMATED_PAGE: Final = "Models without an exact memory model"
"""Title of the documentation page about the margin and its sources."""


def plan_text(answer: Answer, *, matrix: bool, width: int | None = None) -> str:
    """Return the text for one object, with sentences folded to ``width``."""
    facts, candidates = answer.facts, answer.candidates
    if facts is None:
        what = "names models that are unknown here" if answer.unknown else "is invalid"
        if answer.document.foreign is not None and answer.document.foreign.error is not None:
            what = f"cannot be read from this {answer.document.kind}"
        lines = [f"{answer.document.name} {what} ({answer.document.place}):"]
        return "\n".join([*lines, *(f"  {problem}" for problem in answer.problems)])
    parts = [folded(heading(answer, facts), width)]
    if not candidates:
        parts.append(folded(f"{answer.verdict}: {answer.explanation}", width))
    else:
        chosen = candidates[0]
        conclusion = f"Runs on {chosen.label}{', but tight' if chosen.verdict != FITS else ''}: " + capacity_phrase(
            chosen.budget, facts.pair.limits.max_model_len, chosen.split
        )
        if chosen.verdict == DOES_NOT_FIT:
            least = least_change(chosen.fixes)
            helps = f"{least_change_title(least)}: {least.change}" if least else NO_CHANGE_HELPS
            conclusion = f"Does not fit on {chosen.label}; {helps}"
        parts[0] += folded(conclusion, width)
        parts.append(_table(answer.matrix if matrix else candidates, facts, by_row=matrix))
        if matrix and answer.precisions:
            parts.append(_precisions(best_places(shown_precisions(answer, facts), facts.options.objective)))
    startup = [] if answer.startup is None else [_startup(answer.startup)]
    if remarks := [*startup, *_remarks(answer, facts)]:
        # Rows of a table are not folded.
        parts.append([each for line in remarks for each in ([line] if line[:1] == " " else folded(line, width))])
    return "\n\n".join("\n".join(part) for part in parts)


def _remarks(answer: Answer, facts: Facts) -> Iterator[str]:
    budgets = [each.budget for each in answer.candidates]
    where = f' (documentation: "{ACCURACY_PAGE}")'
    if margins := [each.margin_bytes for each in budgets if not (facts.on_cpu or each.calibrated or each.calibration)]:
        kept = f"so the plan keeps a margin of {gib(max(margins))} GiB per GPU{where}"
        yield f"No public log confirms the estimates for vLLM {facts.profile.version}, {kept}"
    if kept_bytes := max((each.estimated_margin_bytes for each in budgets), default=0):
        where = f'(documentation: "{ESTIMATED_PAGE}")'
        yield f"{gib(kept_bytes)} GiB per GPU of the margin are for estimated models {where}"
    for each in answer.candidates:
        if each.verdict == DOES_NOT_FIT:
            # The rest of the explanation is the first fix. All fixes follow as a list.
            reason = each.explanation.partition("; ")[0]
            yield f"{reason}. Smallest change first:" if each.fixes else f"{reason}; {NO_CHANGE_HELPS}"
            if each.fixes:
                yield from aligned([(fix.change, f"-> {fix.effect}") for fix in each.fixes], left=2)
    for each in answer.candidates:
        if (phrase := calibration_phrase(each.budget)) is not None:
            yield f"{each.label}: {phrase}"
    if answer.choice:
        yield f"Choice: {answer.choice}"
    # Warnings are on standard error.
    yield from (f"Advice: {advice}" for advice in answer.advice if advice not in answer.warnings)
    if answer.verdict == TIGHT:
        yield answer.explanation


def _startup(startup: PlannedStartup) -> str:
    """Return the estimated start-up time, with its phases."""

    def phases(of: Mapping[Phase, Seconds]) -> str:
        return ", ".join(f"{_PHASE_NAMES.get(phase, phase)} {_range(each)}" for phase, each in of.items())

    time = startup.time
    limit = "" if startup.deadline_s is None else f"; the startup probe allows {duration(startup.deadline_s)}"
    engine = f"{_range(time.engine_s)} ({phases(time.engine)}){limit}"
    return f"Estimated start-up: {phases(time.before)}, then the engine {engine}"


_PHASE_NAMES: Final = {Phase.IMAGE: "image pull"}


def _range(seconds: Seconds) -> str:
    fastest, slowest = duration(seconds.fastest), duration(seconds.slowest)
    unit = slowest.rpartition(" ")[2]
    return f"{fastest.removesuffix(f' {unit}')} to {slowest}" if seconds.fastest else f"up to {slowest}"


def summary_lines(answers: Sequence[Answer]) -> list[str]:
    """Return one line per object, with its file unless it fits."""
    rows = []
    for each in answers:
        place = "" if each.verdict == FITS else f" ({each.document.place})"
        rows.append((each.document.qualified_name, each.verdict, f"{each.explanation}{place}"))
    return aligned(rows, left=3, indent="")


def heading(answer: Answer, facts: Facts, *, precisions: bool = True) -> str:
    """Return the title of an object: its name, models, speculation, vLLM version and length.

    Leave out the precisions if each row or bar shows its own.
    """
    pair = facts.pair

    def named(model: ModelGeometry, precision: Precision | None) -> str:
        shown = f" {precision_name(precision, pair.limits.dtype_bytes)}" if precisions and precision is not None else ""
        known = "" if model.knowledge is Knowledge.EXACT else f" ({model.knowledge.value})"
        return f"{short_name(model.name)}{shown}{known}"

    models = named(pair.target, pair.target_precision)
    if pair.draft is not None:
        models += f" + draft {named(pair.draft, pair.draft_precision)}"
    elif pair.num_speculative_tokens:
        models += f" + {pair.method}"
    speculation = f", K={pair.num_speculative_tokens}" if pair.num_speculative_tokens else ", no speculation"
    version = facts.profile.version + ("" if facts.profile.tested else ", sized as the newest known version")
    return f"{answer.document.name}   {models}{speculation}, vLLM {version}, length {pair.limits.max_model_len}"


def gib(size_bytes: int) -> str:
    """Return a size in GiB with two decimals, and ``0.00`` for ``-0.00``."""
    text = f"{size_bytes / GIB:,.2f}"
    return "0.00" if text == "-0.00" else text


def _table(candidates: Sequence[Candidate], facts: Facts, *, by_row: bool) -> list[str]:
    """Return a table with one column per candidate or, ``by_row``, with one row."""
    copy, percent = candidates[0].split.each_copy, facts.pair.limits.memory_utilization_percent
    unit, engine, held = "GiB per GPU", "state, activation, graphs, NCCL", f"tokens / full requests{copy}"
    has_adapters = facts.pair.adapters is not None
    loaded = ["target weights", "draft weights", *(["LoRA adapters"] if has_adapters else [])]
    labels = [f"budget ({percent} %)", *loaded, engine, "left for KV cache"]
    if by_row:
        loaded = ["target", "draft", *(["adapters"] if has_adapters else [])]
        held, labels = f"tokens / requests{copy}", ["budget", *loaded, "engine", "left for KV"]
    elif facts.on_cpu:
        unit = "GiB per rank" if (facts.spec.parallelism.tensor or 1) > 1 else "GiB per replica"
        labels = ["memory needed", *loaded, "engine", "KV cache"]
    rows = [(unit, *labels, held, "verdict")]
    for each in candidates:
        budget = each.budget
        weights = (budget.target_weights_bytes, budget.draft_weights_bytes)
        adapters = (budget.adapters_bytes,) if has_adapters else ()
        sizes = (budget.requested_bytes, *weights, *adapters, budget.engine_bytes, budget.available_kv_bytes)
        rows.append((each.label, *map(gib, sizes), capacity(budget), each.verdict))
    if by_row:
        return aligned(rows)
    has_draft = any(each.budget.draft_weights_bytes for each in candidates)
    return aligned([row for row in zip(*rows, strict=True) if has_draft or row[0] != "draft weights"])


def _precisions(rows: Sequence[MatrixRow]) -> list[str]:
    held = f"tokens / requests{rows[0].spread.each_copy if rows else ''}"
    lines = [("target / draft, KV cache", "GPUs", "weights", "left for KV", held, "verdict", "needs")]
    for row in rows:
        budget, sizes = row.budget, ("-", "-", "-")
        if budget is not None:
            sizes = (gib(budget.weights_bytes), gib(budget.available_kv_bytes), capacity(budget))
        name = f"{precision_pair(row, ' / ')}, {row.kv_cache_dtype}"
        place, needs = place_phrase(row.gpus, row.nodes, row.product), (row.reason or "").partition(":")[0]
        lines.append((name, place, *sizes, row.verdict.value, needs))
    return aligned(lines)


def capacity(budget: Budget) -> str:
    """Return the number of tokens and of full-length requests that a KV cache holds, or ``-`` for none."""
    if budget.kv_cache_tokens <= 0:
        return "-"
    return f"{budget.kv_cache_tokens:,} / {budget.max_concurrency:.1f}"


def plan_markdown(result: Answers, *, matrix: bool) -> str:
    """Return the verdict, a table of candidates with sizes per GPU, and remarks with fixes and warnings."""
    rows, remarks = [], []
    for answer in result.answers:
        name = answer.document.qualified_name
        for each in answer.matrix if matrix else answer.candidates:
            sizes = (gib(each.budget.weights_bytes), gib(each.budget.available_kv_bytes), capacity(each.budget))
            rows.append((name, each.label, each.verdict, *sizes))
        if answer.verdict != FITS:
            # The rest of the explanation is the first fix. All fixes follow as a list.
            reason = answer.explanation.partition("; ")[0] if answer.candidates else answer.explanation
            remarks.append(f"- **{answer.verdict}** {code(name)} ({code(answer.document.place)}): {code(reason)}")
            for each in answer.candidates:
                remarks += (
                    f"  - {code(each.label)}: {code(fix.change)}, then {code(fix.effect)}" for fix in each.fixes
                )
        remarks += (f"- **warning** {code(name)}: {code(warning)}" for warning in answer.warnings)
    remarks += (f"- **error** {code(error)}" for error in result.errors)
    titles = ("object", "on", "verdict", "weights GiB", "left for KV cache GiB", "tokens / full requests")
    parts = [[f"### specdecode plan: {result.verdict}"], table(titles, rows), limited(remarks)]
    return "\n\n".join("\n".join(part) for part in parts if part)
