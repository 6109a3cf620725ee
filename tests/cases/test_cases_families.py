"""What every served architecture must survive: a failed pass, a call given up, and back again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from sidequest_langchain.engine.engine import Engine
from tests.engine.driving import ask, audit, ids, model_of, right_answer, run, stored
from tests.support.tiny import FAMILIES

MakeEngine = Callable[..., Engine]


class Broken(Exception):
    """What the tests raise; nothing else does."""


def last_layer(family: str) -> Any:
    """The last decoder layer, whatever the architecture calls its layers."""
    model = model_of(family)
    (layers,) = (m for m in model.modules() if type(m).__name__ == "ModuleList" and _is_stack(m))
    return layers[-1]


def _is_stack(modules: Any) -> bool:
    return all("Layer" in type(m).__name__ or "Block" in type(m).__name__ for m in modules)


@pytest.mark.parametrize("n_pass", [1, 3], ids=["in the prompt", "in the answer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_right_after_a_failed_pass(family: str, n_pass: int, make_engine: MakeEngine):
    """The last layer fails when the others have stored their rows; a trunk is resident."""
    engine, layer, begun = make_engine(model_of(family)), last_layer(family), []
    trunk = ask(ids(20), 3)
    path = stored(trunk, run(engine, trunk))
    original = layer.forward

    def forward(*args: Any, **given: Any) -> Any:
        if threading.current_thread().name == "sidequest-engine":
            begun.append(1)
            if len(begun) >= n_pass:
                raise Broken
        return original(*args, **given)

    layer.forward = forward
    branch = ask([*ids(20), *ids(9, seed=1)], 6)
    try:
        with pytest.raises(Broken):
            run(engine, branch)
    finally:
        del layer.forward
    audit(engine, [path])
    for prompt in (branch.prompt_ids, ids(20), [*ids(20)[:11], 7, 8]):
        assert run(engine, ask(prompt, 6)).token_ids == right_answer(family, prompt, 6)
    engine.kv.check_integrity()
