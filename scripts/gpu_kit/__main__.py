"""The command line: ``python -m scripts.gpu_kit pack --out DIR``."""

import argparse
import sys
from pathlib import Path

from .pack import LMCACHES, MIB, check_size, pack
from .steps import Steps
from .wheels import KitError


def main(argv: list[str] | None = None) -> int:
    """Build a kit; exit code 1 when it cannot be built, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_kit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="build the kit from the package index")
    packing.add_argument("--out", type=Path, required=True, help="folder of the kit")
    packing.add_argument("--lmcache", default=LMCACHES[-1], help=f"one of {', '.join(LMCACHES)}")
    packing.add_argument(
        "--work", type=Path, help="folder for downloads, 2 GB [default: OUT with -work added]"
    )
    options = parser.parse_args(argv)
    if options.lmcache not in LMCACHES:
        known = ", ".join(LMCACHES)
        parser.error(
            f"LMCache {options.lmcache} is not built for the box's torch 2.11: {known} are"
        )
    work = options.work or options.out.with_name(f"{options.out.name}-work")
    work.mkdir(parents=True, exist_ok=True)
    try:
        steps = Steps(work / "steps.json", say=lambda text: print(text, flush=True))
        kit = pack(options.out, lmcache=options.lmcache, work=work, steps=steps)
    except KitError as error:
        print(f"gpu_kit: error: {error}", file=sys.stderr)
        return 1
    for part in sorted(kit["parts"], key=lambda part: -int(part["size"])):
        print(f"{part['size'] / MIB:8.2f} MiB  {part['name']}")
    print(f"{check_size(options.out) / MIB:8.2f} MiB  {options.out}, everything")
    return 0


if __name__ == "__main__":
    sys.exit(main())
