"""``manifest.json``: what a run was measured on, and by which servers."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.errors import InputError
from harness.files import MANIFEST_FILE, load_json, validated, write_json
from harness.record.row import Version
from harness.record.versions import JsonObject, current_manifest


class _Open(BaseModel):
    """Fields that nobody here reads are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)


def _aware(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time needs its offset from UTC, as in 2026-01-01T00:00:00+00:00")
    return text


Time = Annotated[str, AfterValidator(_aware)]
"""ISO 8601 with its offset from UTC."""


def utc_now() -> Time:
    """The time in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class ServerRecord(_Open):
    """What the servers of a session said they are; null or absent: they did not say."""

    vllm_version: str | None = None
    lmcache_version: str | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    connector: str | None = None


class GpuLoad(_Open):
    """One GPU while requests ran; pairs are the lowest and the highest reading."""

    n_samples: int
    n_throttle: int
    throttle: dict[str, int]
    pcie_generation: tuple[int, int] | None = Field(strict=False)
    pcie_width: tuple[int, int] | None = Field(strict=False)


class GpuDevice(_Open):
    """One GPU of a session."""

    uuid: str
    label: str
    under_load: GpuLoad


class GpuRecord(_Open):
    """What the GPUs did during a session, as ``servers.gpu.samples`` records it."""

    devices: list[GpuDevice]
    warnings: list[str]


class CommandRecord(_Open):
    """How one server was started; in ``env_diff`` null is a variable that was taken away."""

    role: str
    argv: list[str]
    env_diff: dict[str, str | None]


class SessionRecord(_Open):
    """One session: its servers, and when they started and ended.

    ``unread_gpus``: whose memory could not be read once the servers had ended.
    """

    started: Time | None = None
    start_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    ended: Time | None = None
    facts: ServerRecord = ServerRecord()
    gpu: GpuRecord | None = None
    unread_gpus: list[str] = []
    commands: list[CommandRecord] = []

    def as_json(self) -> JsonObject:
        return self.model_dump(exclude_unset=True)


class MachineRecord(_Open):
    """What was measured on; null or absent: not known.

    ``block_size``, ``chunk_tokens``: what an import assumed.
    """

    created: Time | None = None
    kvcliff: str | None = None
    cpu: str | None = None
    cores: int | None = None
    gpus: list[str] | None = None
    block_size: Annotated[int, Field(ge=1)] | None = None
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None


class Manifest(_Open):
    """The file; further fields are a ``MachineRecord``.

    ``sealed``: SHA-256 of the files written before the first measurement and never changed since.
    ``shape``: the model's config.json, for the plan's id; null in runs that did not keep it.
    ``imported_from``: name of the file that ``kvcliff import`` read; there are no journals then.
    """

    schema_version: Version = Field(alias="schema")
    run: str
    plan_id: str
    sealed: dict[str, str]
    shape: str | None
    sessions: dict[str, SessionRecord]
    imported_from: str | None = None

    @property
    def machine(self) -> MachineRecord:
        """The further fields, as far as they are known; ValidationError for wrong ones."""
        return MachineRecord.model_validate(self.environment)

    @property
    def environment(self) -> JsonObject:
        return dict(self.model_extra or {})

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST_FILE, self.model_dump(by_alias=True, exclude_unset=True))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run of any version; InputError when it is missing or not one."""
    path = folder / MANIFEST_FILE
    try:
        content: Any = load_json(path.read_bytes(), where=str(path))
    except OSError as error:
        raise InputError(
            f"{folder} is not a run folder: no readable {MANIFEST_FILE} ({error.strerror})"
        ) from None
    today = current_manifest(content, folder.name, where=str(path))
    manifest = validated(Manifest, today, where=str(path))
    validated(MachineRecord, manifest.environment, where=str(path))
    return manifest
