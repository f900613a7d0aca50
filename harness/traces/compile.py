"""``kvcliff compile``: a trace as a small file that loads at once."""

from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.files import replacing
from harness.traces.describe import description
from harness.traces.load import Progress, TraceOptions, input_errors, load, read_tree
from sim.curves import compiled


def compile_trace(
    path: str, output: Path, options: TraceOptions, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the compiled trace ``output`` (``.kvtrace.npz``); returns its description."""
    if not output.name.endswith(compiled.SUFFIX):
        raise InputError(f"the output {str(output)!r} must end in {compiled.SUFFIX}")
    with input_errors():
        tree, odd = read_tree(path, options, progress)
    notes = {"from": Path(path).name}
    with replacing(output) as temporary:
        compiled.save(tree, temporary, notes=notes)
    loaded = load(str(output), TraceOptions())
    about = description(loaded)
    about["warnings"] = [*odd, *about["warnings"]]
    return {**about, "output": str(output), "output_bytes": output.stat().st_size}
