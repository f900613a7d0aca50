"""``kvcliff reconcile``: every request of a run beside its prediction."""

import typer

from harness import console
from harness.commands.arguments import AsJson, RunPath
from harness.commands.derived import publish_again


def reconcile(run: RunPath, as_json: AsJson = False) -> None:
    """Check a run; exit code 1 when a check fails."""
    from harness.record.folder import RunFolder
    from harness.report.tables import show_findings
    from harness.verdict.findings import has_failed

    content = publish_again(RunFolder(run)).reconciliation
    if as_json:
        console.show_json(content.as_json())
    else:
        console.say(
            f"{content.requests_reconciled} of {content.requests_planned} requests reconciled"
        )
    show_findings(content.findings)
    raise typer.Exit(1 if has_failed(content.findings) else 0)
