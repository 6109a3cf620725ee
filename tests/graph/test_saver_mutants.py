"""The checks of the saver find faults: each runs here on a saver that was broken on purpose.

A mutant that survives says that a check has gone blind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from sidequest_langchain.graph import lifecycle, lineage, saver, saver_files, saver_forwarding
from sidequest_langchain.graph import saver_kv as kv
from sidequest_langchain.graph.lifecycle import Lifecycle
from sidequest_langchain.graph.lineage import Lineage
from sidequest_langchain.graph.saver import SideQuestSaver
from sidequest_langchain.graph.saver_files import ThreadFiles
from sidequest_langchain.kv.residency import Residency
from tests.graph import test_saver as checks
from tests.graph import test_saver_files as of_files
from tests.graph import test_saver_forwarding as forwarding
from tests.graph import test_saver_lineage as on_paper

Patch: TypeAlias = pytest.MonkeyPatch
Mutant: TypeAlias = Callable[[Patch], None]


def put(owner: Any, name: str, value: Any) -> Mutant:
    """Replace something."""
    return lambda patch: patch.setattr(owner, name, value)


def points(**change: Any) -> Mutant:
    """Let checkpoints say something else."""
    read = lineage._point
    return put(lineage, "_point", lambda found: replace(read(found), **change))


def spent(choose: Callable[[Lineage], set[Any]]) -> Mutant:
    """Let other checkpoints count as those whose tasks made another one."""
    init = Lineage.__init__

    def mutated(self: Lineage, tuples: Any) -> None:
        init(self, tuples)
        self._spent = choose(self)

    return put(Lineage, "__init__", mutated)


def every_visit(self: Lineage, point: Any, places: Any) -> set[str]:
    tasks = frozenset().union(*self._steps_at(point))
    return {call_id for task in tasks for _, call_id in places.get(task, ())}


def last_step_only(self: Lineage, point: Any, places: Any) -> set[str]:
    for tasks in self._steps_at(point):
        if found := {call_id for task in tasks for _, call_id in places.get(task, ())}:
            return found
    return set()


def own_only(infos: Any, thread_id: str) -> list[Any]:
    return [lb for info in infos for lb in info.labels if lb.thread_id == thread_id]


def anyones(infos: Any, thread_id: str) -> list[Any]:
    return [label for info in infos for label in info.labels]


def tips_only(infos: Any, labels: Any) -> list[Any]:
    calls = {label.call_id for label in labels}
    return [info for info in infos if calls & {label.call_id for label in info.labels}]


def load_always(self: ThreadFiles, thread_id: str) -> Any:
    return self.load(thread_id) if self.has(thread_id) else None


def release_first(self: SideQuestSaver, thread_id: str) -> None:
    self._kv.end(thread_id, "thread deleted")
    if self._files is not None:
        self._files.remove(thread_id).result()


def without_shield() -> Any:
    return SimpleNamespace(
        to_thread=asyncio.to_thread, wrap_future=asyncio.wrap_future, shield=lambda waiting: waiting
    )


def endless(known: dict[str, Any], thread_id: str, value: Any) -> None:
    known[thread_id] = value


def nothing(*_: Any) -> None:
    """Do nothing."""


replay = checks.test_an_update_and_a_replay_begin_with_what_led_to_them
last_visits = checks.test_pruning_leaves_the_last_visit_of_every_node
led_to = partial(on_paper.test_what_led_to_a_checkpoint, "d")
each = partial(checks.test_each_checkpoint_knows_its_kv, "sync")
fork = partial(checks.test_a_fork_finds_the_kv_of_its_checkpoint_or_computes_it, "sync", False)
prune = partial(checks.test_pruning_frees_abandoned_forks_and_leaves_the_head_warm, "sync", False)
of_exit = partial(checks.test_each_checkpoint_knows_its_kv, "exit")
shared = partial(checks.test_a_copied_thread_finds_the_kv_that_it_may_use, "shared")
isolated = partial(checks.test_a_copied_thread_finds_the_kv_that_it_may_use, "thread")
deleting = partial(checks.test_deleting_a_thread_frees_its_kv_and_no_other, "../x", False)
resumed = partial(of_files.test_a_resumed_thread_prefills_only_what_is_new, False)
damaged = partial(of_files.test_a_damaged_file_costs_time_and_nothing_else, of_files.flip)

MUTANTS: dict[str, tuple[Mutant, Callable[..., Any]]] = {
    "says that it can do everything": (
        put(saver_forwarding, "_honest", lambda cls, absent: cls),
        forwarding.test_it_overrides_what_the_inner_saver_overrides,
    ),
    "hands task paths to whom they are unknown": (
        put(saver_forwarding, "_takes_task_path", lambda _: True),
        forwarding.test_a_saver_that_knows_no_task_paths_gets_none,
    ),
    "keeps its serializer": (
        put(SideQuestSaver, "with_allowlist", lambda self, _: self),
        forwarding.test_a_clone_that_may_read_more_types_shares_everything_else,
    ),
    "deletes nothing": (put(SideQuestSaver, "_end", nothing), deleting),
    "forgets no branches": (
        put(Lifecycle, "forget_thread", nothing),
        checks.test_a_thread_begun_anew_has_branches_of_its_own,
    ),
    "prunes nothing": (put(kv.ThreadKV, "settle", nothing), prune),
    "prunes everything": (put(Lineage, "wanted", lambda *_: set()), prune),
    "prunes what is under way": (
        put(Lifecycle, "is_busy", lambda *_: False),
        checks.test_pruning_while_a_run_is_on_leaves_what_is_under_way,
    ),
    "keeps every visit of a node": (put(Lineage, "_last_visits", every_visit), last_visits),
    "keeps the last step only": (
        put(Lineage, "_last_visits", last_step_only),
        last_visits,
    ),
    "lets subgraphs' checkpoints decide": (
        put(lineage.Point, "is_outermost", True),
        partial(checks.test_pruning_frees_what_subgraphs_of_older_steps_computed, True),
    ),
    "takes what was forked for a child": (points(is_made_by_tasks=True), replay),
    "takes nothing for a child": (points(is_made_by_tasks=False), led_to),
    "knows no messages": (points(messages=frozenset()), of_exit),
    "knows no tasks": (points(tasks=frozenset()), led_to),
    "takes what ran from a checkpoint for its own": (spent(lambda _: set()), each),
    "forgets what waits in a checkpoint": (
        spent(lambda found: set(found.keys)),
        checks.test_a_paused_run_holds_what_the_resume_begins_with,
    ),
    "finds nothing of other threads": (put(kv, "_reusable", own_only), shared),
    "finds what it may not use": (put(kv, "_reusable", anyones), isolated),
    "counts the ends of paths only": (put(kv, "_under", tips_only), fork),
    "knows no archive": (
        put(Residency, "n_archived", 0),
        checks.test_a_checkpoint_whose_rows_are_in_a_slower_tier_says_so,
    ),
    "saves what is running": (
        put(Lifecycle, "is_busy", lambda *_: False),
        of_files.test_a_thread_is_saved_when_no_run_is_on_it,
    ),
    "notes no checkpoint": (put(ThreadFiles, "note", nothing), resumed),
    "sees no end of a run": (put(Lifecycle, "watch", nothing), resumed),
    "finds no file": (put(ThreadFiles, "has", lambda *_: False), resumed),
    "loads again and again": (
        put(ThreadFiles, "first_use", load_always),
        of_files.test_a_thread_is_loaded_once,
    ),
    "removes no file": (
        put(ThreadFiles, "_remove", nothing),
        of_files.test_deleting_a_thread_removes_what_is_still_being_saved,
    ),
    "releases before it is loaded": (
        put(SideQuestSaver, "_end", release_first),
        of_files.test_a_thread_deleted_while_it_is_loaded_is_gone,
    ),
    "lets one waiter cancel for all": (
        put(saver, "asyncio", without_shield()),
        of_files.test_loading_never_holds_up_the_event_loop,
    ),
    "fails with its file": (
        put(ThreadFiles, "_quietly", lambda self, act, thread_id, done: act(thread_id)),
        damaged,
    ),
    "keeps watchers alive": (
        put(lifecycle, "weakref", SimpleNamespace(WeakSet=set)),
        of_files.test_a_saver_is_forgotten_with_its_last_user,
    ),
    "remembers every thread": (
        put(saver_files, "_remember", endless),
        of_files.test_what_is_known_of_threads_is_bounded,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_saver_is_found(name: str, request: pytest.FixtureRequest) -> None:
    mutate, check = MUTANTS[name]
    patch = request.getfixturevalue("monkeypatch")
    given = {
        wanted: request.getfixturevalue(wanted)
        for wanted, parameter in inspect.signature(check).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    mutate(patch)
    assert is_found(check, given)


def is_found(check: Callable[..., Any], given: dict[str, Any]) -> bool:
    try:
        found = check(**given)
        if inspect.iscoroutine(found):
            asyncio.run(found)
    except (Exception, asyncio.CancelledError):  # whichever way it is found
        return True
    return False
