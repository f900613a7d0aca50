import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

SCENARIO = ROOT / "sim" / "scenario.py"
NO_HITS = {"gpu_hits": 0, "cpu_hits": 0, "misses": 10, "hit_docs": []}


@pytest.fixture
def scenario(tmp_path: Path):
    def run(*words: str, python: tuple[str, ...] = ("-S",), **streams: object):
        captured = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        argv = [sys.executable, *python, str(SCENARIO), *words]
        return subprocess.run(argv, cwd=tmp_path, text=True, timeout=60, check=False, **captured)

    return run


def passes(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert list(result) == ["passes"]
    return result["passes"]


def test_the_defaults_give_the_cliff_and_a_reverse_pass_that_finds_the_last_four(scenario):
    # 4 documents of 5,011 fit 21,520: after a forward pass 6, 7, 8, 9 are there and 0 is asked.
    assert passes(scenario()) == [
        {"order": "fwd", **NO_HITS},
        {"order": "fwd", **NO_HITS},
        {"order": "rev", "gpu_hits": 4, "cpu_hits": 0, "misses": 6, "hit_docs": [9, 8, 7, 6]},
    ]


def test_a_cpu_tier_that_holds_all_serves_what_the_gpu_lost(scenario):
    result = passes(scenario("--cpu", "56000"))
    assert result[1:] == [
        {"order": "fwd", "gpu_hits": 0, "cpu_hits": 10, "misses": 0, "hit_docs": [*range(10)]},
        {
            "order": "rev",
            "gpu_hits": 4,
            "cpu_hits": 6,
            "misses": 0,
            "hit_docs": [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        },
    ]


@pytest.mark.parametrize(("gpu", "hits"), [("5", 0), ("6", 3), ("0", 0)])
def test_hits_start_where_the_last_document_fits_exactly(scenario, gpu: str, hits: int):
    second = passes(scenario(f"--gpu={gpu}", "--docs=3", "--tokens=2", "--passes", "fwd,fwd"))[1]
    assert (second["gpu_hits"], second["misses"]) == (hits, 3 - hits)


def test_list_items_are_trimmed_and_a_first_reverse_pass_reads_in_reverse(scenario):
    result = passes(
        scenario("--gpu", "2", "--docs", "3", "--tokens", "1", "--passes", " rev , fwd ")
    )
    # rev reads 2 1 0 and keeps 1, 0; fwd finds 0 and 1, then misses 2.
    assert [one["order"] for one in result] == ["rev", "fwd"]
    assert result[1]["hit_docs"] == [0, 1]


def test_it_prints_one_line_with_the_keys_of_the_contract_in_order(scenario):
    assert scenario("--docs", "1", "--passes", "fwd").stdout == (
        '{"passes": [{"order": "fwd", "gpu_hits": 0, "cpu_hits": 0, "misses": 1, "hit_docs": []}]}\n'
    )


def test_a_hundred_thousand_documents_are_read_within_the_deadline(scenario):
    done = scenario("--docs", "100000", "--tokens", "1", "--gpu", "99999", "--cpu", "100000")
    assert [one["cpu_hits"] for one in passes(done)] == [0, 100000, 1]


BAD = {
    "negative": (["--gpu", "-5"], ["--gpu", "'-5'", "whole number from 0"]),
    "dash that is no number": (["--gpu", "-5x"], ["--gpu", "'-5x'", "whole number from 0"]),
    "sign": (["--cpu", "+5"], ["--cpu", "'+5'", "whole number from 0"]),
    "underscore": (["--tokens", "1_000"], ["--tokens", "'1_000'", "whole number from 1"]),
    "blanks": (["--docs", " 5 "], ["--docs", "' 5 '", "whole number from 1"]),
    "line end": (["--docs", "5\n"], ["--docs", "'5\\n'", "whole number from 1"]),
    "other digits": (["--docs", "٣"], ["--docs", "'٣'", "whole number from 1"]),
    "fraction": (["--gpu", "1.5"], ["--gpu", "'1.5'", "whole number from 0"]),
    "empty": (["--gpu", ""], ["--gpu", "''", "whole number from 0"]),
    "not finite": (["--cpu=inf"], ["--cpu", "'inf'", "whole number from 0"]),
    "5,000 digits": (["--gpu", "9" * 5000], ["--gpu", "'9999", "whole number from 0"]),
    "no documents": (["--docs", "0"], ["--docs", "'0'", "whole number from 1"]),
    "endless documents": (["--docs", "10000001"], ["--docs", "to 10000000"]),
    "no tokens": (["--tokens", "0"], ["--tokens", "'0'", "whole number from 1"]),
    "unknown pass": (["--passes", "fwd,up"], ["--passes", "'up'", "fwd or rev"]),
    "pass in capitals": (["--passes", "FWD"], ["--passes", "'FWD'", "fwd or rev"]),
    "empty pass": (["--passes", "fwd,,rev"], ["--passes", "'fwd,,rev'", "empty", "fwd or rev"]),
    "bare comma": (["--passes", ","], ["--passes", "','", "empty", "fwd or rev"]),
    "no passes": (["--passes", ""], ["--passes", "''", "empty", "fwd or rev"]),
    "repeated": (["--gpu", "1", "--gpu=2"], ["--gpu", "'2'", "only once"]),
    "abbreviated": (["--gp", "3"], ["'--gp'", "--gpu, --docs"]),
    "unknown flag": (["--gpus=3"], ["'--gpus=3'", "--gpu, --docs"]),
    "stray word": (["a\nb"], ["'a\\nb'", "--gpu, --docs"]),
    "no value": (["--docs"], ["--docs", "no value", "one value"]),
    "a flag as value": (["--gpu", "--cpu", "3"], ["--gpu", "'--cpu'", "whole number from 0"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_naming_argument_value_and_what_is_accepted(scenario, kind: str):
    words, named = BAD[kind]
    done = scenario(*words, python=("-X", "utf8"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert [text for text in named if text not in done.stderr] == []


def test_help_names_every_default(scenario):
    done = scenario("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for default in ("default 21520", "default 10", "default 5011", "default fwd,fwd,rev"):
        assert default in " ".join(done.stdout.split())


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_an_output_that_cannot_be_written_is_one_line_and_no_traceback(scenario, words: list[str]):
    with Path("/dev/full").open("w") as full:
        done = scenario(*words, stdout=full)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "cannot write standard output" in done.stderr


def test_a_closed_output_is_one_line_and_no_traceback(tmp_path: Path):
    shell = ["sh", "-c", 'exec "$0" "$1" >&-', sys.executable, str(SCENARIO)]
    done = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "scenario.py: error: cannot write standard output: it is closed\n"


def test_it_runs_isolated_from_its_own_folder_and_as_a_module(scenario):
    assert passes(scenario(python=("-I", "-S"))) == passes(scenario())
    module = [sys.executable, "-m", "sim.scenario"]
    done = subprocess.run(
        module, cwd=SCENARIO.parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout == scenario().stdout
