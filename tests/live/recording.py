"""A scheduler that writes down what it did: the independent witness of sources under load.

Given to vLLM with ``--scheduler-cls tests.live.recording.RecordingScheduler``; it changes nothing. Each
request is one JSON line, written when its first admission is over.
"""

import json
import os
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

VARIABLE = "RECORDED_REQUESTS"


class RecordingScheduler(Scheduler):
    """vLLM 0.32's scheduler, which logs the split of every request it admits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told: set[str] = set()
        self._file = open(os.environ[VARIABLE], "a", encoding="utf-8")  # noqa: SIM115, PTH123

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        for request in self.requests.values():
            stats = request.prefill_stats
            if stats is None or not stats.num_prompt_tokens or request.request_id in self._told:
                continue
            self._told.add(request.request_id)
            line = {
                "session_id": request.session_id,
                "computed": stats.num_computed_tokens,
                "gpu_hit": stats.num_local_cached_tokens,
                "host_loaded": stats.num_external_cached_tokens,
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return output
