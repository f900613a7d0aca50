"""One word for each thing the harness shows, wherever it shows it."""

SOURCE_WORDS = {
    "recomputed": "recomputed",
    "gpu+recomputed": "part GPU hit, rest recomputed",
    "gpu+host": "part GPU hit, rest host-loaded",
    "host": "host-loaded",
    "gpu": "GPU hit",
}


def ms(value: float) -> str:
    """Milliseconds for people: one decimal below 100."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
