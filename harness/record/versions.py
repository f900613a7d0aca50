"""The door every record comes in by: its version is looked at first, and older ones are migrated.

History of journals, predictions and manifests:

- 1: first published. Rows of the first runs lack ``connector`` and ``cached_tokens``; null in
  ``connector`` meant that the server had none. Predictions name no version, call the bytes moved
  ``transferred_bytes`` and may lack ``why_not``. Manifests of the first runs lack ``run`` and
  ``sealed``.
- 2: a manifest has the ``shape`` of its model. A row's null ``connector`` means that it was not
  recorded, as null does everywhere; a prediction names its version and says ``loaded_bytes``, as
  a row does.
- 3: a row says how it was sent (``loop``, ``late_ms``) and how its sources were attributed
  (``attributed_by``, ``named_from``), and has vLLM's ``queue_ms``. Rows before were sent one at a
  time and attributed by counters.
"""

from collections.abc import Callable
from typing import Any

from harness.errors import InputError
from harness.record.row import NO_CONNECTOR, SCHEMA, PredictedRow, Record, Row

JsonObject = dict[str, Any]
Migration = Callable[[JsonObject], JsonObject]
"""A record of one version as one of the next; null where it cannot know."""


def _row_of_1(row: JsonObject) -> JsonObject:
    connector = row.get("connector", ...)
    known = None if connector is ... else NO_CONNECTOR if connector is None else connector
    return {"cached_tokens": None, **row, "connector": known}


def _prediction_of_1(row: JsonObject) -> JsonObject:
    renamed = {"loaded_bytes" if n == "transferred_bytes" else n: v for n, v in row.items()}
    return {"why_not": None, **renamed}


def _row_of_2(row: JsonObject) -> JsonObject:
    is_attributed = row.get("computed") is not None
    return {
        **row,
        "queue_ms": None,
        "loop": "serial",
        "late_ms": None,
        "attributed_by": "counters" if is_attributed else None,
        "named_from": None,
    }


def _same(record: JsonObject) -> JsonObject:
    return record


def plan_as_today(written: JsonObject) -> JsonObject:
    """A run folder's plan.

    Those of the first runs name no ``server.engine``: they were predicted by the rules of vLLM
    0.32.0, the one version there was, and their arm ``lmcache`` was the tier that is called
    ``lmcache-mp`` today. Those before the procedure of ``verdict.procedure`` limit the order
    effect, which it estimates.
    """
    rule = written.get("decision")
    if isinstance(rule, dict):
        kept = {name: value for name, value in rule.items() if name != "max_order_effect"}
        written = {**written, "decision": kept}
    server = written.get("server")
    if not isinstance(server, dict) or "engine" in server:
        return written
    return {
        **written,
        "server": {**server, "engine": "0.32.0"},
        "arms": {"lmcache": {"tier": "lmcache-mp"}},
    }


# From each older version to the one after it, 1 first.
_MIGRATIONS: dict[type[Record], tuple[Migration, ...]] = {
    Row: (_row_of_1, _row_of_2),
    PredictedRow: (_prediction_of_1, _same),
}


def current(content: Any, kind: type[Record], *, where: str) -> Any:
    """A record as the newest version has it, not validated yet; what is no object, as it is.

    InputError for a version that is newer, or is none.
    """
    unversioned = 1 if kind is PredictedRow else None
    return _migrated(content, _MIGRATIONS[kind], unversioned, where)


def current_manifest(content: Any, folder: str, *, where: str) -> Any:
    """As ``current``; ``folder``: name of the run folder, which the first runs' manifests lack."""

    def of_1(manifest: JsonObject) -> JsonObject:
        return {"run": folder, "sealed": {}, "shape": None, **manifest}

    return _migrated(content, (of_1, _same), None, where)


def _migrated(
    content: Any, migrations: tuple[Migration, ...], unversioned: int | None, where: str
) -> Any:
    if not isinstance(content, dict):
        return content
    version = check_version(content.get("schema", unversioned), newest=SCHEMA, where=where)
    for migrate in migrations[version - 1 :]:
        content = migrate(content)
    return {**content, "schema": SCHEMA}


def check_version(version: object, *, newest: int, where: str) -> int:
    """``version``; InputError unless this kvcliff reads it: 1 to ``newest``."""
    known = "1" if newest == 1 else f"1 to {newest}"
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(f"{where}: schema is {version!r}; this kvcliff reads {known}")
    if version > newest:
        raise InputError(
            f"{where}: written by a newer kvcliff, schema {version}; this one reads {known}",
            hint="read it with the kvcliff that wrote it: manifest.json names it",
        )
    return version
