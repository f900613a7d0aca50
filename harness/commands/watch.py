"""``kvcliff watch``: a run while it is measured."""

from harness.commands.arguments import RunPath


def watch(run: RunPath) -> None:
    """Follow a running experiment."""
    from harness.report.tables import Watching
    from harness.report.watch import watch as watch_run

    with Watching() as watching:
        watch_run(run, watching.show)
