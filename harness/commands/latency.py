"""``kvcliff latency``: TTFT by token split."""

from harness import console
from harness.commands.arguments import AsJson, RunPath


def latency(run: RunPath, as_json: AsJson = False) -> None:
    """Fit TTFT to a run's token splits."""
    from harness.report.tables import show_latency
    from harness.verdict.latency import check_folder

    notes: list[str] = []
    check = check_folder(run, notes)
    if as_json:
        console.show_json(check.as_json())
    else:
        show_latency(check)
    for note in notes:
        console.say(note)
