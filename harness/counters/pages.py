"""Counter pages: read strictly, by the names the series have or had.

Absent is not zero: what a series' table entry does not call "lazy" is never read as 0 while it is
not exported.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.counters.errors import MissingSeries, ScrapeError
from servers.metrics import FINISHED, NAMED, OTHERS_FINISHED, OUTDATED, Series

SPLIT_NAMES = ("prompt_computed", "prompt_gpu_hit", "prompt_host_loaded")
_FALLBACK_NAMES = ("prompt_tokens", "prefix_queries", "prefix_hits")


Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def parse(text: str, *, wanted: Iterable[Series], where: str) -> Samples:
    """Samples of ``wanted`` by their newest names; ScrapeError when ``text`` is no whole page.

    A sample that comes twice is refused: added up, it would count every token double. The parser
    strips ``_total`` from family names only, so samples are matched. It keeps ``_created``
    timestamps and longer names apart, and knows every escape in a label.
    """
    if not text.endswith("\n"):  # the format's last line ends in one, so this page was cut
        raise ScrapeError(f"{where} ends inside a line: the page was cut short")
    newest = {sample: series.sample for series in wanted for sample in series.samples}
    # Most of a page is histogram buckets; parsing only candidate lines takes 1 ms instead of 10.
    # Split at "\n" alone: splitlines() would also split inside label values.
    lines = [line for line in text.split("\n") if line.startswith(tuple(newest))]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except ValueError as error:  # what the parser raises, for every kind of damage
        raise ScrapeError(f"{where} is not a Prometheus page: {error}") from error
    samples: Samples = {}
    met: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for sample in chain.from_iterable(family.samples for family in families):
        name = newest.get(sample.name)
        if name is not None:
            _refuse_again(sample, met, where)
            samples.setdefault(name, []).append((sample.labels, sample.value))
    return samples


def _refuse_again(
    sample: Any, met: set[tuple[str, frozenset[tuple[str, str]]]], where: str
) -> None:
    key = (sample.name, frozenset(sample.labels.items()))
    if key in met:
        raise ScrapeError(f"{where} has the sample {sample.name} {sample.labels} twice")
    met.add(key)


@dataclass(frozen=True, slots=True)
class HostPages:
    """What LMCache publishes: its server, or its API inside vLLM. Each call asks anew.

    ``model_name``: what our launch serves its model under.
    """

    url: str
    wanted: tuple[Series, ...]
    model_name: str
    get: Callable[[str], httpx.Response]

    @property
    def where(self) -> str:
        """Its counter page, for messages."""
        return f"{self.url}/metrics"

    def metrics(self) -> Samples:
        """The samples of its page that the tier reads."""
        return parse(self.get(self.where).text, wanted=self.wanted, where=self.where)

    def status(self) -> Any:
        """``GET /status``, its live state, as JSON."""
        url = f"{self.url}/status"
        try:
            return self.get(url).json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ScrapeError(f"{url} is not JSON: {error}") from error


def gauge_value(
    samples: Samples, series: Series, *, where: str, model_name: str | None = None
) -> float:
    """The gauge now, summed over engines; MissingSeries at once when it is not exported."""
    values = _values(samples, series, model_name)
    if not values:
        raise MissingSeries(
            f"{where} exports no {series.named}",
            hint="the server's metrics are switched off, or its version has another name for it",
        )
    return sum(values)


def gauge_values(samples: Samples, gauges: Sequence[Series], model_name: str) -> dict[str, float]:
    """The gauges that are exported, by name."""
    found = {series.sample: _values(samples, series, model_name) for series in gauges}
    return {name: sum(values) for name, values in found.items() if values}


def _values(samples: Samples, series: Series, model_name: str | None) -> list[float]:
    return [
        value
        for labels, value in samples.get(series.sample, ())
        if model_name is None or labels.get("model_name") == model_name
    ]


def _count(samples: Samples, series: Series, model_name: str | None) -> int | None:
    """The series summed over engines and labels; None when no sample of ours matches."""
    total = None
    for labels, value in samples.get(series.sample, ()):
        if model_name is not None and labels.get("model_name") != model_name:
            continue
        if series.label is not None and labels.get(series.label[0]) != series.label[1]:
            continue
        is_counted = math.isfinite(value) and value >= 0
        if not is_counted or (series.per_unit == 1 and value % 1):
            raise ScrapeError(f"{series.sample}{dict(labels)} is {value}, not a count")
        total = (total or 0) + round(value * series.per_unit)
    return total


def counts(
    samples: Samples, table: tuple[Series, ...], *, model_name: str | None, where: str
) -> dict[str, int]:
    """Every series of ``table``, by our names; raises MissingSeries for one that must be there."""
    found: dict[str, int] = {}
    for series in table:
        count = _count(samples, series, model_name)
        if count is None and series.presence == "always":
            other = {labels.get("model_name") for labels, _ in samples.get(series.sample, ())}
            raise MissingSeries(
                f"{where} exports no {series.named} for model {model_name!r}"
                + (f"; it has {sorted(map(str, other))}" if other else "")
            )
        if count is not None or series.presence == "lazy":
            found[series.name] = count or 0
    return found


def others_finished(samples: Samples, model_name: str) -> dict[str, int]:
    """Finished requests of other models on vLLM's page, by our name; none of them: no entry."""
    names = {labels.get("model_name", "") for labels, _ in samples.get(FINISHED.sample, ())}
    others = [_count(samples, FINISHED, name) or 0 for name in names - {model_name}]
    return {OTHERS_FINISHED: sum(others)} if others else {}


def require_split(found: Mapping[str, int], *, with_host: bool, page: str = "") -> None:
    """Refuse a server whose series cannot give the three token sources; ``page``: its text."""
    by_source = [name for name in SPLIT_NAMES if name not in found]
    if not by_source:
        return
    needed = (*_FALLBACK_NAMES, *(("external_hits",) if with_host else ()))
    fallback = [name for name in needed if name not in found]
    if not fallback and len(by_source) == len(SPLIT_NAMES):
        return
    names = by_source if len(by_source) < len(SPLIT_NAMES) else by_source + fallback
    outdated = [name for name in OUTDATED if name in page]
    raise MissingSeries(
        "vLLM exports no " + ", ".join(NAMED[name] for name in names)
        + (f"; it has only the outdated {', '.join(outdated)}" if outdated else ""),
        hint="use vLLM 0.16 or later, with statistics on (no --disable-log-stats)",
    )  # fmt: skip
