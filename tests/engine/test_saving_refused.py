"""A saved thread is refused, by name, wherever its rows would be another model's (B64)."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken

from sidequest_langchain.engine.lasting import weights_sum
from sidequest_langchain.errors import CacheError, SavedThreadError
from sidequest_langchain.models.quantising import quantise_weights
from tests.engine.driving import ask, audit, ids, run
from tests.engine.managing import managed
from tests.engine.saved import child
from tests.support import oracle
from tests.support.templates import THINK
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer, metaspace_tokenizer

LLAMA = "llama"


@pytest.fixture
def folder(make_engine, tmp_path):
    """Where thread `t` of a tiny Llama was saved."""
    engine = make_engine(tiny_model(LLAMA))
    run(engine, ask(ids(40), 6, thread="t"))
    engine.kv.save("t", tmp_path)
    return tmp_path


def other_vocabulary():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<more>")])
    return tokenizer


def spun():
    """Another base of the rotary embedding, and the buffers that follow from it."""
    return tiny_model(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def written_to(change):
    def make():
        model = tiny_model(LLAMA)
        with torch.no_grad():
            change(model)
        return model

    return make


def adapted():
    model = tiny_model(LLAMA)
    model.active_adapters = lambda: ["other"]
    return model


def last_bit(model):
    """The smallest change there is, of one weight of the last layer."""
    weight = model.model.layers[-1].self_attn.v_proj.weight.view(torch.int32)
    weight[-1, -1] ^= 1


def turned(model):
    model.model.rotary_emb.inv_freq.mul_(1.001)


MODELS = {
    "other weights": (lambda: tiny_model(LLAMA, seed=1), "weights"),
    "one bit": (written_to(last_bit), "weights"),
    "all weights": (written_to(lambda model: next(model.parameters()).add_(1)), "weights"),
    "a buffer": (written_to(turned), "weights"),
    "an adapter": (adapted, "adapters"),
    "another family": (lambda: tiny_model("qwen2"), "model"),
    "half precision": (lambda: tiny_model(LLAMA).half(), "dtype"),
    "rope": (spun, "config"),
}


@pytest.mark.parametrize("case", MODELS)
def test_another_model_is_refused_by_name(make_engine, folder, case):
    make, field = MODELS[case]
    engine = make_engine(make())
    with pytest.raises(SavedThreadError, match=rf"was not loaded: it was made with {field} ") as c:
        engine.kv.load(folder, "t")
    assert c.value.field == field
    audit(engine, [])
    answer = run(engine, ask(ids(40), 6, thread="t"))
    assert answer.n_reused_tokens == 0
    if case not in ("an adapter", "half precision"):
        model = engine._core.adapter.model
        assert list(answer.token_ids) == oracle.greedy(model, ids(40), 6)


TOKENIZERS = {
    "another kind": (metaspace_tokenizer, "tokenizer"),
    "one token more": (other_vocabulary, "tokenizer"),
    "another template": (lambda: byte_tokenizer(THINK), "template"),
    "no template": (lambda: byte_tokenizer(None), "template"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_another_tokenizer_is_refused_by_name(make_engine, folder, case):
    make, field = TOKENIZERS[case]
    engine = make_engine(tiny_model(LLAMA), make())
    with pytest.raises(SavedThreadError, match=rf"made with {field} ") as caught:
        engine.kv.load(folder, "t")
    assert caught.value.field == field
    audit(engine, [])


def test_a_chat_models_own_template_counts(make_engine, folder):
    engine = make_engine(tiny_model(LLAMA))
    view = engine.kv.for_template(THINK)
    with pytest.raises(SavedThreadError, match="made with template") as caught:
        view.load(folder, "t")
    assert caught.value.field == "template"
    engine.kv.load(folder, "t")
    view.save("t", folder)
    with pytest.raises(SavedThreadError, match="made with template"):
        engine.kv.load(folder, "t")
    assert view.load(folder, "t").n_shared_tokens > 0


def test_int8_weights_are_other_weights(make_engine, folder):
    model = tiny_model(LLAMA, hidden_size=256, intermediate_size=256, head_dim=64)
    dense = weights_sum(model)
    quantise_weights(model, list(range(60)))
    packed = weights_sum(model)
    assert packed != dense
    assert packed == weights_sum(model)
    engine = make_engine(model)
    with pytest.raises(SavedThreadError, match="quantization 'none', but it is 'int8'"):
        engine.kv.load(folder, "t")


def test_int8_weights_made_twice_are_the_same(make_engine, tmp_path):
    def made():
        model = tiny_model(LLAMA, hidden_size=256, intermediate_size=256, head_dim=64)
        quantise_weights(model, list(range(60)))
        return make_engine(model)

    engine, other = made(), made()
    result = run(engine, ask(ids(40), 6, thread="t"))
    engine.kv.save("t", tmp_path)
    other.kv.load(tmp_path, "t")
    prompt = [*ids(40), *result.token_ids, *ids(5, seed=1)]
    assert run(other, ask(prompt, 6)).token_ids == run(engine, ask(prompt, 6)).token_ids


def test_where_a_model_came_from_does_not_matter(make_engine, folder):
    model = tiny_model(LLAMA)
    model.config._name_or_path = model.name_or_path = "/elsewhere"
    engine = make_engine(model, name="another name")
    assert engine.kv.load(folder, "t").n_tokens > 0


def test_sums_are_the_same_in_another_process():
    code = """
        from sidequest_langchain.engine.lasting import weights_sum
        from tests.support.tiny import tiny_model
        print(weights_sum(tiny_model("llama")))
    """
    assert child(code).strip() == weights_sum(tiny_model(LLAMA))


def test_a_file_that_is_damaged_and_another_models_is_called_damaged(make_engine, folder):
    [path] = folder.iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
    engine = make_engine(tiny_model(LLAMA, seed=1))
    with pytest.raises(SavedThreadError, match="sha256 differs"):
        engine.kv.load(folder, "t")


def test_rows_that_a_policy_changed_are_refused_without_one(make_engine, tmp_path):
    engine = make_engine(tiny_model(LLAMA), config=managed(budget_tokens=48))
    run(engine, ask(ids(60), 6, thread="t"))
    assert engine.kv.run_receipt().n_rows_evicted
    engine.kv.save("t", tmp_path)
    plain = make_engine(tiny_model(LLAMA))
    with pytest.raises(SavedThreadError, match="acts 'managed', but it is 'exact' now") as caught:
        plain.kv.load(tmp_path, "t")
    assert caught.value.field == "acts"
    audit(plain, [])
    again = make_engine(tiny_model(LLAMA), config=managed(budget_tokens=9999))
    again.kv.load(tmp_path, "t")
    assert not again.kv.run_receipt().n_acts
    again.kv.save("t", tmp_path)
    with pytest.raises(SavedThreadError, match="acts 'managed'"):
        plain.kv.load(tmp_path, "t")


CHANGES = {
    "weights": lambda model: next(model.parameters()).add_(1.0),
    "adapter": lambda model: setattr(model, "active_adapters", lambda: ["other"]),
    "config": lambda model: model.config.rope_parameters.update(rope_theta=5e5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_meanwhile_saves_nothing(make_engine, tmp_path, change):
    model = tiny_model(LLAMA)
    engine = make_engine(model)
    run(engine, ask(ids(40), 6, thread="t"))
    with torch.no_grad():
        CHANGES[change](model)
    with pytest.raises(CacheError, match="rows may be of either model"):
        engine.kv.save("t", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_elsewhere_cannot_be_told():
    with pytest.raises(CacheError, match=r"weights model.* are offloaded"):
        weights_sum(tiny_model(LLAMA).to("meta"))
