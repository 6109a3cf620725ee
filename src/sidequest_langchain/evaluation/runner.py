"""Runs every policy at every budget on every sample, each over a cache of its own.

It must not know the command line, nor how figures are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from sidequest_langchain.chat.model import SideQuestChatModel
from sidequest_langchain.errors import ConfigError
from sidequest_langchain.evaluation.arms import Arm, settings_of
from sidequest_langchain.evaluation.conversing import Outcome, Record, converse, record, replay
from sidequest_langchain.evaluation.log import ResultLog, Row
from sidequest_langchain.evaluation.sample import Sample, Task, sample_of

logger = logging.getLogger(__name__)

Solve: TypeAlias = Callable[[SideQuestChatModel, int], Outcome]
"""Runs an application on a model, with a seed: for tasks that are no conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    tasks: tuple[Task, ...]
    arms: tuple[Arm, ...]
    n_samples: int
    n_tokens: int
    """Of a sample's context, about."""
    seed: int
    predictor: str = "auto"
    """As in `CacheConfig`."""

    def n_jobs(self) -> int:
        """Samples to run, over all tasks and arms."""
        return len(self.tasks) * len(self.arms) * self.n_samples


class Runner:
    """One model with its weights, and an engine for each run over them."""

    def __init__(
        self, model: str, log: ResultLog, say: Callable[[str], None], **given: Any
    ) -> None:
        """Load the weights.

        Args:
            model: As for `SideQuestChatModel`.
            log: Gets the results; what it holds already is not run again.
            say: Is told what begins.
            given: Other fields of the chat model, `dtype` for instance.

        Raises:
            ModelError: The model cannot be had.
        """
        self._given = {"model": model, "temperature": 0.0, **given}
        self._log = log
        self._say = say
        # Engines of other settings share the weights while somebody holds them.
        counting = SideQuestChatModel(**self._given)
        self._weights = counting.engine.origin
        self._tokenizer = counting.engine.tokenizer

    def run(self, plan: Plan, solvers: dict[str, Solve]) -> None:
        """Run what the log does not hold yet.

        Every task has its sample number 0 before any has number 1, and all arms run a sample
        before the next: whatever a cut leaves can be compared.

        Raises:
            KeyboardInterrupt: It was interrupted; the log holds all that was done.
        """
        n_done = 0
        for number in range(plan.n_samples):
            for task in plan.tasks:
                trial = self._trial(task, number, plan, solvers.get(task.name))
                for arm in plan.arms:
                    n_done += 1
                    key = f"{task.name} {number} {arm}"
                    if self._log.get(key) is None:
                        self._say(f"{n_done}/{plan.n_jobs()}  {key}")
                        self._log.add(key, trial(arm))

    def _trial(
        self, task: Task, number: int, plan: Plan, solve: Solve | None
    ) -> Callable[[Arm], Row]:
        """What runs one sample under one arm."""
        full: list[Record] = []

        def sample() -> Sample:
            return sample_of(
                task, seed=plan.seed, number=number, n_tokens=plan.n_tokens, count=self._count
            )

        def record_of() -> Record:
            # Kept for the other arms of this sample, and let go with them: it is large.
            if not full:
                with self._model(Arm(policy="none"), 0, plan) as model:
                    full.append(record(model, sample()))
            return full[0]

        def outcome(arm: Arm, full_bytes: int) -> Outcome:
            if task.is_forced and arm.is_full:
                return record_of().outcome
            with self._model(arm, full_bytes, plan) as model:
                if solve is not None:
                    return solve(model, plan.seed + number)
                if task.is_forced:
                    return replay(model, sample(), record_of())
                return converse(model, sample())

        def row(arm: Arm) -> Row:
            of = {"task": task.name, "number": number, "policy": arm.policy, "budget": arm.budget}
            full_bytes = 0
            try:
                if not arm.is_full:
                    full_bytes = self._full_bytes(f"{task.name} {number} {plan.arms[0]}")
                return {**of, "error": None, **outcome(arm, full_bytes).to_json()}
            except Exception as error:  # one policy's failure is a result, not the run's end
                logger.debug("%s failed", arm, exc_info=True)
                why = f"{type(error).__name__}: {' '.join(str(error).split())}"
                return {**of, "error": why, "n_asked": 0 if solve else sample().n_scored}

        return row

    def _full_bytes(self, key: str) -> int:
        """What the full cache held for a sample."""
        row = self._log.get(key)
        if row is None or row["error"] is not None:
            msg = f"the full cache has no result for this sample ({key}): no budget follows"
            raise ConfigError(msg)
        return int(row["n_bytes"])

    @contextmanager
    def _model(self, arm: Arm, full_bytes: int, plan: Plan) -> Iterator[SideQuestChatModel]:
        """A chat model over an engine of its own, whose memory is free afterwards."""
        settings = settings_of(arm, full_bytes, predictor=plan.predictor)
        model = SideQuestChatModel(cache_config=settings, **self._given)
        engine = model.engine
        try:
            yield model
        finally:
            engine.close()

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, control_tokens=False))


def scores_of(row: Row) -> Sequence[float]:
    """The scores of a row; what failed scores nothing."""
    if row["error"] is not None:
        return [0.0] * max(1, int(row["n_asked"]))
    return [float(score) for score in row["scores"]]
