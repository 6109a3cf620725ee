"""What clearing results of tools costs in a long agent's context: in the cache, and in the text.

    python -m benchmarks.clearing --model qwen2.5-coder-0.5b

An agent has called tools until its conversation has 12,000 tokens. Then five old results are
cleared, as LangChain's `ContextEditingMiddleware` does it, and the next question is asked:

* `whole`: nothing is cleared; what the question itself takes;
* `recompute`: the texts are replaced, and what follows the first of them is computed again;
* `reuse`: their rows leave the cache, and what follows them stays.

Each begins from the same cache. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from sidequest_langchain import SideQuestChatModel
from sidequest_langchain.evaluation.pages import write_between
from sidequest_langchain.policy.receipts import ActReceipt

from .engine_steps import Raw
from .machine import describe
from .prose import TOOLS, tool_result

CLEARED = {"context_editing": {"cleared": True, "strategy": "clear_tool_uses"}}
QUESTION = HumanMessage("Which warehouse has the most crates? Answer with its town's name.")
N_REPORTS = 4
"""Tables that one result holds, about 100 tokens each."""


def conversation(model: SideQuestChatModel, n_tokens: int) -> list[BaseMessage]:
    """An agent's steps until they have so many tokens; no two results alike."""
    messages: list[BaseMessage] = [
        SystemMessage(TOOLS),
        HumanMessage("Go through the warehouses, then say which is best stocked."),
    ]
    n_calls = 0
    while model.get_num_tokens_from_messages(messages) < n_tokens:
        call_id = f"call-{n_calls}"
        call = {"name": "stock", "args": {"warehouse": str(n_calls)}, "id": call_id}
        text = "\n".join(tool_result(N_REPORTS * n_calls + i) for i in range(N_REPORTS))
        messages += [AIMessage("", tool_calls=[call]), ToolMessage(text, tool_call_id=call_id)]
        n_calls += 1
    return messages


def without(messages: list[BaseMessage], n_results: int) -> list[BaseMessage]:
    """The conversation with its oldest results cleared, in LangChain's form."""
    oldest = [i for i, m in enumerate(messages) if isinstance(m, ToolMessage)][:n_results]
    found = list(messages)
    for at in oldest:
        update = {"content": "[cleared]", "response_metadata": CLEARED}
        found[at] = messages[at].model_copy(update=update)
    return found


def measure(
    model: SideQuestChatModel, *, n_tokens: int, n_cleared: int, max_tokens: int = 16
) -> dict[str, Any]:
    """Tokens computed, bytes freed and seconds of each way.

    Args:
        model: With an empty cache, which is empty again afterwards.
        n_tokens: Of the conversation.
        n_cleared: Results to clear, the oldest.
        max_tokens: Of each answer.
    """
    given = {"max_tokens": max_tokens, "temperature": 0.0}

    def ask(messages: list[BaseMessage], on_edit: str) -> dict[str, Any]:
        before, begun = model.kv.usage(), time.perf_counter()
        reply = model.invoke(messages, on_edit=on_edit, **given)
        seconds = time.perf_counter() - begun
        told = reply.response_metadata["sidequest"]
        return {
            "call": reply.id,
            "answer": reply.text,
            "prefilled_tokens": told["prefilled_tokens"],
            "first_token_s": told["first_token_s"],
            "total_s": seconds,
            "grown_bytes": model.kv.usage().n_bytes - before.n_bytes,
            "clearing": told.get("clearing"),
        }

    base = model.invoke(conversation(model, n_tokens), on_edit="reuse", **given)
    whole = [*conversation(model, n_tokens), base, QUESTION]
    edited = without(whole, n_cleared)
    found: dict[str, dict[str, Any]] = {}
    with model.kv.pin(str(base.id)):  # so that each way begins from the same cache
        for name, messages in (("whole", whole), ("recompute", edited)):
            found[name] = ask(messages, "recompute")
            model.kv.release(found[name]["call"])
    found["reuse"] = ask(edited, "reuse")
    acts = [r for r in model.kv.receipts() if isinstance(r, ActReceipt) and r.outcome == "done"]
    n_stored = model.engine._core.tree.bytes_per_token
    figures = {
        "prompt_tokens": base.response_metadata["token_usage"]["prompt_tokens"],
        "cleared_results": n_cleared,
        "cleared_rows": sum(act.n_rows for act in acts),
        "freed_bytes": sum(act.freed_bytes for act in acts),
        "bytes_per_row": n_stored,
        "ways": {
            name: {
                **one,
                "again_tokens": one["prefilled_tokens"] - found["whole"]["prefilled_tokens"],
            }
            for name, one in found.items()
        },
    }
    model.kv.clear()
    return figures


def holds(figures: dict[str, Any]) -> dict[str, bool]:
    """What must be true of any run."""
    ways = figures["ways"]
    return {
        "reuse computes nothing again": ways["reuse"]["again_tokens"] == 0,
        "exact bytes are freed": figures["freed_bytes"]
        == figures["cleared_rows"] * figures["bytes_per_row"]
        > 0,
        "the text-level way computes most of the rest again": 2 * ways["recompute"]["again_tokens"]
        > figures["prompt_tokens"] - figures["cleared_rows"],
        "all results were cleared": len((ways["reuse"]["clearing"] or {}).get("cleared", ()))
        == figures["cleared_results"],
    }


def table(figures: dict[str, Any], args: argparse.Namespace) -> str:
    """The figures as a table of Markdown."""
    rows = [
        f"| {name} | {one['again_tokens']:,} | {_freed(name, figures)} | "
        f"{one['first_token_s']:.2f} |"
        for name, one in figures["ways"].items()
    ]
    return "\n".join(
        [
            f"{args.model}, {figures['prompt_tokens']:,} tokens, {figures['cleared_results']} "
            f"results of {figures['cleared_rows']:,} tokens in all cleared "
            "(`python -m benchmarks.clearing --docs docs/agents.md`):",
            "",
            "| way | tokens computed again | bytes freed | seconds to the first token |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _freed(name: str, figures: dict[str, Any]) -> str:
    return f"{figures['freed_bytes']:,}" if name == "reuse" else "–"


def main(argv: list[str] | None = None) -> int:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=12_000, help="of the conversation")
    parser.add_argument("--cleared", type=int, default=5, help="results to clear")
    parser.add_argument("--docs", type=Path, help="page between whose marks the table goes")
    args = parser.parse_args(argv)
    model = SideQuestChatModel(model=args.model)
    figures = measure(model, n_tokens=args.tokens, n_cleared=args.cleared)
    lines = table(figures, args)
    print(lines)
    if args.docs is not None:
        write_between(args.docs, "clearing", lines)
    found = holds(figures)
    given = {name: value for name, value in vars(args).items() if name != "docs"}
    print(json.dumps({"machine": describe(), **given, **figures, "holds": found}))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
