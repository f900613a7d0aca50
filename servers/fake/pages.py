"""Counter pages in Prometheus's text format, as prometheus_client writes it."""

from collections.abc import Iterable, Mapping, Sequence

Series = tuple[str, tuple[tuple[str, str], ...]]
Values = dict[Series, float]


def series(name: str, labels: Sequence[tuple[str, str]] = ()) -> Series:
    """What one number is counted under: the order of labels makes no difference."""
    return name, tuple(sorted(labels))


def is_vllms(sample: str) -> bool:
    """Whether vLLM's page has it; else the host tier's own."""
    return sample.startswith("vllm:")


def render(counters: Values, gauges: Values, *, histogram: str, without: Iterable[str] = ()) -> str:
    """A page, format 0.0.4. ``histogram``: the one family of ``counters`` that is one."""
    missing = set(without)
    lines = [
        "# HELP python_info Python platform information",
        "# TYPE python_info gauge",
        'python_info{implementation="CPython",major="3"} 1.0',
    ]
    last_family = ""
    for (name, labels), kind, value in _in_order(counters, gauges):
        if name in missing:
            continue
        is_histogram = kind == "counter" and name.startswith(histogram)
        family = histogram if is_histogram else name
        if family != last_family:
            shown = "histogram" if is_histogram else kind
            lines += [f"# HELP {family} {family}", f"# TYPE {family} {shown}"]
            last_family = family
        text = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
        lines.append(f"{name}{{{text}}} {value!r}" if text else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _in_order(
    counters: Mapping[Series, float], gauges: Mapping[Series, float]
) -> Iterable[tuple[Series, str, float]]:
    """Sorted, because the samples of one family must follow each other."""
    for kind, values in (("counter", counters), ("gauge", gauges)):
        for each in sorted(values):
            yield each, kind, float(values[each])


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
