"""Plan files and presets: read, and checked."""

import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from harness.errors import InputError
from harness.files import describe_invalid
from harness.plan.checks import problems_of
from harness.plan.plan import Plan
from harness.plan.presets import preset_file, preset_names

Migration = Callable[[dict[str, Any]], dict[str, Any]]


def load_plan(name_or_path: str) -> Plan:
    """The preset or plan file called ``name_or_path``; InputError names file, field and value."""
    preset = preset_file(name_or_path)
    if preset is not None:
        return parse_plan(preset.read_bytes(), where=f"preset {name_or_path}")
    return read_plan(Path(name_or_path))


def read_plan(path: Path, *, migrate: Migration = dict) -> Plan:
    """The plan in the file ``path``; InputError when it cannot be read or used.

    ``migrate``: takes what an earlier kvcliff wrote to what it would write today.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the plan {str(path)!r}: {error.strerror}",
            hint=f"give a .toml file, or one of the presets: {', '.join(preset_names())}",
        ) from None
    return parse_plan(content, where=str(path), migrate=migrate)


def parse_plan(content: bytes, *, where: str, migrate: Migration = dict) -> Plan:
    """Parse and check TOML; InputError says what is wrong and where."""
    try:
        written = tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise InputError(f"{where}: TOML nested too deeply") from None
    except ValueError as error:  # not UTF-8, not TOML, or a number of thousands of digits
        raise InputError(f"{where}: not valid TOML: {error}") from None
    try:
        plan = Plan.model_validate(migrate(written))
    except ValidationError as error:
        message = f"{where}: {describe_invalid(error)}"
        raise InputError(message, hint=_accepted(error)) from None
    for problem in problems_of(plan):
        raise InputError(f"{where}: {problem}")
    return plan


def _accepted(error: ValidationError) -> str | None:
    """The fields there are where a plan has one that there is not; None for other problems."""
    wrong = next((p["loc"] for p in error.errors() if p["type"] == "extra_forbidden"), None)
    if wrong is None:
        return None
    section: type[BaseModel] = Plan
    for name in wrong[:-1]:  # an arm of [arms] is no field: its section is the table's
        if field := section.model_fields.get(str(name)):
            section = _section_in(field.annotation) or section
    names = [field.alias or name for name, field in section.model_fields.items()]
    return f"fields here: {', '.join(names)}"


def _section_in(annotation: object) -> type[BaseModel] | None:
    """The section a field's type names: itself, or in an optional one or a table of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)
