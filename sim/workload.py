"""The seeded workload: documents, passes and the requests both the replay and the predictor read.

One ``Workload`` feeds the client and the simulator, so the two cannot disagree about what
was asked. Prompts are token ids, never text: re-tokenising would change their length.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from sim.errors import SpecError

Phase = Literal["warmup", "measure"]
PassOrder = Literal["fwd", "rev"]
Questions = Literal["new", "appended", "repeated"]
"""What a document is asked in each pass: ``new``, a question of the pass's own. ``appended``: one
more after those of the passes before, as a chat grows; the answers are not part of later prompts,
since they are the model's. ``repeated``: its first one again, so a whole prompt comes back.
"""

WARMUP_PASS = "warmup"
_ORDER_WORD = {"fwd": "replay", "rev": "reverse"}


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Sizes in tokens; ``vocab`` is the half-open range of token ids documents are drawn from.

    ``warmup_documents`` are throw-away documents of the measured shape from a disjoint seed, each
    asked once, forward, before the first pass: they pay compilation and lazy set-up in every arm.
    ``document_step_tokens``: each document is that much longer than the one before it; the first
    one, and every warm-up document, has ``document_tokens``.
    """

    documents: int
    document_tokens: int
    question_tokens: int
    output_tokens: int
    passes: tuple[PassOrder, ...]
    warmup_documents: int
    seed: int
    vocab: tuple[int, int]
    document_step_tokens: int = 0
    questions: Questions = "new"

    def tokens_of(self, document: int) -> int:
        """Tokens of measured document ``document`` (0 first), without any question."""
        return self.document_tokens + document * self.document_step_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """Tokens of the longest prompt, its questions included."""
        n_questions = len(self.passes) if self.questions == "appended" else 1
        return self.tokens_of(self.documents - 1) + n_questions * self.question_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to send; ``(pass_name, doc)`` is unique in a session and is its request key.

    ``doc_tokens``: tokens before the prompt's last question, so earlier turns count.
    """

    phase: Phase
    pass_name: str
    doc: int
    doc_tokens: int
    prompt: tuple[int, ...]
    output_tokens: int

    @property
    def key(self) -> tuple[str, int]:
        """``(pass_name, doc)``; with the session's name in front it is unique in a run."""
        return (self.pass_name, self.doc)


Workload = tuple[Request, ...]
"""All requests of one session in the order they are sent: warm-up first, then the passes."""


def pass_name(index: int, order: PassOrder) -> str:
    """The published name of pass ``index`` (0 first): ``pass1-cold``, ``pass2-replay``, …"""
    return f"pass{index + 1}-{'cold' if index == 0 else _ORDER_WORD[order]}"


def request_keys(spec: WorkloadSpec) -> Iterator[tuple[str, int]]:
    """``Request.key`` of every request of ``spec`` in sending order, without building a prompt."""
    for doc in range(spec.warmup_documents):
        yield WARMUP_PASS, doc
    for index, order in enumerate(spec.passes):
        name, walk = pass_name(index, order), range(spec.documents)
        for doc in walk if order == "fwd" else reversed(walk):
            yield name, doc


def build_workload(spec: WorkloadSpec) -> Workload:
    """Build the requests of ``spec``; the same spec gives the same token ids on every machine.

    Every document starts with its own token id, so no two share a first block. Only what
    ``spec.questions`` says comes back in a later pass; questions are distinct otherwise.
    Raises SpecError when the ids cannot be made distinct or a count is out of range.
    """
    _check(spec)
    # One object an id, so that millions of tokens cost their references: 8 bytes each, not 40.
    ids: dict[int, int] = {}
    n_documents = spec.documents + spec.warmup_documents
    first_ids = random.Random(f"{spec.seed}/first").sample(range(*spec.vocab), n_documents)
    documents = [
        _document(spec, f"doc/{d}", first_ids[d], spec.tokens_of(d), ids)
        for d in range(spec.documents)
    ]
    requests: list[Request] = []
    for name, doc in request_keys(spec):
        if name == WARMUP_PASS:
            first_id = first_ids[spec.documents + doc]
            asked = _document(spec, f"warmup/{doc}", first_id, spec.document_tokens, ids)
            requests.append(_request(spec, "warmup", name, doc, asked))
            continue
        requests.append(_request(spec, "measure", name, doc, documents[doc]))
        if spec.questions == "appended":
            documents[doc] = requests[-1].prompt
    n_distinct = n_documents if spec.questions == "repeated" else len(requests)
    if len({request.prompt for request in requests}) < n_distinct:
        raise SpecError(
            f"question_tokens is {spec.question_tokens}: too few for {len(requests)} requests to "
            "have a question of their own"
        )
    return tuple(requests)


def _check(spec: WorkloadSpec) -> None:
    low, high = spec.vocab
    for field in ("documents", "document_tokens", "question_tokens", "output_tokens"):
        if getattr(spec, field) < 1:
            raise SpecError(f"{field} is {getattr(spec, field)}; it must be at least 1")
    for field in ("warmup_documents", "document_step_tokens"):
        if getattr(spec, field) < 0:
            raise SpecError(f"{field} is {getattr(spec, field)}; it must be at least 0")
    if not spec.passes or any(order not in _ORDER_WORD for order in spec.passes):
        raise SpecError(f"passes are {list(spec.passes)}; each must be 'fwd' or 'rev'")
    if spec.questions not in get_args(Questions):
        raise SpecError(f"questions is {spec.questions!r}; known: {', '.join(get_args(Questions))}")
    needed = spec.documents + spec.warmup_documents
    if not 0 <= low < high or high - low < max(needed, 2):
        raise SpecError(
            f"vocab range [{low}, {high}) has too few token ids: {needed} documents each need "
            "a first token of their own"
        )


def _document(
    spec: WorkloadSpec, name: str, first_id: int, n_tokens: int, ids: dict[int, int]
) -> tuple[int, ...]:
    # random.Random seeded by a string hashes it with SHA-512: stable across Python versions and
    # independent of PYTHONHASHSEED; getrandbits-based choices of ints are stable too.
    rng = random.Random(f"{spec.seed}/{name}")
    low, high = spec.vocab
    drawn = (rng.randrange(low, high) for _ in range(n_tokens - 1))
    return (first_id, *(ids.setdefault(token, token) for token in drawn))


def _request(
    spec: WorkloadSpec, phase: Phase, name: str, doc: int, asked: tuple[int, ...]
) -> Request:
    """``asked``: the document, and under ``appended`` the questions asked of it before."""
    is_repeated = phase == "measure" and spec.questions == "repeated"
    asked_in = pass_name(0, spec.passes[0]) if is_repeated else name
    rng = random.Random(f"{spec.seed}/question/{asked_in}/{doc}")
    low, high = spec.vocab
    question = tuple(rng.randrange(low, high) for _ in range(spec.question_tokens))
    return Request(phase, name, doc, len(asked), asked + question, spec.output_tokens)
