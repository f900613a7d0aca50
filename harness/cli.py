"""The command ``kvcliff``: its commands by name, and what becomes of their errors."""

import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from harness import console
from harness.commands.arguments import Command, spread_out
from harness.commands.compare import compare
from harness.commands.compile import compile_trace
from harness.commands.convert import convert
from harness.commands.curve import curve
from harness.commands.describe import describe
from harness.commands.doctor import doctor
from harness.commands.export import export
from harness.commands.import_rows import import_rows
from harness.commands.latency import latency
from harness.commands.plan import plan
from harness.commands.predict import predict
from harness.commands.reconcile import reconcile
from harness.commands.report import report
from harness.commands.run import run
from harness.commands.summarize import summarize
from harness.commands.surface import surface
from harness.commands.watch import watch
from harness.errors import BugError, InputError, KvcliffError, MachineError
from servers.errors import ServerError

COMMANDS: Mapping[str, Command] = {
    "run": run,
    "plan": plan,
    "predict": predict,
    "reconcile": reconcile,
    "summarize": summarize,
    "report": report,
    "compare": compare,
    "export": export,
    "import": import_rows,
    "watch": watch,
    "latency": latency,
    "doctor": doctor,
    "compile": compile_trace,
    "curve": curve,
    "surface": surface,
    "convert": convert,
    "describe": describe,
}

_INTERRUPTED = 130  # the shell's code for SIGINT, which the parser returns for Ctrl-C


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_repeats(self, ctx, args)
        return super().parse_args(ctx, args)


class _Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_repeats(self, ctx, args)
        return super().parse_args(ctx, args)


def _refuse_repeats(command: TyperCommand | TyperGroup, ctx: Any, args: Sequence[str]) -> None:
    """InputError for an option given again, unless it is declared to collect its values.

    The parser would let the last one win without a word.
    """
    if ctx.resilient_parsing:  # a shell asks how the line may go on
        return
    _, _, given = command.make_parser(ctx).parse_args(list(args))
    for option in given:
        if not isinstance(option, TyperOption) or option.multiple or option.count:
            continue
        if (n_times := given.count(option)) > 1:
            name = max(option.opts, key=len)
            raise InputError(f"{name} is given {n_times} times; once is enough")


def command_line(commands: Mapping[str, Command]) -> typer.Typer:
    """A command line of ``commands`` by name, in this order."""
    app = typer.Typer(
        cls=_Commands,
        callback=_options,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name, command in commands.items():
        app.command(name, cls=_Command)(spread_out(command))
    return app


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version  # here: it costs as much as all of the parser

        console.show_text(f"kvcliff {version('kvcliff')}")
        raise typer.Exit


def _options(
    _verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show where in the code an error was raised.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_say_version
        ),
    ] = False,
) -> None:
    """Find a workload's KV-cache cliff and measure what a host-memory tier behind it saves."""


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    # The same way out as Ctrl-C: servers are stopped and the journal stays readable.
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the only place where errors become messages and exit codes."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without "–" must not cost a result
    sys.exit(_exit_code(argv))


def _exit_code(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        return command_line(COMMANDS)(args=words, standalone_mode=False, prog_name="kvcliff") or 0
    except typer.TyperException as error:
        error.show()  # type: ignore[attr-defined]  # every subclass raised has it
        return InputError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has left, as `head` does; keep Python from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the top: what nobody knows is shown as a bug
        is_verbose = bool({"-v", "--verbose"} & set(words))
        if is_verbose:
            traceback.print_exception(error)
        again = "the traceback is above" if is_verbose else f"kvcliff -v {shlex.join(words)}"
        shown = _shown(error, see_more=again)
        console.show_error(shown)
        return shown.exit_code


def _shown(error: Exception, *, see_more: str) -> KvcliffError:
    if isinstance(error, KvcliffError):
        return error
    if isinstance(error, ServerError):
        return MachineError(str(error), hint=error.hint)
    if not isinstance(error, OSError):
        return BugError(_about_bug(error), hint=see_more)
    place = f"{error.filename}: " if error.filename else ""
    return MachineError(
        f"{place}{error.strerror or error}",
        hint="check the path, its permissions and the free space; what was written before is kept",
    )


def _about_bug(error: Exception) -> str:
    """What came up to here, and the innermost line of ours that it came through."""
    root = Path(__file__).parents[1]
    packages = [root / name for name in ("harness", "servers", "sim", "scripts")]
    frames = traceback.extract_tb(error.__traceback__)
    at = [f for f in frames if any(map(Path(f.filename).is_relative_to, packages))][-1]
    what = "".join(traceback.format_exception_only(error)).strip()
    return (
        f"this is a fault of kvcliff's own, not of what it was given: {what}\n"
        f"  at {Path(at.filename).relative_to(root)}:{at.lineno}, in {at.name}"
    )
