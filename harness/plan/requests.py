"""Every request of a plan by its key, in the order they are sent; no prompt is built."""

from collections.abc import Collection, Iterator

from harness.plan.plan import Plan, documents_of, session_name
from sim.workload import WARMUP_PASS, pass_name, request_keys

Key = tuple[str, str, int]
"""A request: ``(session, pass, doc)``, unique in a run."""


class PlannedRequests(Collection[Key]):
    """The keys of a plan's requests: in sending order, counted and looked up without listing them."""

    def __init__(self, plan: Plan) -> None:
        self._spec = plan.workload.spec()
        self._passes = {pass_name(i, order) for i, order in enumerate(self._spec.passes)}
        self._documents = {
            session_name(order, arm): documents_of(plan, arm)
            for order, arm in enumerate(plan.order, start=1)
        }

    def __iter__(self) -> Iterator[Key]:
        for session, documents in self._documents.items():
            for name, doc in request_keys(self._spec):
                if name == WARMUP_PASS or doc < documents:
                    yield session, name, doc

    def __len__(self) -> int:
        n_passes, n_warmup = len(self._passes), self._spec.warmup_documents
        return sum(n_warmup + n_passes * documents for documents in self._documents.values())

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple):
            return False
        session, name, doc = key
        if name == WARMUP_PASS:
            return session in self._documents and 0 <= doc < self._spec.warmup_documents
        return name in self._passes and 0 <= doc < self._documents.get(session, 0)
