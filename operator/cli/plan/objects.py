"""Read the objects that `specdecode plan` plans, and print the answers."""

from collections.abc import Sequence
from typing import Final

from specdecode_operator.cli.deployment_options import Description
from specdecode_operator.cli.input_files import Reading, foreign_converter, read_deployments
from specdecode_operator.cli.options import PlanForm, TableOrData
from specdecode_operator.cli.outputs import print_data
from specdecode_operator.cli.plan.answers import Answers
from specdecode_operator.cli.plan.text import plan_markdown, plan_text, summary_lines
from specdecode_operator.cli.terminal import line_width, say, say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile

_PIPED_WIDTH: Final = 100
"""Line width of formulas outside a terminal."""


def described_or_read(description: Description, files: Sequence[str]) -> Reading:
    """Return the object that the options describe or, without such options, the objects in the files."""
    with_files = Description(gpu=description.gpu, engine_version=description.engine_version)
    if description.is_empty or (files and description == with_files):
        return _with_version(
            read_deployments(files, foreign_converter(description.engine_version)), description.engine_version
        )
    if files:
        why = f"options that describe an object cannot be combined with files ({files[0]}): use one or the other"
        return Reading((), (DocumentError(why),))
    try:
        return Reading((description.document(),), ())
    except DocumentError as error:
        return Reading((), (error,))


def _with_version(reading: Reading, version: str | None) -> Reading:
    """Reject --engine-version for our own objects, which have a field for it."""
    ours = next((each for each in reading.documents if each.foreign is None), None)
    if version is None:
        return reading
    try:
        find_profile(version)
    except UnknownEngineVersionError as error:
        return Reading((), (DocumentError(f"--engine-version: {version}: {error.problem.message}"),))
    if ours is None:
        return reading
    why = f"--engine-version: {version}: {ours.name} ({ours.place}) has spec.engine.version: set it there"
    return Reading((), (DocumentError(why),))


def say_notes(reading: Reading, *, gpu: bool) -> None:
    """Print the plan's assumptions about objects of other projects, and the objects that it leaves out, to stderr."""
    notes = [*reading.notes]
    if any(each.foreign is not None for each in reading.documents):
        from specdecode_operator.cli.foreign_objects import assumption_notes  # noqa: PLC0415

        notes = [*assumption_notes(reading.documents, gpu=gpu), *notes]
    for note in notes:
        say_line(f"note: {note}", err=True)


def print_answers(result: Answers, output: PlanForm, *, explain: bool, matrix: bool) -> None:
    """Print the answers in a format."""
    if output is PlanForm.MARKDOWN:
        say(plan_markdown(result, matrix=matrix))
    elif explain:
        from specdecode_operator.cli.plan.data import explain_data, explain_text  # noqa: PLC0415

        if output is PlanForm.TABLE:
            texts = [explain_text(each, line_width() or _PIPED_WIDTH) for each in result.answers]
            say("\n\n".join(texts), nl=bool(texts), verdicts=True)
        else:
            print_data(explain_data(result), TableOrData(output.value))
    elif output is not PlanForm.TABLE:
        from specdecode_operator.cli.plan.data import plan_data  # noqa: PLC0415

        print_data(plan_data(result), TableOrData(output.value))
    elif matrix or len(result.answers) == 1:
        texts = [plan_text(each, matrix=matrix, width=line_width()) for each in result.answers]
        say("\n\n".join(texts), nl=bool(texts), verdicts=True)
    elif result.answers:
        say("\n".join(summary_lines(result.answers)), verdicts=True)
