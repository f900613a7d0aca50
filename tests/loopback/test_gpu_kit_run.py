"""What the kit does with kvcliff on the box, shown with the scripted server in the engines' place."""

import os
from pathlib import Path

from scripts.gpu_kit.attempt import is_whole, measure, newest_run, rows
from scripts.gpu_kit.plans import paired_plan, write_model
from tests.places import ROOT


def fake_plan(folder: Path) -> Path:
    """The box's own plan, with the scripted server in place of the CUDA build and a short start."""
    text = paired_plan("lmcache-mp", model=write_model(folder / "model", "8b"), start_s=30)
    assert text.count('build = "gpu"') == 1
    text = text.replace('build = "gpu"', 'build = "fake"')
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def test_the_boxs_plan_is_measured_to_its_end_and_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    # 2 warm-up documents and 3 passes over 8: 26 requests a session.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    plan, results, log = fake_plan(tmp_path), tmp_path / "results", tmp_path / "log"
    found = measure(plan, results, env=env, log=log, seconds=240)
    assert found == {"exit_code": 0, "rows": {"baseline": 52, "lmcache-mp": 52, "control": 26}}, (
        log.read_text()
    )
    run = newest_run(results)
    assert run is not None
    (run / "journal-05-control.jsonl").unlink()
    assert rows(results) == {"baseline": 52, "lmcache-mp": 52}
    again = measure(plan, results, env=env, log=log, seconds=240)
    assert is_whole(again)
    assert again["rows"] == {"baseline": 52, "lmcache-mp": 52, "control": 26}
    assert newest_run(results) == run
    assert len(list(results.iterdir())) == 1


def test_a_run_that_could_not_start_has_no_rows_and_says_why(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(fake_plan(tmp_path).read_text().replace("block_size = 16", "block_size = 0"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = measure(plan, tmp_path / "results", env=env, log=tmp_path / "log", seconds=60)
    assert not is_whole(found)
    assert (found["exit_code"], found["rows"]) == (2, {})
    assert any("block_size" in line for line in found["why"])
