"""``kvcliff predict``: every request of a file or stream, predicted to the token as it is read.

The requests are served one at a time, in file order, from an empty server that settles in between.
Memory holds the tiers' state and one request, however long the file.

Two ways to say a prompt:

``{"prompt": [ids], "output_len": n, "output": [ids]}``: token ids, 0 ≤ id < 2**31.

``{"segments": [["name", n_tokens], …], "output_len": n, "output": "name"}``: the prompt is the
segments one after the other. The token at position p of a segment depends on ``(name, p)`` alone:
segments of one name are equal as far as the shorter one goes, segments of two names have no token
in common, and none with a prompt of ids. Two prompts share a prefix as far as their tokens agree
from the start, so ``[["a", 100], ["b", 50]]`` and ``[["a", 120]]`` share 100 tokens, and
``[["a", 50], ["a", 50]]`` and ``[["a", 100]]`` share 50: a segment always starts at position 0.

``output`` (optional) names the generated tokens, for later prompts that repeat them: ids, or the
segment a later prompt repeats them as. ``stopped``: a stop token ended the answer early;
``output_len`` is then what was really generated. Prompt and output are ``MOST_REQUEST_TOKENS`` at most.

A line that cannot be predicted gets a row that says why instead of counts, and the lines after it
are read all the same; ``is_refused`` tells such rows, and the command ends with exit code 1.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import InputError
from harness.files import describe_invalid, load_json
from harness.plan.host import DEFAULT, EvictionFields
from harness.plan.lookup import config_of
from servers.tiers.registry import keeps_blocks
from sim.errors import SpecError
from sim.geometry import KvGeometry
from sim.predict import NotPredictable, Prediction, TierSpec
from sim.streaming import StreamPredictor, segment_ids
from sim.tiers.host import align_up
from sim.tiers.registry import with_host
from sim.tiers.settings import HostKind
from sim.tiers.spec import engine_note

STDIN = "-"

MOST_REQUEST_TOKENS = 10_000_000
"""Tokens of one request: the longest context any model claims, and about 1 GB of ids."""

SpecCount = Annotated[int, Field(ge=1, le=2**53)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
SegmentName = Annotated[str, Field(min_length=1)]
# JSON has no tuples, so the pair itself is read from a list; its members stay strict.
Segment = Annotated[
    tuple[SegmentName, Annotated[int, Field(ge=1, le=MOST_REQUEST_TOKENS)]], Field(strict=False)
]

# Set on a request, these make the server's work depend on more than the tokens.
_WHY_NOT = {
    "stop": "stop strings end a request by an abort, whose time decides which blocks stay",
    "lora": "a LoRA adapter is part of every block's hash; not compared with the engine's classes",
    "multimodal": "images and audio are part of a block's hash, and their tokens are not ids",
    "prompt_logprobs": "prompt_logprobs make vLLM skip its prefix cache",
    "cache_salt": "a cache_salt is part of every block's hash; leave it out where it is constant",
}


class PredictSpec(EvictionFields):
    """SPEC.json. ``num_gpu_blocks`` includes vLLM's null block; sizes in tokens unless said.

    ``chunk_bytes`` is one chunk's KV before alignment: given, or from ``model`` (what
    ``lookup.config_of`` finds) in ``kv_dtype``; without both, bytes are null. ``host_bytes`` makes
    the watermark of ``lmcache-mp`` exact to the byte and can stand for ``host_chunks``.
    ``chunk_size`` is LMCache's 256 unless said, and a block for ``native`` (blocks_per_chunk 1).
    """

    engine: str
    block_size: SpecCount
    num_gpu_blocks: Annotated[int, Field(ge=2, le=2**31)]
    max_batched_tokens: SpecCount
    host: HostKind = "none"
    chunk_size: SpecCount = DEFAULT.chunk_tokens
    host_chunks: Annotated[int, Field(ge=0, le=2**53)] | None = None
    host_bytes: SpecCount | None = None
    chunk_bytes: SpecCount | None = None
    async_scheduling: bool = True
    prefix_caching: bool = True
    model: str | None = None
    kv_dtype: str = "auto"
    concurrency: SpecCount = 1
    speculative_tokens: Annotated[int, Field(ge=0)] = 0
    lazy_offload: bool = False

    @model_validator(mode="before")
    @classmethod
    def _chunks_of_native(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "block_size" in fields and keeps_blocks(fields.get("host")):
            return {"chunk_size": fields["block_size"]} | fields
        return fields

    @model_validator(mode="after")
    def _is_predictable(self) -> Self:
        if self.concurrency > 1:
            raise ValueError(
                f"concurrency is {self.concurrency}: with more than one request in flight their "
                "order inside the engine decides; only 1 is predictable to the token"
            )
        if self.speculative_tokens:
            raise ValueError(
                f"speculative_tokens is {self.speculative_tokens}: speculative decoding reserves "
                "blocks ahead by what it guesses; only 0 is predictable to the token"
            )
        if self.lazy_offload:
            raise ValueError("lazy_offload is true: what is stored then depends on timing")
        return self


class RequestLine(BaseModel):
    """One line of REQUESTS.jsonl; this module's docstring says what its fields mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: Annotated[list[TokenId], Field(min_length=1)] | None = None
    segments: Annotated[list[Segment], Field(min_length=1)] | None = None
    output_len: Annotated[int, Field(ge=1, le=MOST_REQUEST_TOKENS)]
    output: list[TokenId] | SegmentName | None = None
    stopped: bool = False
    stop: list[str] | str | None = None
    lora: str | None = None
    multimodal: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _says_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.segments is None):
            raise ValueError("exactly one of prompt and segments is needed")
        if isinstance(self.output, str) and self.segments is None:
            raise ValueError("output is a segment name, but the prompt is ids: give ids")
        if isinstance(self.output, list):
            if self.prompt is None:
                raise ValueError("output is ids, but the prompt is segments: give a segment name")
            if len(self.output) != self.output_len:
                raise ValueError(
                    f"output has {len(self.output)} ids and output_len is {self.output_len}"
                )
        if self.n_prompt + self.output_len > MOST_REQUEST_TOKENS:
            raise ValueError(
                f"prompt and output_len are {self.n_prompt + self.output_len:,} tokens; a request "
                f"has at most {MOST_REQUEST_TOKENS:,}"
            )
        return self

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        if self.prompt is not None:
            return len(self.prompt)
        return sum(n_tokens for _, n_tokens in self.segments or ())

    @property
    def why_not_predictable(self) -> str | None:
        """Why the request's effect on the tiers cannot be told; None when it can."""
        for field, reason in _WHY_NOT.items():
            value = getattr(self, field)
            if value is not None and value is not False and value not in ("", []):
                return f"{field} is set: {reason}"
        return None

    def prompt_ids(self) -> Sequence[int]:
        """The prompt's token ids; a segment's are beyond every id a model has."""
        if self.prompt is not None:
            return self.prompt
        ids = array("q")
        for name, n_tokens in self.segments or ():
            ids.extend(segment_ids(name, n_tokens))
        return ids

    def output_ids(self) -> Sequence[int] | None:
        """The generated ids, or None where they never come again."""
        if isinstance(self.output, str):
            return segment_ids(self.output, self.output_len)
        return self.output


def is_refused(row: Mapping[str, Any]) -> bool:
    """Whether a row of ``predict_file`` says why there are no counts."""
    return "error" in row or "not_predictable" in row


def predict_file(
    spec: Path, requests: str, *, say: Callable[[str], object] | None = None
) -> Iterator[dict[str, Any]]:
    """One row per request line of the file ``requests`` ("-": standard input), as it is read.

    A row has ``line`` (1 first) and ``computed, gpu_hit, host_loaded`` (prompt tokens),
    ``stored_chunks, loaded_chunks`` and ``loaded_bytes`` (host → GPU; null where the
    spec gives no chunk size in bytes), or else ``line`` and one of:

    ``error``: the server cannot serve this request; its tiers stay as they were.
    ``not_predictable``: it can, but what is then in the tiers is not certain. Every later row has
    ``not_predictable`` too.

    ``say`` gets what all rows take for granted, such as the rules of an older engine. Raises
    InputError naming file, line and field, when the rows before it are out already.
    """
    content = read_spec(spec)
    if requests == STDIN:
        yield from predict_lines(
            content, sys.stdin.buffer, where="standard input", spec_name=str(spec), say=say
        )
        return
    try:
        with Path(requests).open("rb") as lines:
            yield from predict_lines(content, lines, where=requests, spec_name=str(spec), say=say)
    except OSError as error:
        raise InputError(f"cannot read {requests}: {error.strerror}") from None


def read_spec(path: Path) -> PredictSpec:
    """SPEC.json; InputError names file, field and value."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    try:
        return PredictSpec.model_validate(load_json(content, where=str(path)))
    except ValidationError as error:
        raise _unusable(str(path), error, PredictSpec) from None


def predict_lines(
    spec: PredictSpec,
    lines: Iterable[bytes],
    *,
    where: str,
    spec_name: str = "spec",
    say: Callable[[str], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """``predict_file`` on lines at hand; ``where`` and ``spec_name`` name them in errors."""
    try:
        chunk_bytes = _chunk_bytes(spec)
        predictor = StreamPredictor(_tiers(spec, chunk_bytes))
    except SpecError as error:
        raise InputError(f"{spec_name}: {error}") from None
    except OSError as error:
        raise InputError(f"{spec_name}: model {spec.model!r}: {error}") from None
    if say is not None and (note := engine_note(spec.engine)) is not None:
        say(f"{spec_name}: {note}")
    lost: str | None = None
    for number, request in read_requests(lines, where=where):
        row: dict[str, Any] = {"line": number}
        if lost is None and (reason := request.why_not_predictable) is not None:
            row["not_predictable"] = reason
        elif lost is not None:
            row["not_predictable"] = lost
        else:
            row |= _serve(predictor, request, spec, chunk_bytes)
        if lost is None and "not_predictable" in row:
            lost = f"the request in line {number} is not predictable, nor what it left in the tiers"
        yield row


def read_requests(lines: Iterable[bytes], *, where: str) -> Iterator[tuple[int, RequestLine]]:
    """Line number and request of every non-blank line; InputError names line and field."""
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not text.strip():
            continue
        place = f"{where}, line {number}"
        try:
            yield number, RequestLine.model_validate(load_json(text, where=place))
        except ValidationError as error:
            raise _unusable(place, error, RequestLine) from None


def _serve(
    predictor: StreamPredictor, request: RequestLine, spec: PredictSpec, chunk_bytes: int | None
) -> dict[str, Any]:
    try:
        prediction = predictor.request(
            request.prompt_ids(),
            request.output_len,
            output_ids=request.output_ids(),
            stopped=request.stopped,
        )
    except NotPredictable as error:
        return {"not_predictable": str(error)}
    except SpecError as error:
        return {"error": str(error)}
    return _counts(prediction, spec, chunk_bytes)


def _counts(
    prediction: Prediction, spec: PredictSpec, chunk_bytes: int | None
) -> dict[str, int | None]:
    moved = prediction.moved_tokens
    moved_bytes = 0 if not moved else None
    if moved and chunk_bytes is not None:
        moved_bytes = moved * (chunk_bytes // spec.chunk_size)
    return {
        "computed": prediction.split.computed,
        "gpu_hit": prediction.split.gpu_hit,
        "host_loaded": prediction.split.host_loaded,
        "stored_chunks": prediction.stored_chunks,
        "loaded_chunks": prediction.loaded_chunks,
        "loaded_bytes": moved_bytes,
    }


def _chunk_bytes(spec: PredictSpec) -> int | None:
    """Bytes of a chunk; SpecError where the spec contradicts itself or its model."""
    given = spec.chunk_bytes
    if given is not None and given % spec.chunk_size:
        raise SpecError(
            f"chunk_bytes is {given}, no multiple of chunk_size {spec.chunk_size}: give the KV of "
            "one chunk before alignment"
        )
    if spec.host_bytes is not None and given is None and spec.model is None:
        raise SpecError("host_bytes is given, and neither chunk_bytes nor model")
    if spec.model is None:
        return given
    geometry = KvGeometry.from_config(config_of(spec.model), spec.kv_dtype)
    computed = geometry.chunk_bytes(spec.chunk_size)
    if given not in (None, computed):
        raise SpecError(f"chunk_bytes is {given}, but {spec.model} keeps {computed} a chunk")
    return computed


def _tiers(spec: PredictSpec, chunk_bytes: int | None) -> TierSpec:
    host_chunks, host_bytes = spec.host_chunks, spec.host_bytes
    if spec.host == "none":  # a spec may describe a host tier and leave it out
        host_chunks = host_bytes = chunk_bytes = None
    elif host_chunks is None:
        if host_bytes is None or chunk_bytes is None or keeps_blocks(spec.host):
            raise SpecError(f"host_chunks is missing; host {spec.host!r} needs it")
        host_chunks = host_bytes // align_up(chunk_bytes)
    gpu_only = TierSpec(
        engine=spec.engine,
        block_size=spec.block_size,
        num_gpu_blocks=spec.num_gpu_blocks,
        max_num_batched_tokens=spec.max_batched_tokens,
        async_scheduling=spec.async_scheduling,
        prefix_caching=spec.prefix_caching,
    )
    return with_host(
        gpu_only,
        spec.host,
        spec.settings(spec.chunk_size),
        chunks=host_chunks,
        host_bytes=host_bytes,
        chunk_bytes=chunk_bytes,
    )


def _unusable(where: str, error: ValidationError, kind: type[BaseModel]) -> InputError:
    return InputError(
        f"{where}: {describe_invalid(error)}", hint=f"fields: {', '.join(kind.model_fields)}"
    )
