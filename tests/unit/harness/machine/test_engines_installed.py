import importlib.metadata
import sys
from pathlib import Path

import pytest

from harness.machine import engines as installed
from harness.machine.engines import Versions, check_versions, missing_series
from servers.arms import Build
from tests.places import DATA


def having(
    vllm: str = "0.32.0",
    lmcache: str | None = "0.5.6",
    torch: str | None = "2.13.0",
    pinned: str | None = "2.13.0",
    cuda: str | None = "13.0",
    build: Build = "gpu",
) -> Versions:
    return Versions(build, vllm, lmcache, torch, pinned, cuda)


@pytest.mark.parametrize(
    ("found", "driver_cuda"),
    [
        (having(), "13.0"),
        (having(), "13.1"),
        (having(cuda="13.2"), "13.0"),  # within a major version older drivers do
        (having(), None),
        (having(torch="2.13.0+cu130"), "13.0"),
        (having(build="cpu", torch="2.13.0+cpu", pinned="2.13.0+cpu", cuda=None), None),
    ],
)
def test_the_supported_pair_has_no_trouble(found: Versions, driver_cuda: str | None) -> None:
    assert list(check_versions(found, driver_cuda)) == []


@pytest.mark.parametrize(
    ("found", "driver_cuda", "status", "text", "remedy"),
    [
        # vllm 0.33.0 pins a torch that no LMCache wheel was built for; the resolver accepts both.
        (
            having(vllm="0.33.0", torch="2.14.0", pinned="2.14.0"), "13.0", "error",
            "lmcache 0.5.6's extension was built for torch 2.13, installed is 2.14.0",
            "install a vllm built for torch 2.13 (0.27.1, 0.32.0): no lmcache wheel was built for "
            "2.14",
        ),
        # The air-gapped box's torch: LMCache 0.5.3 is the wheel that fits.
        (
            having(vllm="0.26.0", torch="2.11.0+cu130", pinned="2.11.0"), "13.0", "error",
            "lmcache 0.5.6's extension was built for torch 2.13, installed is 2.11.0+cu130",
            "install lmcache 0.5.3, or build it from source",
        ),
        (
            having(torch="2.11.0"), "13.0", "error",
            "vllm 0.32.0 was built for torch 2.13.0, installed is 2.11.0",
            "install torch 2.13.0, or a vllm built for 2.11 (0.20.2, 0.21.0,",
        ),
        (having(), "12.8", "error", "for CUDA 13.0, the driver runs CUDA 12.8 at most", "580"),
        (having(cuda=None), "13.0", "error", "torch 2.13.0 is a build without CUDA", "make setup"),
        (having(torch=None), "13.0", "error", "torch is not installed", "make setup"),
        (
            having(lmcache="0.9.0"), "13.0", "warning",
            "nothing is known of the torch that lmcache 0.9.0 was built for", "lmcache.cuda_ops",
        ),
        (
            having(vllm="0.31.0"), "13.0", "warning",
            "predictions are proven for vllm 0.32.0 with lmcache 0.5.6", "residuals",
        ),
    ],
)  # fmt: skip
def test_versions_that_do_not_go_together(
    found: Versions, driver_cuda: str | None, status: str, text: str, remedy: str
) -> None:
    first = next(iter(check_versions(found, driver_cuda)))
    assert first.status == status
    assert text in first.found
    assert remedy in (first.remedy or "")


def test_the_pair_of_the_air_gapped_box_loads_and_is_called_unproven() -> None:
    found = having(vllm="0.26.0", lmcache="0.5.3", torch="2.11.0+cu130", pinned="2.11.0")
    assert [check.status for check in check_versions(found, "13.0")] == ["warning"]


def test_on_a_cpu_the_cuda_extension_does_not_matter() -> None:
    found = having(vllm="0.33.0", torch="2.14.0+cpu", pinned="2.14.0+cpu", cuda=None, build="cpu")
    assert [check.status for check in check_versions(found, None)] == ["warning"]


VLLM = """
Counter(name="vllm:request_success", labelnames=[])
Counter("vllm:num_preemptions")
names = {"by": "vllm:prompt_tokens_by_source"}
"vllm:not_a_name because it is a sentence"
"""
LMCACHE = """
meter.create_counter("lmcache_mp.lookup_hit", description="hits", unit="tokens")
meter.create_counter("lmcache_mp.lookups", "requests")
meter.create_counter("lmcache_mp.num_chunks_loaded", unit="chunks")
meter.create_observable_counter("lmcache_mp.event_bus.dropped_events_total", callbacks=[])
meter.create_counter("lmcache_mp.ratio", unit="1")
meter.create_gauge("lmcache_mp.held", unit="bytes")
register_gauge("lmcache.bus", "lmcache_mp.bus.depth", "Events queued.", depth)
"""


def packages(folder: Path, vllm: str, lmcache: str) -> None:
    for name, text in (("vllm", vllm), ("lmcache", lmcache)):
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep" / "metrics.py").write_text(text, encoding="utf-8")


@pytest.fixture
def _fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, VLLM, LMCACHE)
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path / name)


@pytest.mark.usefixtures("_fake_packages")
def test_counters_are_named_as_the_exporters_name_them() -> None:
    assert installed.exported_series("vllm") == {
        "vllm:request_success_total", "vllm:num_preemptions_total",
        "vllm:prompt_tokens_by_source_total", "vllm:request_success", "vllm:num_preemptions",
        "vllm:prompt_tokens_by_source",
    }  # fmt: skip
    assert installed.exported_series("lmcache") == {
        "lmcache_mp_lookup_hit_tokens_total", "lmcache_mp_lookups_requests_total",
        "lmcache_mp_num_chunks_loaded_chunks_total", "lmcache_mp_event_bus_dropped_events_total",
        "lmcache_mp_ratio_total", "lmcache_mp_held_bytes", "lmcache_mp_bus_depth",
    }  # fmt: skip


@pytest.mark.usefixtures("_fake_packages")
def test_a_counter_that_would_be_read_as_none_yet_is_missed() -> None:
    n_wanted, missing = missing_series()
    assert n_wanted > len(missing) > 0
    assert "lmcache_mp_l1_write_chunks_total" in missing
    assert "lmcache_mp_lookup_hit_tokens_total" not in missing
    assert "vllm:request_success_total" not in missing
    # By source there is a counter; the fallbacks of older versions are not needed then.
    assert not any("splits prompt tokens" in text for text in missing)


def test_an_engine_without_any_way_to_split_a_prompt_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, VLLM.replace("by_source", "by_mood"), LMCACHE)
    monkeypatch.setattr(installed, "package_folder", lambda name: tmp_path / name)
    assert any("splits prompt tokens" in text for text in missing_series()[1])


@pytest.mark.live
def test_the_installed_engines_export_every_counter_and_name_them_as_the_goldens_do() -> None:
    if installed.package_folder("vllm") is None or installed.package_folder("lmcache") is None:
        pytest.skip("needs vllm and lmcache: make setup")
    n_wanted, missing = missing_series()
    assert (n_wanted > 10, missing) == (True, [])
    # What a live server's page holds, the source names: pages of the pinned versions.
    pages = DATA / "metrics"
    for package, page, prefix in (
        ("vllm", "vllm-0.32.0-after.txt", "vllm:"),
        ("lmcache", "lmcache-0.5.6-driven-after.txt", "lmcache_mp_"),
    ):
        lines = (pages / page).read_text(encoding="utf-8").splitlines()
        live = {
            line.split()[2]
            for line in lines
            if line.startswith(f"# TYPE {prefix}") and line.endswith(" counter")
        }
        assert len(live) > 5
        exported = installed.exported_series(package)
        names = {name if name.endswith("_total") else f"{name}_total" for name in live}
        assert sorted(names - exported) == []


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ('torch==2.13.0+cpu; platform_machine == "x86_64"', "2.13.0+cpu"),
        ("torch==2.11.0", "2.11.0"),
        ("torch (==2.11.0)", "2.11.0"),
        ("torchvision==0.26.0", None),
        ("torch>=2.0", None),
    ],
)
def test_the_torch_an_engine_is_pinned_to(
    requirement: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: ["torchaudio", requirement])
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1.0")
    assert installed.versions("gpu").torch_pinned == version


def test_the_source_is_parsed_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "vllm"
    bomb.mkdir()
    (bomb / "__init__.py").touch()
    (bomb / "x.py").write_text('raise SystemExit("vllm:imported")\n', encoding="utf-8")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.exported_series("vllm") == {"vllm:imported", "vllm:imported_total"}
