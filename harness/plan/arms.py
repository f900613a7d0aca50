"""The arms that every plan gives a meaning: the baseline, the control, and the treatment between."""

from collections.abc import Iterable
from typing import Final

BASELINE: Final = "baseline"
CONTROL: Final = "control"
_USUAL_TREATMENT: Final = "lmcache"  # of several, as the lab's files call theirs


def compared(arms: Iterable[str]) -> tuple[str, str | None]:
    """``(baseline, treatment)`` of a run with these arms.

    The treatment is the one arm that is neither baseline nor control. Of several (imports only)
    it is ``lmcache``; None when there is none of that name, or no such arm at all.
    """
    others = treatments(arms)
    if len(others) == 1:
        return BASELINE, others[0]
    return BASELINE, _USUAL_TREATMENT if _USUAL_TREATMENT in others else None


def treatments(arms: Iterable[str]) -> list[str]:
    """The arms that are neither baseline nor control, each once, in order."""
    return [arm for arm in dict.fromkeys(arms) if arm not in (BASELINE, CONTROL)]
