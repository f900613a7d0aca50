"""vLLM's simple CPU offload (``v1/simple_kv_offload/manager.py``, vLLM 0.32): not predictable."""

from typing import NoReturn

from sim.tiers.host import NotPredictable
from sim.tiers.spec import TierModel, TierSpec


def _open(spec: TierSpec) -> NoReturn:
    raise NotPredictable(
        "vLLM's simple CPU offload evicts in the order in which its copies end, which is a matter "
        "of timing"
    )


MODEL = TierModel(_open)
