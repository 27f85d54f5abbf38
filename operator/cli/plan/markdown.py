"""The answers of `plan` as Markdown, for the summary of a CI job."""

from collections.abc import Iterator

from specdecode_operator.cli.outputs.markdown import code, limited, table
from specdecode_operator.cli.plan.answers import FITS, Answer, Answers
from specdecode_operator.cli.plan.text import capacity, gib

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
    """What is not as it should be, with what helps."""
    name = code(answer.document.qualified_name)
    if answer.verdict != FITS:
        # The sentence goes on with its fixes, which are listed here.
        reason = answer.explanation.partition("; ")[0] if answer.candidates else answer.explanation
        yield f"- **{answer.verdict}** {name} ({code(answer.document.place)}): {code(reason)}"
        for each in answer.candidates:
            yield from (f"  - {code(each.label)}: {code(fix.change)}, then {code(fix.effect)}" for fix in each.fixes)
    yield from (f"- **warning** {name}: {code(warning)}" for warning in answer.warnings)
