import dataclasses

import pytest

from sim.split import TokenSplit


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
