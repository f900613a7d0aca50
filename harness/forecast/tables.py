"""What ``kvcliff plan`` shows in a terminal."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from harness.console import say
from harness.terminal import out, table_of
from harness.words_and_colours import SOURCE_WORDS, ms
from sim.units import GIB


def show_plan(content: dict[str, Any]) -> None:
    """A plan's predicted splits, sizes and commands, on stdout."""
    requests = content["requests"]
    out.print(f"plan {content['plan_id']}: {requests['measured']} requests measured "
              f"({requests['sent']} with the warm-up) in {len(content['sessions'])} sessions: "
              f"{' '.join(content['sessions'])}", soft_wrap=True)  # fmt: skip
    out.print(_model_line(content["model"]), soft_wrap=True)
    out.print(_tier_table(content["tiers"]))
    out.print(_memory_table(content["memory"]))
    if content["predicted"]:
        out.print(_prediction_table(content["predicted"], content["documents"]))
    for arm, reason in content["not_predicted"].items():
        say(f"{arm} is not predicted: {reason}")
    if content["cliff"]["gpu"] is None:
        say(content["cliff"]["why_not"])
    else:
        out.print(_cliff_table(content["cliff"]))
    if content["expected"]:
        out.print(_expected_table(content["expected"]["passes"]))
        _say_expected(content["expected"])
    out.print(_power_table(content["power"]))
    for arm, commands in content["commands"].items():
        out.print(f"\nservers of {arm}:")
        for command, env in zip(commands, content["environments"][arm], strict=True):
            out.print("  " + _shell_line(command, env), soft_wrap=True)
    for warning in content["warnings"]:
        say(f"warning: {warning}")
    out.print(f"\nestimated duration: {content['estimate']}", soft_wrap=True)


def _power_table(power: dict[str, Any]) -> Table:
    rows = power["by_pairs"]
    table = table_of(
        f"How many pairs of sessions? Runs called supported, by the true ratio; asked: "
        f"{power['min_ratio']:g}; {power['noise_from']}",
        *(
            "pairs",
            "minutes without control",
            *(f"ratio {ratio}" for ratio in rows[0]["supported"]),
        ),
    )
    for row in rows:
        minutes = "–" if row["minutes"] is None else f"{row['minutes']:.0f}"
        table.add_row(
            str(row["pairs"]), minutes, *(f"{share:.0%}" for share in row["supported"].values())
        )
    return table


def _model_line(model: dict[str, Any]) -> str:
    text = (
        f"model {model['path']}, shape from {model['shape_from']}: {model['bytes_per_token']:,} "
        f"bytes of KV a token in {model['dtype']}"
    )
    if model["weights"] == "dummy":
        return text + "; dummy weights: times and token sources are real, outputs mean nothing"
    return text + ("; vLLM will download it" if model["is_download"] else "")


def _shell_line(command: Sequence[str], env: Mapping[str, str | None]) -> str:
    """The command as a shell takes it, with the variables that are unset and set for it."""
    unset = [word for name, value in env.items() if value is None for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in env.items() if value is not None]
    return shlex.join(["env", *unset, *changed, *command])


def _memory_table(memory: dict[str, Any]) -> Table:
    table = table_of(
        "Memory one session needs, in GiB (GPU and host: estimates)",
        *("arm", "GPU", "weights", "KV pool", "host", "pinned tier", "/dev/shm"),
    )
    fields = ("gpu_bytes", "weights_bytes", "pool_bytes", "host_bytes", "tier_bytes", "shm_bytes")
    for arm, needs in memory.items():
        sizes = ("–" if needs[field] is None else f"{needs[field] / GIB:.2f}" for field in fields)
        table.add_row(arm, *sizes)
    return table


def _expected_table(passes: dict[str, Any]) -> Table:
    arms = list(dict.fromkeys(arm for content in passes.values() for arm in content["arms"]))
    table = table_of(
        "Expected TTFT in ms, median of a pass: an estimate, nothing is measured",
        *("pass", *arms, "baseline ÷ treatment, by document"),
    )
    for name, content in passes.items():
        times = (content["arms"].get(arm) for arm in arms)
        ratio = "–" if content["ratio"] is None else f"{content['ratio']:.2f}"
        table.add_row(name, *("–" if t is None else ms(t["p50_ms"]) for t in times), ratio)
    return table


def _say_expected(expected: dict[str, Any]) -> None:
    out.print(f"expected by {expected['from']}", soft_wrap=True)
    if expected["is_beyond_probe"]:
        say(
            "warning: some prompts are beyond what the probe measured: their times are extrapolated"
        )


def _tier_table(tiers: dict[str, Any]) -> Table:
    table = table_of(
        "Tiers (working set: the documents, and questions that stay in their prompts)",
        *("arm", "working set", "GPU tier", "host tier"),
    )
    for arm, size in tiers.items():
        host = "–"
        if size["host_gib"] is not None:
            tokens = size["host_tokens"] or 0
            host = f"{tokens:,} tokens, {size['host_gib']:g} GiB ({size['host_kind']})"
        gpu = f"{size['gpu_tokens']:,} tokens, {size['gpu_bytes'] / GIB:.3g} GiB"
        table.add_row(arm, f"{size['working_set_tokens']:,} tokens", gpu, host)
    return table


def _prediction_table(predicted: dict[str, Any], documents: dict[str, Any]) -> Table:
    table = table_of(
        "Predicted prompt tokens by source, one session of each arm; documents in the order read",
        *("pass", "arm", "computed", "GPU hit", "host", "source"),
    )
    for name in next(iter(predicted.values())):
        for arm, passes in predicted.items():
            tokens = passes[name]
            runs = (f"{r['documents']} {SOURCE_WORDS[r['source']]}" for r in documents[arm][name])
            table.add_row(
                name, arm,
                *(f"{tokens[source]:,}" for source in ("computed", "gpu_hit", "host_loaded")),
                " · ".join(runs),
            )  # fmt: skip
        table.add_section()
    return table


def _cliff_table(cliff: dict[str, Any]) -> Table:
    table = table_of(
        "The cliff: the smallest tier that serves every replay in full, beside what is planned",
        *("tier", "full from", "planned", "full"),
    )
    gpu, host = cliff["gpu"], cliff["host"]
    for arm, planned in gpu["planned"].items():
        full_from = gpu["full_from_by_arm"][arm]
        cells = _cliff_cells(full_from, planned, unit="blocks", of=gpu["reusable_tokens"])
        table.add_row(f"GPU, {arm}", *cells)
    if host is not None:
        cells = _cliff_cells(
            host["full_from"], host["planned"], unit="chunks", of=host["reusable_tokens"]
        )
        table.add_row("host", *cells)
    return table


def _cliff_cells(
    full: dict[str, Any], planned: dict[str, Any], *, unit: str, of: int
) -> tuple[str, str, str]:
    """The last three cells of a row; ``of``: tokens that a tier without end would serve."""
    texts = [
        f"{size[unit]:,} {unit}, {size['tokens']:,} tokens, {size['gib']:.3g} GiB"
        for size in (full, planned)
    ]
    if not of:
        return ("no size: nothing to serve", texts[1], "–")
    return (texts[0], texts[1], "yes" if planned["is_full"] else "no")
