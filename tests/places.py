"""Where the tests find the tree under test and their data."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"


def modules(package: str) -> list[Path]:
    """The Python files of one of our packages."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert len(found) > 3
    return found
