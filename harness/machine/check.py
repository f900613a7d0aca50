"""One answer of the doctor."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Check:
    """``what`` was looked at, ``found`` with its numbers, ``remedy`` what to do; None: nothing.

    ``error``: a run would not work. ``warning``: it would, and might mislead.
    """

    what: str
    status: Status
    found: str
    remedy: str | None = None
