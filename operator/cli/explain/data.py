"""What `explain` knows, as data."""

from specdecode_operator.cli.explain.explained import explained
from specdecode_operator.cli.outputs.explain import ExplainedOutput, ExplainOutput, FigureOutput, TermOutput
from specdecode_operator.cli.plan.answers import Answer, Answers
from specdecode_operator.cli.plan.data import problem_data
from specdecode_operator.sizing.memory.explain import Term


def explain_data(result: Answers) -> ExplainOutput:
    """Return how the memory of each object is counted."""
    return ExplainOutput(
        objects=[_object(answer) for answer in result.answers], errors=[str(error) for error in result.errors]
    )


def _object(answer: Answer) -> ExplainedOutput:
    told = explained(answer)
    return ExplainedOutput(
        name=answer.document.name,
        namespace=answer.document.namespace,
        place=answer.document.place,
        verdict=answer.verdict,
        explanation=answer.explanation,
        candidate=told and told.chosen.label,
        memory=[_term(term) for term in told.counted] if told else [],
        kv_cache=[FigureOutput(**figure._asdict()) for figure in told.figures] if told else [],
        judged=[_term(term) for term in told.judged] if told else [],
        problems=[problem_data(problem) for problem in answer.problems],
    )


def _term(term: Term) -> TermOutput:
    return TermOutput(name=term.name, bytes=term.size_bytes, formula=term.formula, source=term.source or None)
