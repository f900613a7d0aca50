"""The kit's command line, on the machine that packs."""

import argparse
import sys
from pathlib import Path
from typing import Final

from .pack import LMCACHES, MIB, STEPS_FILE, check_place, check_size, pack
from .steps import Steps
from .wheels import KitError

_ABOUT: Final = "Pack vLLM, LMCache and kvcliff for a GPU box that can reach nothing."


def main(argv: list[str] | None = None) -> int:
    """Build a kit; exit code 1 when it cannot be built, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_kit", description=_ABOUT)
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
    try:
        check_place(options.out, work)
        for folder in (options.out, work):
            folder.mkdir(parents=True, exist_ok=True)
    except (KitError, OSError) as error:
        parser.error(str(error))
    try:
        steps = Steps(work / STEPS_FILE, say=lambda text: print(text, flush=True))
        kit = pack(options.out, lmcache=options.lmcache, work=work, steps=steps)
    except KitError as error:
        print(f"gpu_kit: error: {error}", file=sys.stderr)
        return 1
    for part in sorted(kit["parts"], key=lambda part: -int(part["packed_bytes"])):
        print(f"{part['packed_bytes'] / MIB:8.2f} MiB  {part['name']}")
    print(f"{check_size(options.out) / MIB:8.2f} MiB  {options.out}, everything")
    return 0


if __name__ == "__main__":
    sys.exit(main())
