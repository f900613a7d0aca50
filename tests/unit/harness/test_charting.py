import json
import re
from pathlib import Path

import pytest

from harness.charting import layer, log_ticks, on_page, on_paper, save
from harness.errors import InputError

RULE = layer([{"at": 1}], {"type": "rule", "color": "currentColor"}, x={"field": "at"})


@pytest.mark.parametrize(
    ("domain", "ticks"),
    [
        ((9.0, 600.0), [10, 20, 50, 100, 200, 500]),
        ((98.2, 104.1), [100, 102, 104]),
        ((1.1, 9.9), [2, 4, 6, 8]),
        ((0.97, 1.03), [0.98, 1.0, 1.02]),
        ((5.1, 9.9), [6, 7, 8, 9]),
        ((90.0, 2e5), [100, 1_000, 10_000, 100_000]),
    ],
)
def test_a_log_axis_has_labels_however_narrow_it_is(
    domain: tuple[float, float], ticks: list[float]
) -> None:
    assert log_ticks(*domain) == pytest.approx(ticks)


def test_a_chart_follows_the_page_it_stands_in_and_is_ink_on_white_alone() -> None:
    page, paper = on_page(RULE, height=100), on_paper(RULE, "Title")
    assert (page["background"], page["mark"]["color"]) == ("transparent", "currentColor")
    assert (paper["background"], paper["mark"]["color"]) == ("#ffffff", "#1a1d21")
    assert "currentColor" not in json.dumps(paper)
    assert page["config"]["legend"] == {"disable": True}  # the page has its own, for all charts
    assert paper["config"]["legend"]["orient"] == "top"


def test_a_file_is_whole_or_absent_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "c.svg.part").write_text("the user's", "utf-8")
    (tmp_path / "link.svg").symlink_to(tmp_path / "c.svg")
    save(on_paper(RULE, "Title"), tmp_path / "link.svg")
    assert re.match("<svg", (tmp_path / "c.svg").read_text("utf-8"))
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "c.svg.part").read_text("utf-8") == "the user's"
    with pytest.raises(InputError, match=r"must end in \.png, \.svg, \.html, \.json"):
        save(RULE, tmp_path / "c.pdf")
