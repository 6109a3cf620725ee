"""The planner as a task of `sidequest eval`: whether it finds a plan that keeps all the rules."""

from __future__ import annotations

import time

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.evaluation.conversing import Outcome
from sidequest_langchain.evaluation.sample import Task

from .generator import generate
from .planner import Watcher, run_planner
from .search import Limits

TASK = Task(
    name="planner", about="three trips of the travel planner: are the plans valid?", is_agent=True
)
N_TRIPS = 3


def solve(model: SideQuestChatModel, seed: int) -> Outcome:
    """Plan three trips, by beam search. Bytes are those at the peak: the planner releases."""
    began_s = time.perf_counter()
    runs = []
    for trip in range(N_TRIPS * seed, N_TRIPS * (seed + 1)):
        problem = generate(n_cities=5, seed=trip)
        runs.append(run_planner(model, problem, Limits(), _Nobody(), seed=trip, is_replayed=False))
    peak_bytes = max(run.peak_bytes or 0 for run in runs)
    return Outcome(
        scores=tuple(float(run.is_solved) for run in runs),
        answers=tuple(run.outcome for run in runs),
        n_tokens=sum(run.n_tokens("prompt") + run.n_tokens("generated") for run in runs),
        n_rows=model.kv.usage().n_tokens,
        n_bytes=peak_bytes,
        peak_bytes=peak_bytes,
        seconds=time.perf_counter() - began_s,
    )


class _Nobody(Watcher):
    """Looks away."""
