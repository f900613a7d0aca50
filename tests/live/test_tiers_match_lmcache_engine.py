"""``sim.tiers.lmcache`` and ``sim.tiers.lmcache_mp`` against LMCache behind vLLM's scheduler.

In-process: both halves of LMCacheConnectorV1 and the engine. MP: both halves of LMCacheMPConnector
and a cache server over its real transport.
"""

from dataclasses import replace

import pytest

import sim.tiers.lmcache
import sim.tiers.lmcache_mp
from scripts.mutations import MUTATIONS, Mutation
from sim.tiers.host import HostRequest, HostShare
from sim.tiers.lmcache import InProcessChunks
from sim.tiers.lmcache_mp import HostChunks
from tests.live.differential.claims import (
    assert_part_agrees,
    is_caught,
    needs,
    share_caught_by,
)

pytestmark = needs("vllm", "lmcache")


def test_the_in_process_tier_equals_lmcaches_engine_after_every_request() -> None:
    assert_part_agrees("lmcache", with_host=True)


def test_the_mp_tier_equals_lmcaches_server_after_every_request() -> None:
    tally = assert_part_agrees("lmcache-mp", with_host=True)
    assert tally.in_steps >= tally.requests // 10


# --- the same comparison must catch a wrong rule


def test_an_in_process_store_that_evicts_a_prompts_tail_first_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TailFirst(InProcessChunks):
        def serve(self, request):  # type: ignore[no-untyped-def]
            share = super().serve(request)
            for key in reversed(request.chunks):
                if key in self._chunks:
                    self._chunks.move_to_end(key)
            return share

    monkeypatch.setattr(sim.tiers.lmcache, "InProcessChunks", TailFirst)
    assert share_caught_by("lmcache", 15) >= 0.5


def test_prompts_stored_as_if_in_one_step_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class InOneStep(HostChunks):
        def serve(self, request: HostRequest) -> HostShare:
            return super().serve(replace(request, step_tokens=request.n_prompt))

    monkeypatch.setattr(sim.tiers.lmcache_mp, "HostChunks", InOneStep)
    assert is_caught("lmcache-mp", within=4)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_wrong_rule_that_the_live_matrix_catches_is_caught_here_too(mutation: Mutation) -> None:
    with mutation.planted():
        assert is_caught("lmcache-mp", within=3)
