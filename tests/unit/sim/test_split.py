import dataclasses

import pytest

from sim.split import TokenSplit, Units, class_of


def test_a_split_whose_sources_sum_to_the_prompt_exists():
    split = TokenSplit(prompt_tokens=900, computed=132, gpu_hit=256, host_loaded=512)
    assert (split.computed, split.gpu_hit, split.host_loaded) == (132, 256, 512)


@pytest.mark.parametrize("computed", [131, 133])
def test_a_split_one_token_off_the_prompt_is_refused_with_both_numbers(computed):
    with pytest.raises(ValueError, match=f"sum to {768 + computed}, the prompt has 900"):
        TokenSplit(prompt_tokens=900, computed=computed, gpu_hit=256, host_loaded=512)


@pytest.mark.parametrize(
    "parts",
    [
        {"computed": -1, "gpu_hit": 5, "host_loaded": 5},
        {"computed": 5, "gpu_hit": -1, "host_loaded": 5},
        {"computed": 5, "gpu_hit": 5, "host_loaded": -1},
    ],
)
def test_a_negative_source_is_refused_even_when_the_sum_is_right(parts):
    with pytest.raises(ValueError, match="negative"):
        TokenSplit(prompt_tokens=9, **parts)


def test_a_split_cannot_be_changed_after_it_was_checked():
    split = TokenSplit(prompt_tokens=9, computed=9, gpu_hit=0, host_loaded=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.computed = 8


@pytest.mark.parametrize(
    ("doc_tokens", "computed", "gpu_hit", "host_loaded", "source"),
    [
        # 4,000 tokens are 125 blocks of 32, or 15 chunks of 256 (3,840) and a part of one.
        (4000, 4020, 0, 0, "recomputed"),
        (4000, 2484, 0, 1536, "host+recomputed"),
        (4000, 180, 0, 3840, "host"),
        (4000, 181, 0, 3839, "host+recomputed"),
        (4000, 20, 4000, 0, "gpu"),
        (4000, 52, 3968, 0, "gpu+recomputed"),  # a block short
        (4000, 180, 320, 3520, "gpu+host"),
        (4000, 2484, 512, 1024, "gpu+host+recomputed"),
        # 4,010 tokens end inside a block, whose computing no tier could have saved.
        (4010, 20, 4000, 0, "gpu"),
        # A question asked again: its tokens are found, too.
        (4000, 4, 4000, 16, "gpu+host"),
        # Shorter than a chunk, but with its question one.
        (250, 14, 0, 256, "host"),
    ],
)
def test_a_document_is_classed_by_every_part_it_came_from(
    doc_tokens, computed, gpu_hit, host_loaded, source
):
    split = TokenSplit(computed + gpu_hit + host_loaded, computed, gpu_hit, host_loaded)
    assert class_of(split, doc_tokens=doc_tokens, units=Units(block=32, chunk=256)) == source


def test_a_prompt_without_a_question_computes_its_last_block_and_is_still_served_whole():
    units = Units(block=32, chunk=256)
    assert class_of(TokenSplit(512, 32, 480, 0), doc_tokens=512, units=units) == "gpu"
    assert class_of(TokenSplit(512, 1, 0, 511), doc_tokens=512, units=units) == "host"
    assert class_of(TokenSplit(512, 64, 448, 0), doc_tokens=512, units=units) == "gpu+recomputed"
