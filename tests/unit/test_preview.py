from pathlib import Path
from typing import Any

import pytest

from harness.plan import resolve
from harness.preview import preview
from tests.factory import make_plan

# The factory's plan: 2 documents of 512 + 8 tokens and 1 for the warm-up, walked forward twice;
# 17 usable GPU blocks of 32; chunks of 256 of 12,288 bytes a token: 3 MiB, 34 of them in 0.1 GiB.


@pytest.fixture
def look(tmp_path_factory: pytest.TempPathFactory):
    cache = tmp_path_factory.getbasetemp() / "model-cache"

    def at(**replaced: str) -> dict[str, Any]:
        return preview(resolve(make_plan(**replaced), cache_dir=Path(cache)))

    return at


def only(content: dict[str, Any]) -> str:
    [warning] = content["warnings"]
    return warning


ROOMY = {"documents": "documents = 6", "passes": 'passes = ["fwd", "rev"]'}
BLOCKS_90 = {"num_gpu_blocks": "num_gpu_blocks = 90"}


def test_the_gpu_cliff_is_where_every_document_a_tail_and_the_null_block_fit(look):
    # 2 documents * 16 blocks, 1 block for a request's tail, block 0: 34; 34 * 32 * 12,288 bytes.
    gpu = look()["cliff"]["gpu"]
    assert gpu["full_from"] == {"blocks": 34, "tokens": 1056, "gib": 34 * 32 * 12_288 / 2**30}
    assert gpu["reusable_tokens"] == 1024
    assert gpu["planned"]["baseline"] == {
        "blocks": 18, "tokens": 544, "gib": 18 * 32 * 12_288 / 2**30, "is_full": False,
    }  # fmt: skip


def test_the_host_cliff_is_where_the_watermark_spares_both_documents(look):
    # In 6 chunks the warm-up's 2 and document 0's 2 stay below 0.8 (4 of 6); document 1 makes 6,
    # and the ticks take the warm-up's two. In 5, document 0 already sets them off.
    host = look()["cliff"]["host"]
    assert host["full_from"] == {"chunks": 6, "tokens": 1536, "gib": 6 * 3 / 1024}
    assert host["reusable_tokens"] == 1024
    assert host["planned"]["chunks"] == 34
    assert host["planned"]["is_full"] is True


def test_every_point_accounts_for_every_measured_prompt_token(look):
    cliff = look()["cliff"]
    for axis, unit in (("gpu", "blocks"), ("host", "chunks")):
        points = cliff[axis]["points"]
        sizes = [point[unit] for point in points]
        assert len(sizes) > 5
        assert sizes == sorted(set(sizes))
        for point in points:
            assert point["computed"] + point["gpu_hit"] + point["host_loaded"] == 4 * 520


def test_a_gpu_tier_at_the_cliff_is_said_to_be_full(look):
    planned = look(num_gpu_blocks="num_gpu_blocks = 34")["cliff"]["gpu"]["planned"]
    assert planned["baseline"]["is_full"] is True
    planned = look(num_gpu_blocks="num_gpu_blocks = 33")["cliff"]["gpu"]["planned"]
    assert planned["baseline"]["is_full"] is False


def test_a_plan_that_can_show_its_effect_has_no_warning(look):
    assert look(**ROOMY)["warnings"] == []


def test_a_working_set_that_fits_the_gpu_is_warned_of_with_the_size_to_go_below(look):
    warning = only(look(num_gpu_blocks="num_gpu_blocks = 50"))
    assert "fits the GPU tier" in warning
    assert "lower server.num_gpu_blocks below 34" in warning


@pytest.mark.parametrize(
    ("replaced", "reason"),
    [
        ({"passes": 'passes = ["rev"]'}, "one walk"),
        ({"document_tokens": "document_tokens = 31"}, "no prompt has a whole block in common"),
        ({"document_tokens": "document_tokens = 255"}, "at most 224"),
    ],
)
def test_prompts_without_a_usable_prefix_in_common_are_warned_of(look, replaced, reason):
    assert reason in only(look(**replaced))


def test_a_host_tier_no_larger_than_the_gpu_is_warned_of(look):
    # 10 chunks of 256 are 2,560 tokens; 89 usable blocks are 2,848.
    warnings = look(**ROOMY, **BLOCKS_90, gib="gib = 0.03")["warnings"]
    assert any("2,560 against 2,848 tokens" in warning for warning in warnings)


def test_a_host_tier_that_evicts_the_working_set_is_warned_of_with_the_size_that_keeps_it(look):
    # 6 documents of 2 chunks and the warm-up's; see test_host below for 16 chunks of 3 MiB.
    warning = only(look(documents="documents = 6", gib="gib = 0.03"))
    assert "has 10 chunks and evicts from 80% on" in warning
    assert "load 0 of 3,072 tokens" in warning
    assert "raise host.gib to 0.0469" in warning  # 16 * 3 / 1,024 = 0.046875


def test_a_size_that_is_proposed_is_enough_when_taken(look):
    assert look(documents="documents = 6", gib="gib = 0.0469")["warnings"] == []


def test_a_cyclic_walk_short_of_one_document_is_warned_of(look):
    # 18 of 34 blocks, 17 to a prompt.
    warning = only(look())
    assert "the GPU tier is 16 blocks short of every document" in warning
    assert "pass2-replay goes in the order of the pass before" in warning
    assert look(passes='passes = ["fwd", "rev"]')["warnings"] == []


def test_a_host_tier_whose_room_above_the_watermark_is_below_a_prompt_may_freeze(look):
    # 3 chunks: 2 are below 0.8, so there is room for 1 and a prompt has 2.
    warnings = look(**ROOMY, gib="gib = 0.01")["warnings"]
    [freeze] = [warning for warning in warnings if "freeze" in warning]
    assert "a prompt has 2 chunks" in freeze
    assert "room for 1 of 3" in freeze
    assert "raise host.gib to 0.0323" in freeze  # int(2 / 0.2) + 1 = 11 chunks of 3 MiB: 0.03223


def test_a_tier_that_keeps_everything_below_its_watermark_cannot_freeze(look):
    # 2 documents of 2 chunks in 34: their 4 chunks never come near 0.8.
    assert not any("freeze" in w for w in look(gib="gib = 0.1\nwatermark = 0.99")["warnings"])


def test_a_tier_without_eviction_that_cannot_hold_everything_is_warned_of(look):
    warnings = look(**ROOMY, gib='gib = 0.03\npolicy = "noop"')["warnings"]
    assert any("policy noop evicts nothing: 10 chunks" in warning for warning in warnings)


def test_chunks_above_half_the_prompt_are_warned_of(look):
    # 320 of 520 tokens; at 256 two chunks fit.
    warning = only(look(**ROOMY, gib="gib = 0.1\nchunk_tokens = 320"))
    assert "of 520 tokens the host tier keeps 320" in warning


def test_a_control_that_does_not_hold_the_working_set_is_warned_of(look):
    small = only(look(**ROOMY, more="[control]\nnum_gpu_blocks = 90"))
    assert "the control does not hold the working set" in small
    assert "raise control.num_gpu_blocks to 98" in small  # 6 * 16 + 1 + 1
    assert look(**ROOMY, more="[control]\nnum_gpu_blocks = 98")["warnings"] == []


def test_a_plan_too_large_to_search_says_so_and_is_predicted_all_the_same(look):
    # 1,001 requests of 521 tokens with a slot are 261 blocks of 2 each: 261,261 blocks a session.
    content = look(
        documents="documents = 200",
        passes='passes = ["fwd", "rev", "rev", "rev", "rev"]',
        block_size="block_size = 2",
        num_gpu_blocks="num_gpu_blocks = 300",
    )
    assert content["cliff"]["gpu"] is None
    assert content["cliff"]["host"] is None
    assert "261,261 blocks" in content["cliff"]["why_not"]
    assert content["predicted"]["baseline"]["pass1-cold"]["computed"] == 104_000
