"""The decision section of a plan: the rule, fixed before the run."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class DecisionSection(BaseModel):
    """``[decision]`` of a plan: what must be measured for the treatment to be called worth it.

    Ratios are baseline ÷ treatment of TTFT, paired by document; above 1 the treatment is faster.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    pass_name: str | None = Field(
        default=None, alias="pass", description="pass to decide on; default: the plan's second pass"
    )
    min_ratio: Annotated[float, Field(ge=1, le=1_000)] = Field(
        default=1.1, description="smallest ratio that is worth it"
    )
    min_blocks: Annotated[int, Field(ge=2, le=1_000)] = Field(
        default=2, description="A B blocks needed for any verdict"
    )
    max_control_drift: Annotated[float, Field(ge=1, le=1_000)] = Field(
        default=1.25, description="largest ratio between the control's first pass and the arms'"
    )

    def deciding_pass(self, passes: Sequence[str]) -> str:
        """The pass decided on, of a run with ``passes``; empty where there is none."""
        return self.pass_name or (passes[1] if len(passes) > 1 else passes[0] if passes else "")


def unknown_pass(rule: DecisionSection, passes: Sequence[str]) -> str | None:
    """What is wrong with the rule's pass in a plan that has ``passes``; None when nothing is."""
    if rule.pass_name is None or rule.pass_name in passes:
        return None
    return f"decision.pass is {rule.pass_name!r}; this plan has {', '.join(passes)}"
