"""The plans that come with kvcliff."""

from pathlib import Path

_PRESETS = Path(__file__).parents[1] / "presets"


def preset_names() -> list[str]:
    """Names of the plans that come with kvcliff."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def preset_file(name: str) -> Path | None:
    """The plan file of a preset; None where there is none of that name."""
    return _PRESETS / f"{name}.toml" if name in preset_names() else None
