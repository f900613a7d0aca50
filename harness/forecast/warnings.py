"""Why a plan cannot show an effect, or shows another one than meant: numbers, cause, remedy.

Everything is read off the plan and its predictions; nothing has run yet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from harness.forecast.cliff import gpu_tokens
from harness.forecast.edges import Edge
from harness.plan.arms import BASELINE, CONTROL
from harness.plan.experiment import Experiment
from harness.plan.order import weaknesses
from sim.predict import Prediction
from sim.tiers.host import align_up
from sim.tiers.registry import MODELS
from sim.units import GIB
from sim.workload import pass_name


@dataclass(frozen=True, slots=True)
class Outlook:
    """A plan, its predictions by arm, and its cliffs; None where they were not looked for.

    An arm without an exact prediction is not among the predictions.
    """

    experiment: Experiment
    predictions: Mapping[str, Sequence[Prediction]]
    gpu: Edge | None
    host: Edge | None
    control_gpu: Edge | None = None

    def gpu_of(self, arm: str) -> Edge | None:
        """The GPU cliff of what ``arm`` is asked; the control may be asked less."""
        return self.control_gpu if arm == CONTROL and self.control_gpu else self.gpu

    @property
    def treatment(self) -> str:
        """The arm compared with the baseline."""
        return self.experiment.treatment.name

    @property
    def watermark(self) -> float:
        """The share of the host tier from which on it evicts; only LMCache's server has one."""
        host = self.experiment.treatment.host
        return host.watermark if host is not None and MODELS[host.kind].has_watermark else 1.0

    @property
    def gpu_blocks(self) -> int:
        """GPU blocks of the two arms compared, null block included."""
        return self.experiment.plan.server.num_gpu_blocks

    @property
    def host_chunks(self) -> int:
        """Chunks the host tier can hold; 0 without one."""
        return self.experiment.tiers(self.experiment.treatment).host_chunks or 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of every prompt of the plan."""
        work = self.experiment.plan.workload
        return work.spec().longest_prompt_tokens

    def measured_tokens(self, arm: str, source: str, name: str | None = None) -> int:
        """Prompt tokens of ``source`` in an arm's measured requests, or those of pass ``name``."""
        requests = self.experiment.workload_of(self.experiment.arms[arm])
        return sum(
            getattr(prediction.split, source)
            for request, prediction in zip(requests, self.predictions[arm], strict=True)
            if request.phase == "measure" and name in (None, request.pass_name)
        )

    def host_gib(self, chunks: int) -> float:
        """GiB of a host tier that holds ``chunks``."""
        return chunks * align_up(self.experiment.chunk_bytes) / GIB


_ALONE = (
    "what is predicted here is what requests sent one at a time would show; under [load] the order in "
    "which the tiers serve them is a matter of timing, and a run checks sums, not predictions"
)


def warnings_of(outlook: Outlook) -> list[str]:
    """Every warning, the ones that rule an effect out first; empty when there is none."""
    plan = outlook.experiment.plan
    order = list(weaknesses(plan.order, plan.decision.min_blocks))
    alone = [] if plan.load is None else [_ALONE]
    return [*_effect_warnings(outlook), *alone, *order]


def _effect_warnings(outlook: Outlook) -> list[str]:
    """Why the treatment would have no effect, or another one."""
    nothing_shared = list(_nothing_shared(outlook))
    if nothing_shared:
        return nothing_shared
    if outlook.treatment not in outlook.predictions:
        return []
    if outlook.experiment.treatment.host is None:
        return list(_nothing_to_lose(outlook))
    found = [
        *_fits_gpu(outlook),
        *_host_too_small(outlook),
        *_one_document_short(outlook),
        *_may_freeze(outlook),
        *_coarse_chunks(outlook),
        *_control_too_small(outlook),
    ]
    if not found and not outlook.measured_tokens(outlook.treatment, "host_loaded"):
        found.append(
            f"{outlook.treatment} is predicted to load nothing from the host: the working set fits "
            "the GPU tier, or the host tier is too small to keep it"
        )
    return found


def _nothing_to_lose(outlook: Outlook) -> Iterator[str]:
    """For a treatment without the prefix cache, which can only differ where the cache hits."""
    if not outlook.experiment.treatment.prefix_caching and not outlook.measured_tokens(
        BASELINE, "gpu_hit"
    ):
        yield (
            f"{BASELINE} is predicted to hit nothing in its GPU tier, so {outlook.treatment}, which "
            "has no prefix cache, computes the same; raise server.num_gpu_blocks or lower "
            "workload.documents"
        )


def _nothing_shared(outlook: Outlook) -> Iterator[str]:
    plan = outlook.experiment.plan
    work, block, chunk = plan.workload, plan.server.block_size, plan.host.chunk_tokens
    if len(work.passes) == 1:
        yield (
            "no prompt has a prefix in common with an earlier one: workload.passes is one walk "
            'over the documents; add a second, e.g. passes = ["fwd", "fwd"]'
        )
    elif work.document_tokens < block:
        yield (
            f"no prompt has a whole block in common with an earlier one: documents have "
            f"{work.document_tokens} tokens and a block {block}; raise workload.document_tokens"
        )
    elif work.document_tokens < chunk and outlook.experiment.treatment.host is not None:
        yield (
            f"the host tier can never load anything: documents have {work.document_tokens} tokens "
            f"and a chunk {chunk}, so no chunk comes twice; lower host.chunk_tokens to at most "
            f"{work.document_tokens // block * block} or raise workload.document_tokens"
        )


def _fits_gpu(outlook: Outlook) -> Iterator[str]:
    gpu = outlook.gpu
    if gpu is None or outlook.measured_tokens(outlook.treatment, "gpu_hit") < gpu.endless.gpu_hit:
        return
    plan = outlook.experiment.plan
    held = gpu_tokens(plan)
    remedy = "raise workload.documents"
    if gpu.smallest > min(gpu.sizes):  # the smallest tried is the smallest that vLLM starts with
        remedy = f"lower server.num_gpu_blocks below {gpu.smallest} or {remedy}"
    yield (
        f"{outlook.treatment} is predicted to load nothing from the host: the working set fits the "
        f"GPU tier, whose {held:,} tokens serve every replay; {remedy}"
    )


def _host_too_small(outlook: Outlook) -> Iterator[str]:
    plan, host = outlook.experiment.plan, outlook.host
    held = gpu_tokens(plan)
    host_tokens = outlook.host_chunks * plan.host.chunk_tokens
    if host is not None and not host.endless.host_loaded:
        return  # no host tier of any size has something to load; said elsewhere
    enough = "" if host is None else f" to {_gib(outlook.host_gib(host.smallest))}"
    if host_tokens <= held:
        yield (
            f"the host tier is no larger than the GPU tier: {host_tokens:,} against {held:,} "
            "tokens; it is written through, so it holds little that the GPU does not; raise "
            f"host.gib{enough}"
        )
    if host is None:
        return
    loaded = outlook.measured_tokens(outlook.treatment, "host_loaded")
    if loaded < host.endless.host_loaded:
        rule = f"evicts from {outlook.watermark:.0%} on"
        if plan.host.policy == "noop":
            rule = "evicts nothing"
        yield (
            f"the host tier does not keep the working set: it has {outlook.host_chunks:,} chunks "
            f"and {rule}, so replays load {loaded:,} of {host.endless.host_loaded:,} tokens; all "
            f"of them from {host.smallest:,} chunks on: raise host.gib{enough}"
        )


def _one_document_short(outlook: Outlook) -> Iterator[str]:
    """Walks in one order through a tier that is short of them by at most a document: no hit."""
    plan = outlook.experiment.plan
    chunks = outlook.prompt_tokens // plan.host.chunk_tokens
    if outlook.gpu is not None:
        lost = _lost_walks(outlook, BASELINE, "gpu_hit")
        missing = outlook.gpu.smallest - outlook.gpu_blocks
        if lost and 0 < missing <= -(-outlook.prompt_tokens // plan.server.block_size):
            yield _short_text("GPU", f"{missing} blocks", lost) + (
                f"with {outlook.gpu.smallest} all are, so the difference hangs on that little; "
                "move server.num_gpu_blocks away from it, or have a pass in the other order"
            )
    if outlook.host is not None:
        lost = _lost_walks(outlook, outlook.treatment, "host_loaded")
        missing = outlook.host.smallest - outlook.host_chunks
        if lost and 0 < missing <= ceil(chunks / outlook.watermark):
            yield _short_text("host", f"{missing} chunks", lost) + (
                f"with {outlook.host.smallest} all are; raise host.gib to "
                f"{_gib(outlook.host_gib(outlook.host.smallest))}, or have a pass in the other order"
            )


def _lost_walks(outlook: Outlook, arm: str, source: str) -> list[str]:
    """Passes that walk as the one before did and find nothing at ``source``."""
    walks = enumerate(pairwise(outlook.experiment.plan.workload.passes), start=1)
    again = [pass_name(i, order) for i, (before, order) in walks if before == order]
    return [name for name in again if not outlook.measured_tokens(arm, source, name)]


def _short_text(tier: str, missing: str, walks: Sequence[str]) -> str:
    return (
        f"the {tier} tier is {missing} short of every document, and {', '.join(walks)} goes in the "
        "order of the pass before: each document is evicted just before its turn, none is hit; "
    )


def _may_freeze(outlook: Outlook) -> Iterator[str]:
    """A store is all or nothing and evicts nothing; only the watermark's timer makes room."""
    plan, host = outlook.experiment.plan, outlook.experiment.treatment.host
    # Other tiers make room when they store.
    if host is None or not MODELS[host.kind].has_watermark:
        return
    per_prompt = outlook.prompt_tokens // plan.host.chunk_tokens
    capacity, watermark = outlook.host_chunks, plan.host.watermark
    distinct = plan.workload.documents * per_prompt
    if distinct <= watermark * capacity:
        return
    if plan.host.policy == "noop":
        if distinct > capacity:
            yield (
                f"policy noop evicts nothing: {capacity:,} chunks take the first documents of "
                f"{distinct:,} chunks and no other for good; raise host.gib or use LRU"
            )
        return
    room = capacity - _most_settled(capacity, watermark)
    if room < per_prompt:
        enough = int(per_prompt / (1 - watermark)) + 1 if watermark < 1 else None
        remedy = "lower host.watermark"
        if enough is not None:
            remedy = f"raise host.gib to {_gib(outlook.host_gib(enough))} or {remedy}"
        yield (
            f"the host tier may freeze: a prompt has {per_prompt} chunks, and just below the "
            f"watermark of {watermark:.0%} there is room for {room} of {capacity:,}; nothing is "
            f"evicted there, so a store that does not fit is dropped whole, every time; {remedy}"
        )


def _most_settled(capacity: int, watermark: float) -> int:
    """The most chunks that a host tier of ``capacity`` holds without evicting."""
    return max(0, ceil(watermark * capacity) - 1)


def _coarse_chunks(outlook: Outlook) -> Iterator[str]:
    chunk, prompt = outlook.experiment.plan.host.chunk_tokens, outlook.prompt_tokens
    if 2 * chunk > prompt:
        yield (
            f"a chunk is more than half the prompt: of {prompt} tokens the host tier keeps "
            f"{prompt // chunk * chunk}, the rest is computed each time; lower host.chunk_tokens "
            f"({chunk})"
        )


def _control_too_small(outlook: Outlook) -> Iterator[str]:
    control, gpu = outlook.experiment.plan.control, outlook.gpu_of(CONTROL)
    if control is None or CONTROL not in outlook.predictions:
        return
    loaded = outlook.measured_tokens(CONTROL, "host_loaded")
    missed = 0
    enough = ""
    if gpu is not None:
        missed = gpu.endless.gpu_hit - outlook.measured_tokens(CONTROL, "gpu_hit")
        enough = f" to {gpu.smallest}"
    if loaded or missed:
        yield (
            f"the control does not hold the working set: in its {control.num_gpu_blocks} GPU "
            f"blocks replays miss {max(loaded, missed):,} tokens and load {loaded:,} from the "
            f"host, where it must load none; raise control.num_gpu_blocks{enough}"
        )


def _gib(gib: float) -> str:
    """Three significant digits, rounded up: a size to set must not fall short."""
    scale = 10.0 ** (2 - floor(log10(gib)))
    return f"{ceil(gib * scale) / scale:.10g}"
