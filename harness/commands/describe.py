"""``kvcliff describe``: size, reuse and shape of a trace."""

from harness.commands.arguments import AsJson
from harness.commands.trace_arguments import TraceArguments, show_answer, trace_options


def describe(source: TraceArguments, as_json: AsJson = False) -> None:
    """Say what a trace holds."""
    from harness.traces.describe import describe_trace
    from harness.traces.tables import ReadProgress

    with ReadProgress() as reading:
        content = describe_trace(source.trace, trace_options(source), progress=reading.show)
    show_answer(content, as_json=as_json)
