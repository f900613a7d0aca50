"""Write the seven lab files: ``lab.py DIR [--journal PATH]``.

Standard library only; runs from a checkout without installation, from any directory. Exit status
as in ``summarize.py``.
"""

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # sim, not installed
sys.path.insert(0, str(Path(__file__).resolve().parent))  # summarize, under PYTHONSAFEPATH too

from summarize import OneLineParser, Summary, SummaryError, complain, read_error, summarize

from sim.scenario import run_scenario

GPU_TOKENS = 21520
DOCS = 10
DOC_TOKENS = 5011
OFFLOAD_CPU_TOKENS = 56000
CLIFF_GPU_TOKENS = (21520, 30000, 40000, 45000, 50109, 50110)
CLIFF_CPU_TOKENS = (0, 20000, 30000, 40000, 50109, 50110, 56000)


def lab_files(journal: bytes, *, name: str) -> tuple[dict[str, bytes], Summary]:
    """The seven files by name, and the summary that ``measured.json`` holds.

    ``journal`` is copied byte for byte; ``name`` stands for it in the SummaryError raised when it
    cannot be summarised.
    """
    summary = summarize(io.BytesIO(journal), name=name)
    files = {
        "cyclic.json": _scenario("fwd,fwd"),
        "baseline.json": _scenario("fwd,fwd,rev"),
        "cliff.json": _json({str(gpu): _second_pass_hits(gpu) for gpu in CLIFF_GPU_TOKENS}),
        "offload.json": _scenario("fwd,fwd,rev", cpu=OFFLOAD_CPU_TOKENS),
        "cpu_cliff.json": _json({str(cpu): _second_pass_misses(cpu) for cpu in CLIFF_CPU_TOKENS}),
        "ttft.jsonl": journal,
        "measured.json": summary.render().encode(),
    }
    return files, summary


def newest_journal() -> Path:
    """``ttft.jsonl`` of the newest run: folder names start with their UTC time, so by name.

    Raises SummaryError when there is none.
    """
    results = Path(__file__).resolve().parents[1] / "results"
    journals = sorted(results.glob("*/ttft.jsonl"), key=lambda path: path.parent.name)
    if not journals:
        raise SummaryError(
            "no measured journal: no run under results/ has a ttft.jsonl; "
            "accepted: --journal PATH of one"
        )
    return journals[-1]


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    """Put ``files`` into ``folder`` (made if absent), replacing those of the same names.

    All are written aside first, so a full disk leaves what was there. Raises SummaryError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            if (folder / name).is_dir():
                raise SummaryError(f"DIR {folder} has a folder {name}; accepted: no such folder")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".lab-") as aside:
            for name, content in files.items():
                (Path(aside) / name).write_bytes(content)
            for name in files:
                (Path(aside) / name).replace(folder / name)
    except OSError as error:
        raise SummaryError(
            f"DIR {folder} cannot be written: {error}; accepted: a folder to write into"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); returns the exit status."""
    parser = OneLineParser(
        prog="lab.py",
        description="Write the seven lab files: five simulated, the measured journal, its summary.",
        accepted="DIR [--journal PATH]",
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="folder to write into")
    parser.add_argument(
        "--journal",
        metavar="PATH",
        action="append",  # so that a second one is seen, not taken
        help="measured rows (default: the ttft.jsonl of the newest run under results/)",
    )
    args = parser.parse_args(argv)
    if args.journal and len(args.journal) > 1:
        parser.error(f"argument --journal: given again, as {args.journal[1]!r}")
    try:
        journal = Path(args.journal[0]) if args.journal else newest_journal()
        files, summary = lab_files(_read(journal), name=str(journal))
        write_all(args.dir, files)
    except SummaryError as error:
        complain(f"error: {error}", program="lab.py")
        return 2
    for notice in summary.notices:
        complain(notice, program="lab.py")
    complain(f"wrote {len(files)} files to {args.dir}, measured: {journal}", program="lab.py")
    return summary.exit_status


def _read(journal: Path) -> bytes:
    try:
        return journal.read_bytes()
    except OSError as error:
        raise read_error(journal, error) from None


def _json(value: object) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _scenario(passes: str, *, cpu: int = 0) -> bytes:
    """Exactly what ``scenario.py --passes … --cpu …`` prints."""
    return _json(
        run_scenario(
            gpu=GPU_TOKENS, docs=DOCS, tokens=DOC_TOKENS, passes=passes.split(","), cpu=cpu
        )
    )


def _second_pass_hits(gpu: int) -> int:
    result = run_scenario(gpu=gpu, docs=DOCS, tokens=DOC_TOKENS, passes=("fwd", "fwd"), cpu=0)
    return result["passes"][1]["gpu_hits"]


def _second_pass_misses(cpu: int) -> int:
    result = run_scenario(
        gpu=GPU_TOKENS, docs=DOCS, tokens=DOC_TOKENS, passes=("fwd", "fwd"), cpu=cpu
    )
    return result["passes"][1]["misses"]


if __name__ == "__main__":
    sys.exit(main())
