"""Runs as JSON: the results for programs, and the record of calls for benchmarks.

The results, one document (`"schema": "sidequest.tree_of_thoughts/1"`): `model`, `n_threads`, and
`runs`, each with

* `problem` (name), `n_cities`, `method` (`beam`, `dfs` or `cot`), `solved`, `outcome`;
* `plan`: list of `city`, `first_day`, `last_day`; `violations`: list of `fault`, `message`;
* `calls`, `samples`, `tokens`: `prompt` = `reused` + `prefilled`, and `generated`; `wall_s`;
* `kv`: `peak_bytes`, `peak_bytes_without_release`, `releases`: list of `thought`, `reason`
  (`prune` or `backtrack`), `bytes`, `tokens`; sizes are null where they were not measured;
* `agreement`: see `agreement.Agreement`; `thoughts`: the tree, each with `id`, `parent`,
  `city`, `day`, `status`, `score`, `votes`, `fallback`, `reason`.

The record (`"schema": "sidequest.tree_of_thoughts.calls/1"`): `model` and `runs`, each with
`problem`, `method` and `calls`: list of `n_call`, `n_round` (calls of one round may run at the
same time), `kind`, `thought`, `parent`, `messages` (`role`, `content`, and `id` where the model
wrote it), `reply` (`id`, `text`, `token_ids`, `finish_reason`), `settings` (`max_tokens` ...).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage

from sidequest_langchain import SideQuestChatModel

from .asking import CallRecord
from .planner import Run
from .problem import ProblemError
from .thought import Thought

SCHEMA = "sidequest.tree_of_thoughts/1"
CALLS_SCHEMA = "sidequest.tree_of_thoughts.calls/1"
_ROLES = {"system": "system", "human": "user", "ai": "assistant"}


def as_json(runs: Sequence[Run], model_name: str) -> dict[str, Any]:
    """The results of several runs."""
    return {
        "schema": SCHEMA,
        "model": model_name,
        "n_cpus": os.cpu_count(),
        "runs": [_run(run) for run in runs],
    }


def calls_as_json(runs: Sequence[Run], model: BaseChatModel, model_name: str) -> dict[str, Any]:
    """The calls of several runs, so that another chat model can be given the same."""
    return {
        "schema": CALLS_SCHEMA,
        "model": model_name,
        "runs": [
            {
                "problem": run.problem.name,
                "method": run.method,
                "calls": [_call(record, model) for record in run.records],
            }
            for run in runs
        ],
    }


def write_calls(path: Path, document: dict[str, Any]) -> None:
    """Write a record of calls.

    Raises:
        ProblemError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    except OSError as error:
        msg = f"cannot write the record of calls to {path}: {error.strerror}"
        raise ProblemError(msg) from error


def _run(run: Run) -> dict[str, Any]:
    return {
        "problem": run.problem.name,
        "n_cities": len(run.problem.cities),
        "method": run.method,
        "solved": run.is_solved,
        "outcome": run.outcome,
        "plan": [asdict(visit) for visit in run.plan],
        "violations": [asdict(violation) for violation in run.violations],
        "calls": run.n_calls,
        "samples": len(run.records),
        "tokens": {
            kind: run.n_tokens(kind) for kind in ("prompt", "reused", "prefilled", "generated")
        },
        "wall_s": round(run.wall_s, 3),
        "kv": {
            "peak_bytes": run.peak_bytes,
            "peak_bytes_without_release": run.kept.peak_bytes if run.kept else None,
            "releases": [
                {"thought": r.thought, "reason": r.reason, "bytes": r.n_bytes, "tokens": r.n_tokens}
                for r in run.releases
            ],
        },
        "agreement": asdict(run.agreement),
        "thoughts": [_thought(thought) for thought in run.nodes.values()],
    }


def _thought(thought: Thought) -> dict[str, Any]:
    return {
        "id": thought.id,
        "parent": thought.parent,
        "city": thought.city,
        "day": thought.day,
        "status": thought.status,
        "score": thought.score,
        "votes": thought.n_votes,
        "fallback": thought.is_fallback,
        "reason": thought.reason,
    }


def _call(record: CallRecord, model: BaseChatModel) -> dict[str, Any]:
    return {
        "n_call": record.n_call,
        "n_round": record.n_round,
        "kind": record.kind,
        "thought": record.thought,
        "parent": record.parent,
        "messages": [_message(message) for message in record.messages],
        "reply": {
            "id": record.reply.id,
            "text": str(record.reply.text),
            "token_ids": _token_ids(record.reply, model),
            "finish_reason": record.reply.response_metadata.get("finish_reason"),
        },
        "settings": record.settings,
    }


def _message(message: BaseMessage) -> dict[str, Any]:
    written = {"role": _ROLES[message.type], "content": message.content}
    return {**written, "id": message.id} if message.id else written


def _token_ids(reply: AIMessage, model: BaseChatModel) -> list[int]:
    """The ids that were generated; of other models, those of the text."""
    if isinstance(model, SideQuestChatModel) and reply.id:
        known = model.engine.replies.get(reply.id)
        if known is not None:
            return list(known.token_ids)
    return model.get_token_ids(str(reply.text))
