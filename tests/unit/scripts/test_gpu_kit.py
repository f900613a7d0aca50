import ast
import json
import struct
import sys
import time
import zipfile
from pathlib import Path

import pytest

from harness.plan.files import parse_plan
from scripts.gpu_kit import __main__ as command_line
from scripts.gpu_kit.attempt import bounded, is_whole, rows
from scripts.gpu_kit.fatbin import Entry, NotFatbinError, containers, prune
from scripts.gpu_kit.pack import HERE, LIMIT_BYTES, LMCACHES, check_place, check_size
from scripts.gpu_kit.plans import ARMS, VOCAB_SIZE, paired_plan, single_plan, write_model
from scripts.gpu_kit.steps import Steps
from scripts.gpu_kit.unpack import read_kit, unpack
from scripts.gpu_kit.wheels import KitError, read_pins, unpack_wheels

PTX, SASS = 1, 2
HEADER = 64  # bytes of an entry's header, as nvcc 13 writes it


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQIIHHI", kind, 0x101, HEADER, len(payload), 0, 0, 1, 9, arch)
    return head.ljust(HEADER, b"\0") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(fatbins: bytes) -> bytearray:
    """An ELF file of three sections: none, .nv_fatbin at byte 64, and the names after it."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(fatbins) + len(names)
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 2)

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size).ljust(64, b"\0")

    sections = section(0, 0, 0) + section(1, 64, len(fatbins))
    sections += section(12, 64 + len(fatbins), len(names))
    return bytearray(head.ljust(64, b"\0") + fatbins + names + sections)


def entries_of(image: bytearray) -> list[list[tuple[int, int, bytes]]]:
    def shown(e: Entry) -> tuple[int, int, bytes]:
        return e.kind, e.arch, bytes(image[e.start + HEADER : e.end])

    return [[shown(e) for e in c.entries] for c in containers(image)]


def test_pruning_keeps_the_machine_code_of_one_gpu_and_neither_moves_nor_resizes_anything() -> None:
    fatbins = container(
        entry(SASS, 80, b"A" * 40), entry(SASS, 90, b"B" * 24), entry(PTX, 90, b"C" * 16)
    ) + container(entry(SASS, 90, b"D" * 8), entry(SASS, 90, b"E" * 8))
    image = library(fatbins)
    size, around = len(image), (bytes(image[:64]), bytes(image[64 + len(fatbins) :]))
    result = prune(image, arch=90)
    assert entries_of(image) == [
        [(SASS, 90, b"B" * 24)],
        [(SASS, 90, b"D" * 8), (SASS, 90, b"E" * 8)],
    ]
    assert (len(image), (bytes(image[:64]), bytes(image[64 + len(fatbins) :]))) == (size, around)
    assert (result.containers, result.fillers) == (2, 0)
    assert result.kept_bytes == (64 + 24) + 2 * (64 + 8)
    assert result.found_bytes == {"sm_80": 104, "sm_90": 88 + 144, "ptx_90": 80}
    assert b"A" not in image
    assert b"C" not in image


def test_a_container_without_the_gpu_keeps_a_piece_of_another_gpus_code_and_never_ptx() -> None:
    # Its own smallest is PTX of 64 + 8 bytes, which a driver would compile; the library's smallest
    # machine code for another GPU has 64 + 16 and fits.
    image = library(
        container(entry(SASS, 90, b"B" * 24), entry(SASS, 100, b"F" * 16))
        + container(entry(PTX, 80, b"P" * 8), entry(SASS, 120, b"Q" * 32))
    )
    result = prune(image, arch=90)
    assert entries_of(image) == [[(SASS, 90, b"B" * 24)], [(SASS, 100, b"F" * 16)]]
    assert (result.containers, result.fillers, result.kept_bytes) == (2, 1, 88)


def test_padding_between_containers_is_skipped() -> None:
    first = container(entry(SASS, 90, b"B" * 12))  # 92 bytes: the next starts at 96, after padding
    image = library(first + bytes(4 + 16) + container(entry(SASS, 90, b"D" * 8)))
    assert [len(c.entries) for c in containers(image)] == [1, 1]
    assert [c.start for c in containers(image)] == [64, 64 + 92 + 20]


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (bytearray(b"PK\x03\x04" + bytes(100)), "not a 64-bit little-endian ELF"),
        (library(container(entry(SASS, 90, b"B" * 8))[:-8]), "after its section"),
        (library(container(entry(SASS, 90, b"B" * 8) + b"junk")), "inside an entry's header"),
        (
            library(container(entry(SASS, 90, b"")[:8] + struct.pack("<Q", 999) + bytes(48))),
            "says it ends at",
        ),
    ],
)
def test_what_does_not_parse_is_refused_and_left_as_it_is(image: bytearray, said: str) -> None:
    before = bytes(image)
    with pytest.raises(NotFatbinError, match=said):
        prune(image, arch=90)
    assert bytes(image) == before


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("numpy>=2\n", r"pins.txt:1: 'numpy>=2' is no pin; expected NAME==VERSION"),
        ("# a\nhttpx==1\n\nHTTPX==2\n", r"pins.txt:4: HTTPX==2 pins httpx again, after httpx==1"),
        ("a_b==1\na.b==1\n", r"pins.txt:2: a.b==1 pins a-b again"),
    ],
)
def test_a_bad_pin_is_refused_with_its_line(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "pins.txt").write_text(lines)
    with pytest.raises(KitError, match=said):
        read_pins(tmp_path / "pins.txt")


def test_the_kits_pins_parse_and_carry_nothing_the_box_has_in_a_fixed_version() -> None:
    pins = dict(pin.split("==") for pin in read_pins(HERE / "pins.txt"))
    assert len(pins) > 60
    fixed = [line for line in (HERE / "box.txt").read_text().splitlines() if "==" in line]
    assert len(fixed) > 10
    assert not {line.split("==")[0].replace("-", "_") for line in fixed} & pins.keys()


def test_a_wheel_is_unpacked_as_an_installer_does_without_commands_and_hashes(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "thing/__init__.py",
            "thing-1.dist-info/METADATA",
            "thing-1.dist-info/RECORD",
            "thing-1.data/platlib/thing/fast.so",
            "thing-1.data/scripts/thing",
        ):
            archive.writestr(name, "12345")
    assert unpack_wheels([wheel], tmp_path / "site") == 15
    site = tmp_path / "site"
    found = sorted(p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file())
    assert found == ["thing-1.dist-info/METADATA", "thing/__init__.py", "thing/fast.so"]


def test_a_wheel_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil-1.whl", "w") as archive:
        archive.writestr("../evil.py", "")
    with pytest.raises(KitError, match="outside itself"):
        unpack_wheels([tmp_path / "evil-1.whl"], tmp_path / "site")


def test_a_kit_over_the_limit_is_refused_naming_what_is_largest(tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(bytes(3 * 2**20))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.xz").write_bytes(bytes(2**20))
    assert check_size(tmp_path, limit_bytes=4 * 2**20) == 4 * 2**20
    largest = r"4\.0 MiB, more than 3\.0 MiB; largest: a\.xz 3\.0 MiB, deep/b\.xz 1\.0 MiB"
    with pytest.raises(KitError, match=largest):
        check_size(tmp_path, limit_bytes=3 * 2**20)
    assert LIMIT_BYTES == 64 * 1024 * 1024


@pytest.mark.parametrize(
    ("out", "work", "said"),
    [
        # Packing replaces harness/, servers/ and sim/ of its folder: a checkout has them, too.
        ("checkout", "w", "checkout holds .git, which is no part of a kit"),
        ("file", "w", "file is no folder"),
        ("kit", "mine", "mine is not empty and nothing was packed in it"),
    ],
)
def test_a_folder_that_is_no_kit_is_not_packed_into(
    out: str, work: str, said: str, tmp_path: Path
) -> None:
    for name in ("checkout/harness/mine.py", "checkout/.git/HEAD", "mine/site/mine.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KitError, match=said):
        check_place(tmp_path / out, tmp_path / work)


@pytest.mark.parametrize(
    ("out", "said"), [("file", "file is no folder"), ("file/kit", "Not a directory")]
)
def test_a_place_that_cannot_hold_a_kit_is_wrong_usage(
    out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["pack", "--out", str(tmp_path / out), "--work", str(tmp_path / "w")])
    assert said in capsys.readouterr().err


def test_a_kit_is_packed_over_an_older_or_unfinished_one(tmp_path: Path) -> None:
    kit, work = tmp_path / "kit", tmp_path / "work"
    check_place(kit, work)
    (kit / "harness").mkdir(parents=True)
    (kit / "py.tar.xz").write_bytes(b"")
    work.mkdir()
    check_place(kit, work)
    (work / "steps.json").write_text("{}")
    (work / "site").mkdir()
    check_place(kit, work)
    (work / "steps.json").unlink()
    with pytest.raises(KitError, match="nothing was packed in it"):
        check_place(kit, work)


def test_an_lmcache_built_for_another_torch_is_refused_before_anything_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["pack", "--out", str(tmp_path / "kit"), "--lmcache", "0.5.6"])
    said = capsys.readouterr().err
    assert f"0.5.6 is not built for the box's torch 2.11: {', '.join(LMCACHES)} are" in said
    assert not (tmp_path / "kit").exists()


def test_a_step_is_done_once_until_its_inputs_change_or_what_it_made_is_gone(
    tmp_path: Path,
) -> None:
    made, runs = tmp_path / "made", []

    def work() -> dict[str, int]:
        runs.append(1)
        made.touch()
        return {"n": len(runs)}

    def do(inputs: object) -> dict[str, int]:
        steps = Steps(tmp_path / "steps.json", say=lambda text: None)
        return steps.do("build", work, inputs=inputs, makes=(made,))

    assert [do("a"), do("a"), do("b"), do("b")] == [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 2}]
    made.unlink()
    assert do("b") == {"n": 3}


def test_a_failed_step_is_written_down_and_done_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "steps.json", say=lambda text: None)
    with pytest.raises(ZeroDivisionError):
        steps.do("divide", lambda: {"n": 1 // 0})
    written = json.loads((tmp_path / "steps.json").read_text())["steps"]["divide"]
    assert written["status"] == "failed"
    assert written["result"] == {"error": "ZeroDivisionError: integer division or modulo by zero"}
    assert written["seconds"] < 1
    assert steps.do("divide", lambda: {"n": 4 // 2}) == {"n": 2}


@pytest.mark.parametrize("arm", ARMS)
def test_kvcliff_accepts_the_boxs_plans(tmp_path: Path, arm: str) -> None:
    model = write_model(tmp_path / "model", "8b")
    plan = parse_plan(paired_plan(arm, model=model, start_s=90).encode(), where="kit")
    assert plan.order == ("baseline", arm, arm, "baseline", "control")
    assert plan.arm(arm).tier == arm
    assert (plan.model.weights, plan.deadlines.start_s) == ("dummy", 90)
    work, server = plan.workload, plan.server
    # The replay must not fit the GPU tier, all documents must fit the control's and the host tier
    # below the watermark: 147,456 bytes of KV a token, 24 whole chunks of 256 tokens a prompt.
    prompt_blocks = -(-(work.document_tokens + work.question_tokens) // server.block_size)
    assert 4 * prompt_blocks < server.num_gpu_blocks - 1 < 5 * prompt_blocks < 8 * prompt_blocks
    assert plan.control is not None
    assert plan.control.num_gpu_blocks > (work.documents + work.warmup_documents) * prompt_blocks
    stored = (work.documents + work.warmup_documents) * 24 * 256 * 147_456
    assert stored < plan.host.gib * 2**30 * plan.host.watermark
    single = parse_plan(single_plan(arm, model=model, start_s=90).encode(), where="kit")
    assert single.order == (arm,)


def test_the_model_has_the_real_ones_layers_and_few_words(tmp_path: Path) -> None:
    config = json.loads((write_model(tmp_path, "8b") / "config.json").read_text())
    names = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size")
    assert [config[name] for name in names] == [4096, 36, 8, 128, VOCAB_SIZE]


def test_rows_are_counted_by_arm_and_a_torn_line_is_none(tmp_path: Path) -> None:
    run = tmp_path / "20260101T000000Z-x"
    run.mkdir()
    (run / "manifest.json").touch()
    for name, text in {
        "journal-01-baseline.jsonl": "{}\n{}\n",
        "journal-02-lmcache-mp.jsonl": "{}\n{}\n{",
        "journal-03-lmcache-mp.jsonl": "{}\n",
        "journal-04-baseline.jsonl": "",
    }.items():
        (run / name).write_text(text)
    assert rows(tmp_path) == {"baseline": 2, "lmcache-mp": 3}
    assert rows(tmp_path / "nothing") == {}


def test_a_program_past_its_time_gets_sigterm_and_its_last_words_are_kept(tmp_path: Path) -> None:
    # A shell, because it is ready to be told long before the time is over.
    script = "trap 'echo tidied up; exit 0' TERM; while :; do sleep 0.1; done"
    began = time.monotonic()
    assert bounded(["/bin/sh", "-c", script], env={}, log=tmp_path / "log", seconds=2) is None
    assert time.monotonic() - began < 20
    assert (tmp_path / "log").read_text() == "tidied up\n"


def test_an_unforeseen_error_of_python_is_not_taken_for_a_run_with_findings() -> None:
    # Both end with exit code 1; only a run has rows.
    assert is_whole({"exit_code": 1, "rows": {"baseline": 2}})
    assert not is_whole({"exit_code": 1, "rows": {}})
    assert not is_whole({"exit_code": None, "rows": {"baseline": 2}})


def test_a_folder_that_is_no_whole_kit_and_a_damaged_part_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match=r"no kit\.json"):
        read_kit(tmp_path)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    part = {"name": "py.tar.xz", "place": None, "packed_bytes": 3, "sha256": "0" * 64}
    (tmp_path / "py.tar.xz").write_bytes(b"abc")
    (tmp_path / "kit.json").write_text(json.dumps({"python": here, "parts": [part]}))
    with pytest.raises(KitError, match=r"py\.tar\.xz is not what was packed"):
        unpack(tmp_path, tmp_path / "site")
    (tmp_path / "kit.json").write_text(json.dumps({"python": "3.99", "parts": [part]}))
    with pytest.raises(KitError, match=r"for Python 3\.99 on x86_64, this is"):
        read_kit(tmp_path)
    (tmp_path / "kit.json").write_text('{"python": "3.')
    with pytest.raises(KitError, match=r"kit\.json is not JSON"):
        read_kit(tmp_path)


def test_what_runs_before_the_kit_is_unpacked_needs_the_standard_library_alone() -> None:
    for file in sorted(HERE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = {str(node.module).split(".")[0]}
            else:
                continue
            assert names <= sys.stdlib_module_names, file


def test_no_third_party_binary_is_kept_with_the_kits_code() -> None:
    kept = {path.suffix for path in HERE.iterdir() if path.is_file()}
    assert kept == {".py", ".txt", ".toml"}
