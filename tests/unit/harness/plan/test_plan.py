from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import InputError, MachineError
from harness.measure.create import predicted_rows
from harness.plan.experiment import check_build, resolve
from harness.plan.files import load_plan, parse_plan
from harness.plan.presets import preset_names
from harness.plan.requests import PlannedRequests
from servers.arms import Arm, Build
from sim.tiers.settings import TIER_KINDS, TierKind
from tests.factory import PLAN_TOML, make_plan


def test_every_preset_parses_and_names_itself() -> None:
    assert preset_names() != []
    for name in preset_names():
        assert load_plan(name).name == name


def test_a_plan_survives_being_written_and_read_again() -> None:
    plan = make_plan()
    assert parse_plan(plan.to_toml().encode(), where="again") == plan


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("documents = 0", "workload.documents: .*greater than or equal to 1, got 0"),
        ("documents = 2.0", "workload.documents: .*integer, got 2.0"),
        ("documents = true", "workload.documents: .*integer, got True"),
        ('documents = "2"', "workload.documents: .*integer, got '2'"),
        ("output_tokens = 1", "workload.output_tokens: .*greater than or equal to 2"),
        ('passes = ["fwd", "back"]', "workload.passes.1: .*'fwd' or 'rev', got 'back'"),
        ("passes = []", "workload.passes: .*at least 1 item"),
        ("max_model_len = 100", "server.max_model_len is 100, but prompt and output are 522"),
        ("max_num_batched_tokens = 519", "max_num_batched_tokens is 519, but a prompt has 520"),
        ("num_gpu_blocks = 17", "server.num_gpu_blocks is 17: 512 usable tokens, fewer than"),
        ("block_size = 48", "host.chunk_tokens is 256; LMCache's server needs a multiple"),
        ("gib = -1", "host.gib: .*greater than 0"),
        ("gib = inf", "host.gib: .*less than or equal to 65536"),
        ("gib = nan", "host.gib: .*"),
        ("documents = 90000000", "asks for .* tokens a session, prompts and outputs"),
        ("output_tokens = 90000000", "asks for 450,002,600 tokens a session, prompts and outputs"),
        ('name = "Has Spaces"', "name: .*pattern"),
        ("schema = 2", "schema: .*1, got 2"),
        ('order = ["baseline", "lmcach"]', "order names 'lmcach', which is no arm: known are .*"),
        ('order = ["baseline", "LMCache"]', "order.1: .*pattern"),
        ('order = ["lmcache", "native"]', "arms lmcache, native next to baseline; .* compares one"),
        ('tier = "lmcache-pm"', "arms.lmcache.tier: .*'lmcache-mp'.*got 'lmcache-pm'"),
        ('order = ["baseline", "control"]', r"order names control, but there is no \[control\]"),
        # A49: unequal arms cannot be paired, and drift would favour one of them.
        ('order = ["baseline", "lmcache", "lmcache"]', "order has 1 baseline and 2 lmcache"),
        (
            'order = ["baseline", "baseline", "lmcache", "lmcache"]',
            "each pair of sessions must be one of each arm",
        ),
        ("sede = 1", "workload.sede: .*not permitted"),
    ],
)
def test_a_plan_that_cannot_work_says_which_field_and_why(line: str, message: str) -> None:
    key = line.split(" = ")[0]
    replaced = {"seed" if key == "sede" else key: line}
    with pytest.raises(InputError, match=message):
        make_plan(**replaced)


def test_a_syntax_error_names_file_and_line() -> None:
    with pytest.raises(InputError, match=r"p.toml: not valid TOML: .*line 2"):
        parse_plan(b"schema = 1\nname =\n", where="p.toml")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="'dmeo'") as caught:
        load_plan("dmeo")
    assert caught.value.hint is not None
    assert "demo" in caught.value.hint


def test_the_standard_order_gives_five_sessions_with_names_in_order() -> None:
    keys = PlannedRequests(load_plan("demo").model_copy(update={"workload": make_plan().workload}))
    sessions = list(dict.fromkeys(session for session, _, _ in keys))
    treatment = ["02-lmcache-mp", "03-lmcache-mp"]
    assert sessions == ["01-baseline", *treatment, "04-baseline", "05-control"]


def test_arms_differ_in_the_host_tier_alone_and_the_control_also_in_gpu_blocks(
    tmp_path: Path,
) -> None:
    # A43: equal KV capacity in the compared arms.
    text = PLAN_TOML.replace('"baseline"]', '"baseline", "control"]')
    plan = parse_plan((text + "[control]\nnum_gpu_blocks = 99\n").encode(), where="p")
    arms = resolve(plan, cache_dir=tmp_path).arms
    assert arms["baseline"].server == arms["lmcache"].server
    assert arms["baseline"].host is None
    assert arms["control"].host == arms["lmcache"].host
    assert arms["control"].server.num_gpu_blocks == 99


def test_the_plan_id_follows_what_is_asked_and_not_the_name_or_the_deadlines(
    tmp_path: Path,
) -> None:
    def digest(**replaced: str) -> str:
        return resolve(make_plan(**replaced), cache_dir=tmp_path).plan_id.rsplit("-", 1)[1]

    assert digest() == digest(name='name = "other"')
    assert digest() != digest(seed="seed = 2")
    assert digest() != digest(gib="gib = 0.2")


def test_a_resolved_plan_resolves_to_itself(tmp_path: Path) -> None:
    first = resolve(make_plan(), cache_dir=tmp_path)
    again = resolve(parse_plan(first.plan.to_toml().encode(), where="again"), cache_dir=tmp_path)
    assert (again.plan_id, again.workload) == (first.plan_id, first.workload)


def test_a_model_folder_without_config_is_named(tmp_path: Path) -> None:
    text = PLAN_TOML + f'[model]\npath = "{tmp_path}"\n'
    with pytest.raises(InputError, match=r"config\.json"):
        resolve(parse_plan(text.encode(), where="p"), cache_dir=tmp_path)


ORDER = 'order = ["baseline", "{0}", "{0}", "baseline"]'


def arms_of(label: str, cache: Path, *, more: str = "", **replaced: str) -> dict[str, Arm]:
    plan = make_plan(order=ORDER.format(label), more=more, **replaced)
    return resolve(plan, cache_dir=cache).arms


@pytest.mark.parametrize("kind", TIER_KINDS)
def test_every_tier_is_an_arm_of_its_own_name_one_factor_from_the_baseline(
    kind: TierKind, tmp_path: Path
) -> None:
    arms = arms_of(kind, tmp_path, tier='tier = "lmcache-mp"')
    assert sorted(arms) == sorted(["baseline", kind])
    assert arms["baseline"] == replace(arms[kind], name="baseline", host=None)


def test_the_arm_none_is_the_baseline_without_its_prefix_cache(tmp_path: Path) -> None:
    arms = arms_of("none", tmp_path)
    assert arms["baseline"] == replace(arms["none"], name="baseline", prefix_caching=True)


def test_vllms_own_tiers_keep_single_blocks(tmp_path: Path) -> None:
    host = arms_of("native", tmp_path)["native"].host
    assert host is not None
    assert host.chunk_tokens == 32  # the plan's block_size; 256 is the default of LMCache's chunks
    with pytest.raises(InputError, match="keeps single blocks of 32: leave it out"):
        arms_of("native", tmp_path, gib="gib = 0.1\nchunk_tokens = 64")


def test_a_plan_with_vllms_own_tier_resolves_to_itself(tmp_path: Path) -> None:
    first = resolve(make_plan(order=ORDER.format("native")), cache_dir=tmp_path)
    again = resolve(parse_plan(first.plan.to_toml().encode(), where="again"), cache_dir=tmp_path)
    assert (again.plan_id, again.arms) == (first.plan_id, first.arms)


OWN = """
[arms.mine]
tier = "native"
env = { VLLM_X = "1" }
flags = ["--seed", "3"]
"""


def test_an_arm_of_the_plans_own_gets_its_environment_and_flags(tmp_path: Path) -> None:
    mine = arms_of("mine", tmp_path, more=OWN)["mine"]
    assert (dict(mine.env), mine.flags) == ({"VLLM_X": "1"}, ("--seed", "3"))
    assert mine.connector_class == "OffloadingConnector"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[arms.m]", "arms.m differs in nothing from baseline"),
        ("[arms.m]\nconnector = {}", "arms.m.connector has no kv_connector"),
        ('[arms.m]\ntier = "native"\nconnector = { kv_connector = "X" }', "a tier and a connector"),
        ('[arms.m]\nflags = ["--port=1"]', "arms.m.flags has --port=1, which kvcliff sets itself"),
        # vLLM's parser takes `_` for `-`, the beginning of a name, and keys of a JSON option.
        ('[arms.m]\nflags = ["--max_model_len", "9"]', "reads it as --max-model-len"),
        ('[arms.m]\nflags = ["--num-gpu-blocks-o=9"]', "reads it as --num-gpu-blocks-override"),
        ('[arms.m]\nflags = ["--kv_transfer_config.kv_role", "x"]', "as --kv-transfer-config"),
        ('[arms.m]\nflags = ["--a\\u0000"]', r"arms.m.flags has '--a.x00': .* no NUL"),
        ('[arms.m]\nenv = { TMPDIR = "/x" }', "arms.m.env has TMPDIR, which kvcliff sets itself"),
        ('[arms.m]\nenv = { CUDA_DEVICE_ORDER = "FASTEST_FIRST" }', "env has CUDA_DEVICE_ORDER"),
        ('[arms.m]\nenv = { A = "b\\u0000" }', r"arms.m.env.A is 'b.x00': .* no NUL"),
        ('[arms.m]\nconnector = { kv_connector = "X" }', "connector.kv_role: .*kv_both.*got none"),
        (
            '[arms.m]\nconnector = { kv_connector = "X", kv_role = "all" }',
            "connector.kv_role: vLLM needs one of kv_both, kv_consumer, kv_producer, got 'all'",
        ),
        (
            '[arms.m]\nconnector = { kv_connector = "X", kv_role = "kv_both", on = 2026-01-01 }',
            "arms.m.connector cannot be written as JSON, .*date",
        ),
        (
            '[arms.m]\nconnector = { kv_connector = "X", kv_role = "kv_both", x = nan }',
            "arms.m.connector cannot be written as JSON",
        ),
        ('[arms.m]\nflags = "--seed"', "arms.m.flags: Input should be a list, got '--seed'"),
        ("[arms]\nm = 3", "arms.m: Input should be a table"),
        ('[arms.m]\nenv = { "A B" = "/x" }', "arms.m.env.A B.*pattern"),
        ("[arms.m]\nenv = { A = 1 }", "arms.m.env.A: .*string, got 1"),
        ('[arms.baseline]\ntier = "native"', "arms.baseline: baseline is fixed"),
        ('[arms.control]\ntier = "native"', "arms.control: control is fixed"),
    ],
)
def test_an_arm_that_cannot_work_says_why(section: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan(more=section)


def test_options_that_are_not_kvcliffs_own_reach_vllm_in_any_spelling(tmp_path: Path) -> None:
    flags = ["--attention_backend", "X", "--model-impl=auto", "-O3", "--max-logprobs=1"]
    mine = arms_of("m", tmp_path, more=f"[arms.m]\nflags = {flags}")["m"]
    assert mine.flags == tuple(flags)


def test_a_plan_with_a_byte_order_mark_is_read() -> None:
    assert parse_plan(b"\xef\xbb\xbf" + PLAN_TOML.encode(), where="p") == make_plan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "p: TOML nested too deeply"),
        ("x = " + "9" * 5000, "p: not valid TOML: .*4300 digits"),
        (b"x = '\xff'", "p: not valid TOML: .*utf-8"),
    ],
)
def test_toml_that_cannot_be_held_is_refused(text: str | bytes, message: str) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(InputError, match=message):
        parse_plan(content, where="p")


@pytest.mark.parametrize("label", ["none", "m"])
def test_a_control_without_a_tier_to_show_idle_is_refused(label: str) -> None:
    order = f'order = ["baseline", "{label}", "control"]'
    with pytest.raises(InputError, match=f"{label} has no host tier to show idle"):
        make_plan(
            order=order, more="[arms.m]\nflags = ['--seed', '3']\n[control]\nnum_gpu_blocks = 99"
        )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("lmcache", "turns itself off"), ("native", "refuses"), ("simple", "fails")],
)
def test_the_cpu_build_refuses_the_tiers_it_cannot_have_and_says_why(
    kind: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        arms_of("lmcache", tmp_path, build='build = "cpu"', tier=f'tier = "{kind}"')
    assert "lmcache-mp" in str(caught.value.hint)


@pytest.mark.parametrize("label", ["simple", "mine"])
def test_an_arm_that_is_not_modelled_has_predictions_that_say_why(
    label: str, tmp_path: Path
) -> None:
    plan = make_plan(order=ORDER.format(label), more=OWN)
    rows = predicted_rows(resolve(plan, cache_dir=tmp_path))
    by_arm = {arm: {row.is_exact for row in rows if arm in row.session} for arm in ("base", label)}
    assert by_arm == {"base": {True}, label: {False}}
    assert len(rows) == 4 * 5  # two documents twice and one warm-up, in four sessions


@pytest.mark.parametrize(("asked", "installed"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_plan_for_the_other_engine_build_is_not_measured_on_this_one(
    asked: str, installed: Build, tmp_path: Path
) -> None:
    plan = make_plan(build=f'build = "{asked}"', tier='tier = "lmcache-mp"')
    resolved = resolve(plan, cache_dir=tmp_path).plan
    with pytest.raises(MachineError, match=f"for the {asked} build, the {installed} build is ins"):
        check_build(resolved, installed)
    check_build(resolved, "gpu" if asked == "gpu" else "cpu")


@pytest.mark.parametrize("installed", ["cpu", "gpu"])
def test_the_scripted_server_runs_beside_any_engine_build(installed: Build) -> None:
    plan, other = make_plan(), {"cpu": "gpu", "gpu": "cpu"}[installed]
    check_build(plan, installed)
    real = plan.model_copy(update={"server": plan.server.model_copy(update={"build": other})})
    with pytest.raises(MachineError, match=f"the {installed} build is installed"):
        check_build(real, installed)


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ("wrkload = 1", "schema, name, order, pairs, model, workload"),
        ("[control]\nnum_gpu_blocks = 99\nblocks = 1", "fields here: num_gpu_blocks, documents"),
        ('[arms.m]\ntier = "native"\nflag = 1', "tier, prefix_caching, env, flags, connector"),
        ("[decision]\npas = 1", "pass, min_ratio"),
    ],
)
def test_a_misspelt_field_is_answered_with_the_ones_there_are(more: str, fields: str) -> None:
    text = f"{more}\n{PLAN_TOML}" if more.startswith("wrkload") else f"{PLAN_TOML}\n{more}"
    with pytest.raises(InputError, match="not permitted") as caught:
        parse_plan(text.encode(), where="p")
    assert fields in str(caught.value.hint)
