from pathlib import Path

import pytest

from harness.errors import InputError
from harness.plan import load_plan, parse_plan, planned_keys, preset_names, resolve
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
        ("block_size = 48", "host.chunk_tokens is 256; LMCache needs a multiple"),
        ("gib = -1", "host.gib: .*greater than 0"),
        ("gib = inf", "host.gib: .*less than or equal to 65536"),
        ("gib = nan", "host.gib: .*"),
        ("documents = 90000000", "asks for .* prompt tokens a session"),
        ('name = "Has Spaces"', "name: .*pattern"),
        ("schema = 2", "schema: .*1, got 2"),
        ('order = ["baseline", "lmcach"]', "order.1: .*'baseline', 'lmcache' or 'control'"),
        ('order = ["baseline", "control"]', r"order names control, but there is no \[control\]"),
        # A49: unequal arms cannot be paired, and drift would favour one of them.
        ('order = ["baseline", "lmcache", "lmcache"]', "order has 1 baseline and 2 lmcache"),
        (
            'order = ["baseline", "baseline", "lmcache", "lmcache"]',
            "neighbouring sessions must be one of each arm",
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
    keys = planned_keys(load_plan("demo").model_copy(update={"workload": make_plan().workload}))
    sessions = list(dict.fromkeys(session for session, _, _ in keys))
    assert sessions == ["01-baseline", "02-lmcache", "03-lmcache", "04-baseline", "05-control"]


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
