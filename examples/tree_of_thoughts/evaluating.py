"""The planner as a task of `sidequest eval`: whether it finds a plan that keeps all the rules."""

from __future__ import annotations

import time

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.evaluation.conversing import Outcome
from sidequest_langchain.evaluation.sample import Task

from .generator import generate
from .planner import Watcher, run_planner
from .search import Limits

TASK = Task(name="planner", about="a trip of the travel planner: is the plan valid?", is_agent=True)


def solve(model: SideQuestChatModel, seed: int) -> Outcome:
    """Plan one trip, by beam search. Its bytes are those at the peak: the planner releases."""
    began_s = time.perf_counter()
    problem = generate(n_cities=5, seed=seed)
    run = run_planner(model, problem, Limits(), _Nobody(), seed=seed, is_replayed=False)
    usage = model.kv.usage()
    return Outcome(
        scores=(float(run.is_solved),),
        answers=(run.outcome,),
        n_tokens=run.n_tokens("prompt") + run.n_tokens("generated"),
        n_rows=usage.n_tokens,
        n_bytes=run.peak_bytes or 0,
        peak_bytes=run.peak_bytes or 0,
        seconds=time.perf_counter() - began_s,
    )


class _Nobody(Watcher):
    """Looks away."""
