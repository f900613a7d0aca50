"""``kvcliff describe``: size, reuse and shape of a trace."""

from harness.commands.arguments import AsJson
from harness.commands.trace_arguments import TraceArguments, load_trace, show_answer


def describe(source: TraceArguments, as_json: AsJson = False) -> None:
    """Say what a trace holds."""
    from harness.traces.describe import description

    show_answer(description(load_trace(source)), as_json=as_json)
