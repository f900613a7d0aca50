"""How a host tier evicts, as files say it: in a plan, a described deployment and a described server."""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from sim.tiers.settings import HostSettings, Policy

DEFAULT: Final = HostSettings()

Share = Annotated[float, Field(gt=0, le=1)]


class EvictionFields(BaseModel):
    """Fields of ``HostSettings``, checked; what a file calls a chunk is its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    watermark: Share = Field(
        default=DEFAULT.watermark,
        description="`lmcache-mp` alone: it evicts from this share of its size on",
    )
    evict_ratio: Share = Field(
        default=DEFAULT.evict_ratio,
        description="`lmcache-mp` alone: the share of its chunks that it then evicts",
    )
    policy: Policy = Field(
        default=DEFAULT.policy,
        description="`lmcache-mp` alone: `LRU`, or `noop`, which never evicts",
    )

    def settings(self, chunk_tokens: int) -> HostSettings:
        """The tier's settings, with chunks of so many tokens."""
        return HostSettings(
            chunk_tokens=chunk_tokens,
            watermark=self.watermark,
            evict_ratio=self.evict_ratio,
            policy=self.policy,
        )
