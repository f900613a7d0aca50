"""Build a kit: the engines' wheels cut down to one GPU, and kvcliff, in at most 64 MiB.

The big libraries travel as one ``.xz`` each, so that the box unpacks them in parallel; everything
else is ``py.tar.xz``. Beside them lie kvcliff's packages as they are, ``kit.json`` and ``box.py``.
"""

import io
import json
import lzma
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from . import fatbin
from .steps import Steps, stamp, write_whole
from .wheels import BOX_PYTHON, KitError, download, read_pins, unpack_wheels

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
MIB: Final = 2**20
LIMIT_BYTES: Final = 64 * MIB
GPU_ARCH: Final = 90

VLLM: Final = "0.26.0"
"""The newest vLLM built for the box's torch 2.11 and CUDA 13; 0.27 to 0.32 are built for 2.13."""

LMCACHES: Final = ("0.5.1", "0.5.2", "0.5.3")
"""LMCache built for torch 2.11 that knows vLLM 0.26's packed KV layout; from 0.5.4 on its CUDA
extension is built for torch 2.13 and must not be loaded here."""

# Libraries with GPU code that Qwen3 needs, in the site folder.
_LIBRARIES: Final = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "lmcache/c_ops.cpython-312-x86_64-linux-gnu.so",
)
# Not needed on Hopper for a dense model, each behind an import that may fail: FlashAttention 2
# (283 MiB for sm_80; version 3 is chosen), FP8/FP4 and MLA kernels, the Rust front end, LMCache's
# network back ends, translations and other models' tokenizers.
_LEFT_OUT: Final = (
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/tml_fa4",
    "lmcache/lmcache_fs.cpython-312-x86_64-linux-gnu.so",
    "lmcache/lmcache_redis.cpython-312-x86_64-linux-gnu.so",
    "lmcache/tools/cache_simulator/docs",
    "pycountry/locales",
    "mistral_common/data",
)
_ENTRY: Final = "vllm/entrypoints/launchers"
# kvcliff starts vLLM by the module that has the API server since 0.32; 0.26 has it elsewhere.
# LMCache imports cryptography (3.4 MB) for an encrypting serializer that nobody here turns on.
_STAND_INS: Final = {
    f"{_ENTRY}/__init__.py": "",
    f"{_ENTRY}/api_server/__init__.py": "",
    f"{_ENTRY}/api_server/entry.py": (
        "import runpy\n\nif __name__ == '__main__':\n"
        "    runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')\n"
    ),
    "mistral_common/data/__init__.py": "",
    "cryptography/__init__.py": "",
    "cryptography/exceptions.py": "class InvalidTag(Exception): ...\n",
    "cryptography/hazmat/__init__.py": "",
    "cryptography/hazmat/primitives/__init__.py": "",
    "cryptography/hazmat/primitives/hashes.py": "class SHA256: ...\n",
    "cryptography/hazmat/primitives/ciphers/__init__.py": "",
    "cryptography/hazmat/primitives/ciphers/aead.py": "class AESGCM: ...\n",
    "cryptography/hazmat/primitives/kdf/__init__.py": "",
    "cryptography/hazmat/primitives/kdf/hkdf.py": "class HKDF: ...\n",
}
# kvcliff itself; of scripts/ what runs on the box.
_OURS: Final = ("harness", "servers", "sim", "scripts/gpu_kit")
_OUR_FILES: Final = ("scripts/pcie_probe.py",)
STEPS_FILE: Final = "steps.json"
"""In the work folder: the steps done there."""
_BOX_ENTRY: Final = '''"""The one command on the box: python3 box.py run --out OUT (see scripts/gpu_kit/box.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scripts.gpu_kit.box import main

if __name__ == "__main__":
    sys.exit(main())
'''


@dataclass(frozen=True, slots=True)
class Part:
    """One compressed file of the kit; ``place``: where it goes, or None for a tar of the site."""

    name: str
    place: str | None
    packed_bytes: int
    sha256: str


def pack(out: Path, *, lmcache: str, work: Path, steps: Steps) -> dict[str, Any]:
    """Build the kit in ``out``, using the folder ``work`` (about 2 GB) for what lies between.

    ``lmcache`` is one of LMCACHES. Returns kit.json's content. Steps done before with the same
    inputs are not repeated. Raises KitError when the index lacks something and when the kit is too
    big, naming what is largest; ``out`` is then no kit: it lacks kit.json.
    """
    pins = [f"vllm=={VLLM}", f"lmcache=={lmcache}", *read_pins(HERE / "pins.txt")]
    out.mkdir(parents=True, exist_ok=True)
    (out / "kit.json").unlink(missing_ok=True)
    wheels, site = work / f"wheels-{stamp(pins)}", work / "site"
    steps.do("download", lambda: _download(pins, wheels), inputs=pins, makes=(wheels,))
    tree = {"pins": pins, "unpack": _code("wheels.py")}
    steps.do("unpack", lambda: _unpack(wheels, site), inputs=tree, makes=(site,))
    parts = [_library(name, site, out, steps, tree) for name in _LIBRARIES]
    parts.append(_python(site, out, steps, tree))
    _copy_ours(out)
    content = {
        "schema": 1,
        "vllm": VLLM,
        "lmcache": lmcache,
        "python": BOX_PYTHON,
        "gpu_arch": GPU_ARCH,
        "kvcliff": {"revision": _git("rev-parse", "HEAD"), "changed": bool(_git("status", "-s"))},
        "pins": pins,
        "parts": [asdict(part) for part in parts],
    }
    check_size(out)
    write_whole(out / "kit.json", json.dumps(content, indent=1))
    return content


def check_place(out: Path, work: Path) -> None:
    """KitError where packing would delete or overwrite what is no kit.

    A kit's folder holds nothing but a kit's files, a work folder has the steps done in it.
    """
    of_a_kit = {
        "box.py", "kit.json", "py.tar.xz", *(f"{Path(name).name}.xz" for name in _LIBRARIES),
        *(Path(name).parts[0] for name in (*_OURS, *_OUR_FILES)),
    }  # fmt: skip
    for folder in (out, work):
        if folder.exists() and not folder.is_dir():
            raise KitError(f"{folder} is no folder")
    others = sorted({path.name for path in out.iterdir()} - of_a_kit) if out.is_dir() else []
    if others:
        raise KitError(f"{out} holds {others[0]}, which is no part of a kit; give another --out")
    if work.is_dir() and any(work.iterdir()) and not (work / STEPS_FILE).is_file():
        raise KitError(f"{work} is not empty and nothing was packed in it; give another --work")


def check_size(kit: Path, *, limit_bytes: int = LIMIT_BYTES) -> int:
    """Bytes of all files of ``kit``; KitError with the largest three when over the limit."""
    sizes = sorted(
        ((path.stat().st_size, path) for path in kit.rglob("*") if path.is_file()), reverse=True
    )
    total = sum(size for size, _ in sizes)
    if total > limit_bytes:
        largest = ", ".join(f"{path.relative_to(kit)} {_mib(size)}" for size, path in sizes[:3])
        raise KitError(
            f"the kit has {_mib(total)}, more than {_mib(limit_bytes)}; largest: {largest}. "
            "Leave out more (_LEFT_OUT in pack.py) or take an older pin"
        )
    return total


def _download(pins: list[str], folder: Path) -> dict[str, Any]:
    wheels = download(pins, folder)
    return {"wheels": len(wheels), "bytes": sum(path.stat().st_size for path in wheels)}


def _unpack(wheels: Path, site: Path) -> dict[str, Any]:
    return {"bytes": unpack_wheels(sorted(wheels.glob("*.whl")), site)}


def _library(name: str, site: Path, out: Path, steps: Steps, tree: object) -> Part:
    """Cut ``name`` down to one GPU and compress it; the file in ``site`` stays whole."""
    target = out / f"{Path(name).name}.xz"

    def work() -> dict[str, Any]:
        try:
            image = bytearray((site / name).read_bytes())
            pruned = fatbin.prune(image, arch=GPU_ARCH)
        except (OSError, fatbin.NotFatbinError) as error:
            raise KitError(f"{name} cannot be cut down: {error}") from error
        if not pruned.kept_bytes:
            raise KitError(f"{name} has no code for sm_{GPU_ARCH}: {pruned.found_bytes}")
        write_whole(target, compress(bytes(image)))
        return {"bytes": len(image), **asdict(pruned), **_measured(target)}

    inputs = [tree, GPU_ARCH, _code("fatbin.py")]
    done = steps.do(f"prune {target.name}", work, inputs=inputs, makes=(target,))
    return Part(target.name, name, done["packed_bytes"], done["sha256"])


def _python(site: Path, out: Path, steps: Steps, tree: object) -> Part:
    """Everything of ``site`` but the libraries and what is left out, in one archive."""
    target = out / "py.tar.xz"

    def work() -> dict[str, Any]:
        raw = _tar(site)
        write_whole(target, compress(raw))
        return {"bytes": len(raw), **_measured(target)}

    inputs = [tree, _LIBRARIES, _LEFT_OUT, _STAND_INS]
    done = steps.do("pack py.tar.xz", work, inputs=inputs, makes=(target,))
    return Part(target.name, None, done["packed_bytes"], done["sha256"])


def _tar(site: Path) -> bytes:
    """A tar of the kept files, the same bytes for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(_kept(site)):
            entry = tarfile.TarInfo(path.relative_to(site).as_posix())
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
        for name, text in sorted(_STAND_INS.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _kept(site: Path) -> Iterator[Path]:
    gone = {site / name for name in (*_LIBRARIES, *_LEFT_OUT)}
    stand_ins = {site / name for name in _STAND_INS}
    for path in site.rglob("*"):
        if path.is_file() and path not in stand_ins and not gone & {path, *path.parents}:
            yield path


def compress(content: bytes) -> bytes:
    """``content`` as one xz stream with the largest dictionary a preset has (64 MiB).

    Needs 0.7 GB of memory; the other end needs 65 MiB and the standard library.
    """
    return lzma.compress(content, preset=9)


def _measured(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"packed_bytes": len(content), "sha256": sha256(content).hexdigest()}


def _copy_ours(out: Path) -> None:
    """kvcliff's packages, new every time: they change more often than the engines."""
    ignored = shutil.ignore_patterns("__pycache__", "matrix")
    for name in _OURS:
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(ROOT / name, out / name, ignore=ignored)
    for name in _OUR_FILES:
        shutil.copyfile(ROOT / name, out / name)
    write_whole(out / "box.py", _BOX_ENTRY)


def _code(name: str) -> str:
    """The text of a module here: what it makes is made again when it changes."""
    return (HERE / name).read_text(encoding="utf-8")


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
