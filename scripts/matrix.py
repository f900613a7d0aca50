"""Run the live matrix: every plan of harness/presets/matrix on the real engines, one after another.

    python scripts/matrix.py               # plans that have no run in results/matrix yet
    python scripts/matrix.py growth …      # these, again or not
    python scripts/matrix.py --table       # measure nothing: the table of the runs there are

Prints a table of all runs; exit code 1 when a request of one does not reconcile or a check failed.
A run that could not be made ends it with kvcliff's own exit code.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from harness.errors import InputError
from harness.plan.files import read_plan
from harness.record.folder import RunFolder
from harness.verdict.schema import read_published

ROOT = Path(__file__).resolve().parent.parent
PLANS = ROOT / "harness" / "presets" / "matrix"
RUNS = ROOT / "results" / "matrix"

SOURCES = ("computed", "gpu_hit", "host_loaded")
_KVCLIFF = (sys.executable, "-c", "from harness.cli import main; main()")
_HEADINGS = [
    "plan",
    "requests",
    "reconciled",
    "largest residual",
    "computed / GPU hit / host-loaded",
    "findings",
]
_NOT_MADE = 2  # kvcliff's exit codes from here on: there is no whole run to show


def plan_files(names: list[str]) -> list[Path]:
    """The plan files called ``names``, or all; InputError names the known ones."""
    known = {path.stem: path for path in sorted(PLANS.glob("*.toml"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"no plan {unknown[0]!r} in {PLANS}; known: {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def newest_runs() -> dict[str, Path]:
    """The newest whole run of every plan, by the plan's name."""
    folders = sorted(path.parent for path in RUNS.glob("*/reconcile.json"))  # named by their time
    return {RunFolder(folder).read_plan().name: folder for folder in folders}


def table_row(name: str, run: Path) -> list[str]:
    """Plan, requests, reconciled, largest residual, tokens by source, findings."""
    _, content = read_published(run)
    residuals = [abs(v) for r in content.requests for v in (r.residual or {}).values()]
    rows = [request.row for request in content.requests if request.row]
    totals = [sum(getattr(row, source) or 0 for row in rows) for source in SOURCES]
    codes = sorted({f"{f.code} ({f.severity})" for f in content.findings})
    largest = max(residuals, default="none")
    counts = [content.requests_planned, content.requests_reconciled, largest]
    tokens = " / ".join(f"{total:,}" for total in totals)
    return [name, *map(str, counts), tokens, ", ".join(codes) or "none"]


def show_table(runs: dict[str, Path]) -> bool:
    """Print a Markdown table of ``runs``; whether every request of all of them reconciled."""
    rows = [table_row(name, run) for name, run in sorted(runs.items())]
    for cells in (_HEADINGS, ["---", "---:", "---:", "---:", "---", "---"], *rows):
        print(f"| {' | '.join(cells)} |")
    planned, reconciled = (sum(int(row[i]) for row in rows) for i in (1, 2))
    print(f"\n{reconciled} of {planned} requests of {len(rows)} plans reconciled")
    return planned == reconciled and not any("(error)" in row[-1] for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Measure, then print the table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plans", nargs="*", help="names in harness/presets/matrix; default: new")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    words = parser.parse_args(argv)
    try:
        files = [] if words.table else plan_files(words.plans)
    except InputError as error:
        parser.error(str(error))
    done = newest_runs()
    for file in files:
        if not words.plans and read_plan(file).name in done:
            continue
        ran = subprocess.run(
            [*_KVCLIFF, "run", str(file), "--results", str(RUNS)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,  # its tables; the one below takes their place
            check=False,
        )
        if ran.returncode >= _NOT_MADE:
            return ran.returncode
    runs = newest_runs()
    if not runs:
        print(f"no run in {RUNS}")
        return 1
    return 0 if show_table(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
