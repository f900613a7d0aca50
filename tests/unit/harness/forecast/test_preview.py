import json
import shlex
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest

from harness.forecast.preview import preview
from harness.forecast.tables import show_plan
from harness.plan.experiment import resolve
from harness.plan.power import power as power_of
from tests.command import kvcliff
from tests.factory import PLAN_TOML, make_plan
from tests.folder import write_run

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


def test_a_control_with_documents_of_its_own_is_judged_by_those(look):
    # One document of 16 blocks, one for a tail, block 0: 18; the arms' 2 documents need 34.
    more = "[control]\nnum_gpu_blocks = 18\ndocuments = 1"
    order = 'order = ["baseline", "lmcache", "lmcache", "baseline", "control"]'
    content = look(more=more, order=order)
    gpu = content["cliff"]["gpu"]
    assert gpu["full_from_by_arm"]["lmcache"]["blocks"] == 34
    assert gpu["full_from_by_arm"]["control"]["blocks"] == 18
    assert gpu["planned"]["control"]["is_full"] is True
    assert not any("the control does not hold" in warning for warning in content["warnings"])
    # 2 documents twice in each of 4 sessions, 1 document twice in the control, 5 warm-ups.
    assert content["requests"] == {"measured": 4 * 4 + 2, "sent": 4 * 4 + 2 + 5}
    assert content["predicted"]["control"]["pass2-replay"] == {
        "computed": 8, "gpu_hit": 512, "host_loaded": 0
    }  # fmt: skip
    assert content["tiers"]["control"]["working_set_tokens"] == 512


def test_documents_are_told_by_where_their_kv_comes_from_in_the_order_read(look):
    # 17 usable blocks, 16 to a document and one tail: in the reverse pass document 1 is whole.
    content = look(passes='passes = ["fwd", "rev"]')
    assert content["documents"]["baseline"]["pass2-reverse"] == [
        {"source": "gpu", "documents": 1}, {"source": "recomputed", "documents": 1},
    ]  # fmt: skip
    assert content["documents"]["lmcache"]["pass2-reverse"] == [
        {"source": "gpu", "documents": 1}, {"source": "host", "documents": 1},
    ]  # fmt: skip


def test_an_arm_that_cannot_be_predicted_says_why_and_the_others_are(look):
    content = look(order='order = ["baseline", "simple"]', build='build = "gpu"')
    assert list(content["predicted"]) == ["baseline"]
    assert "a matter of timing" in content["not_predicted"]["simple"]
    assert content["cliff"]["host"] is None
    assert content["cliff"]["gpu"]["full_from"]["blocks"] == 34
    assert list(content["cliff"]["gpu"]["planned"]) == ["baseline"]
    assert content["expected"]["passes"]["pass2-replay"]["ratio"] is None
    assert "in the arms that are predicted" in content["estimate"]


def test_a_treatment_without_a_prefix_cache_computes_everything(look):
    content = look(order='order = ["baseline", "none"]', num_gpu_blocks="num_gpu_blocks = 50")
    assert content["predicted"]["none"]["pass2-replay"]["computed"] == 2 * 520
    assert content["predicted"]["baseline"]["pass2-replay"]["gpu_hit"] == 2 * 512
    assert content["cliff"]["host"] is None


@pytest.mark.parametrize(
    ("order", "shm"),
    [
        ('order = ["baseline", "lmcache-mp"]', int(0.1 * 2**30)),  # LMCache's memory
        ('order = ["baseline", "native"]', int(0.1 * 2**30)),  # vLLM's own tier is a file there
        ('order = ["baseline", "simple"]', 0),
    ],
)
def test_memory_in_dev_shm_depends_on_the_tier(look, order, shm):
    memory = look(order=order, build='build = "gpu"')["memory"]
    assert memory["baseline"]["shm_bytes"] == 0
    [treatment] = [arm for arm in memory if arm != "baseline"]
    assert memory[treatment]["shm_bytes"] == shm
    assert memory[treatment]["tier_bytes"] == int(0.1 * 2**30)


def test_on_the_cpu_build_lmcache_shares_the_kv_pool_in_dev_shm(look):
    memory = look(build='build = "cpu"')["memory"]["lmcache"]
    # 18 blocks of 32 tokens of 12,288 bytes, and a tenth.
    assert memory["pool_bytes"] == 7_077_888
    assert memory["shm_bytes"] == int(7_077_888 * 1.1)
    assert memory["gpu_bytes"] is None


def test_commands_come_with_the_environment_that_makes_them_what_they_are(look):
    more = '[arms.mine]\ntier = "lmcache"\nenv = { MY_SETTING = "7" }\n'
    content = look(order='order = ["baseline", "mine"]', build='build = "gpu"', more=more)
    assert "MY_SETTING" not in content["environments"]["baseline"][0]
    [env] = content["environments"]["mine"]
    assert env["MY_SETTING"] == "7"
    assert env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "0.1"
    for arm, commands in content["commands"].items():
        assert len(commands) == len(content["environments"][arm])


def test_the_shown_command_is_one_a_shell_takes(capsys, look):
    show_plan(look(order='order = ["baseline", "lmcache"]', build='build = "gpu"'))
    said = capsys.readouterr().out
    lines = [line.strip() for line in said.splitlines() if line.startswith("  env ")]
    assert len(lines) == 3  # two vLLM servers and one of LMCache
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "env"
        assert "PYTHONHASHSEED=0" in words
        assert "-m" in words


def test_dummy_weights_are_shown_to_mean_nothing(capsys, look):
    show_plan(look(more='[model]\nweights = "dummy"\n'))
    assert "outputs mean nothing" in capsys.readouterr().out


def test_the_working_set_counts_longer_documents_and_questions_that_stay(look):
    # 2 documents of 512 tokens, or of 512 and 520; walked twice, a growing prompt keeps one
    # question of 8 tokens a document.
    assert look()["tiers"]["baseline"]["working_set_tokens"] == 1024
    longer = look(documents="documents = 2\ndocument_step_tokens = 8")
    assert longer["tiers"]["baseline"]["working_set_tokens"] == 1032
    growing = look(documents='documents = 2\nquestions = "appended"')
    assert growing["tiers"]["baseline"]["working_set_tokens"] == 1024 + 2 * 8


def test_no_duration_is_made_up_for_another_model_than_the_tiny_one_on_a_cpu(look):
    cpu = {"build": 'build = "cpu"'}
    assert look(**cpu)["estimate"].startswith("about ")
    other = look(**cpu, more='[model]\npath = "Qwen/Qwen3-0.6B"', gib="gib = 4")
    assert "not known" in other["estimate"]
    assert "min" not in other["estimate"]


def test_a_plan_says_how_many_pairs_decide_and_what_is_assumed_of_the_sessions(look):
    power = look()["power"]
    assert (power["session_noise"], power["min_ratio"]) == (0.05, 1.1)
    assert power["noise_from"].endswith("a guess")
    by_pairs = {row["pairs"]: row["supported"] for row in power["by_pairs"]}
    assert list(by_pairs) == [2, 3, 4, 5, 6, 8, 10, 12]
    assert list(by_pairs[2]) == ["1.21", "1.38", "1.65", "2.2"]
    # What the numbers are is tested beside the procedure, with the synthetic runs.
    assert by_pairs[4]["1.21"] == pytest.approx(power_of(log(1.1), 0.05 * sqrt(2), 4))
    assert by_pairs[12]["1.21"] > 0.95
    for ratio in by_pairs[2]:
        shares = [shares[ratio] for shares in by_pairs.values()]
        assert shares == sorted(shares)


def test_a_plan_is_told_how_much_sessions_differ_by_a_run_that_is_like_it(tmp_path, capfd):
    # Ratios 1.25 and 1.3: a standard deviation of 0.0277 of the pairs' logs, 0.0196 of the sessions'.
    times = {1: 100.0, 2: 80.0, 3: 100.0, 4: 130.0}
    run = write_run(tmp_path, "a", lambda position, a, s, d: times[position])
    (tmp_path / "plan.toml").write_text(PLAN_TOML)
    assert kvcliff("plan", str(tmp_path / "plan.toml"), "--like", str(run), "--json") == 0
    power = json.loads(capfd.readouterr().out)["power"]
    assert power["session_noise"] == pytest.approx(0.0196, abs=1e-4)
    assert power["noise_from"] == "sessions differ by 2.0%, as in a"
