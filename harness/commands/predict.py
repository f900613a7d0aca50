"""``kvcliff predict``: token sources of any stream of requests."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console


def predict(
    spec: Annotated[Path, typer.Argument(help="SPEC.json: engine, block size, capacities.")],
    requests: Annotated[
        str, typer.Argument(help="REQUESTS.jsonl, one prompt a line; - reads stdin.")
    ],
) -> None:
    """Predict requests, one JSON line each.

    Exit code 1 when a line is refused.
    """
    from harness.forecast.requests import is_refused, predict_file

    n_refused = 0
    for row in predict_file(spec, requests, say=console.say):
        console.show_line(row)
        n_refused += is_refused(row)
    if n_refused:
        console.say(f"not predicted: {n_refused} of the requests; their lines say why")
    raise typer.Exit(1 if n_refused else 0)
