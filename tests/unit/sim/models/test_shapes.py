"""The committed comparison of public models with vLLM's own layers is of today's code."""

import json

import pytest

from tests.shapes import RESULTS, is_equal, ours, read_shapes

COMMITTED = json.loads(RESULTS.read_text(encoding="utf-8"))
ROWS = COMMITTED["rows"]


def test_every_shape_was_compared_and_none_differs():
    assert list(ROWS) == list(read_shapes())
    assert len(ROWS) >= 60
    assert COMMITTED["different"] == []


@pytest.mark.parametrize("name", read_shapes())
def test_what_is_read_of_a_shape_today_is_what_vllm_keeps(name):
    found = ours(read_shapes()[name])
    assert found == ROWS[name]["ours"]
    assert is_equal(found, ROWS[name]["vllm"])


def test_a_size_or_a_kind_that_is_off_would_differ():
    row = ROWS["llama-3-8b"]
    group = row["ours"]["groups"][0]
    for wrong in ({"bytes_per_token": 131_073}, {"layers": 31}, {"kind": "mla"}, {"window": 1}):
        assert not is_equal(row["ours"] | {"groups": [group | wrong]}, row["vllm"])
    assert not is_equal({"refused": "why"}, row["vllm"])
