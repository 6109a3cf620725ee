"""Which models are served, which are refused and how they hear of it, and what serving changes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, init_empty_weights
from transformers import AutoModelForCausalLM, LlamaModel, PreTrainedModel

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine import self_test as self_test_room
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.errors import UnsupportedModelError
from tests.engine import checks
from tests.engine.driving import (
    ask,
    audit,
    ids,
    model_of,
    right_answer,
    run,
    run_together,
    stored,
)
from tests.support import oracle
from tests.support.tiny import FAMILIES, REFUSED, tiny_model
from tests.support.tok import byte_tokenizer

MakeEngine = Callable[..., Engine]
LLAMA = "llama"

REASONS = {
    "qwen3_next": ("Qwen3NextForCausalLM", "linear_attention"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "latent attention"),
    "falcon": ("FalconForCausalLM", "attention interface"),
    "bloom": ("BloomForCausalLM", "attention interface"),
    "mamba": ("MambaForCausalLM", ""),
    "t5": ("T5ForConditionalGeneration", "encoder-decoder"),
}


def refused(model: PreTrainedModel) -> str:
    """The message a model is refused with."""
    with pytest.raises(UnsupportedModelError) as caught:
        Engine(model, byte_tokenizer())
    assert not any(t.name == "sidequest-engine" for t in threading.enumerate())
    return str(caught.value)


# -- refused -----------------------------------------------------------------------------


def test_every_refused_architecture_has_its_reason() -> None:
    assert REASONS.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    model = REFUSED[name]()
    implementation = model.config._attn_implementation
    message = refused(model)
    architecture, reason = REASONS[name]
    assert architecture in message
    assert reason in message
    assert model.config._attn_implementation == implementation


def test_a_model_without_a_head_is_refused() -> None:
    assert "language-model head" in refused(LlamaModel(model_of(LLAMA).config))


def test_weights_that_are_not_there_are_refused() -> None:
    """On the meta device; the message names the first of them."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(model_of(LLAMA).config)
    assert "model.embed_tokens.weight" in refused(model)
    model = tiny_model(LLAMA)
    model.model.layers[1].mlp.to("meta")
    assert "model.layers.1.mlp.gate_proj.weight" in refused(model)


def test_chunked_attention_is_refused() -> None:
    model = tiny_model(LLAMA)
    model.config.layer_types = ["chunked_attention", "full_attention"]
    assert "chunked_attention" in refused(model)


def test_a_layer_that_computes_something_else_is_found_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No name gives it away: its logits over the tree differ from the plain ones."""
    model = tiny_model(LLAMA)
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Mixes along the packed axis, as a convolution does.
        return original(hidden + 0.2 * hidden.roll(1, dims=1), *args, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    assert "load-time check" in refused(model)


def test_what_attention_is_handed_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(LLAMA)
    attention = model.model.layers[0].self_attn
    original = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *args, **kwargs: original(*args, alibi=1.0, **kwargs)
    )
    message = refused(model)
    assert "alibi" in message
    assert "LlamaAttention" in message


def test_a_nan_in_the_weights_is_found_at_load() -> None:
    model = tiny_model(LLAMA)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    assert "differ" in refused(model)


def test_the_self_test_leaves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(LLAMA)
    usage = engine.kv.usage()
    assert (usage.n_bytes, usage.peak_bytes, usage.n_steps, engine.kv.serial) == (0, 0, 0, 0)


@pytest.mark.parametrize("n_positions", [16, 32])
def test_the_self_test_fits_a_short_context(make_engine: MakeEngine, n_positions: int) -> None:
    model = tiny_model("gpt2", max_position_embeddings=n_positions)
    engine = make_engine(model)
    result = run(engine, ask(ids(10), 30, ignore_eos=True))
    assert len(result.token_ids) == n_positions - 10


def test_half_precision_has_a_tolerance_of_its_own() -> None:
    assert set(self_test_room.TOLERANCE) == {torch.float32, torch.float64}
    for dtype in (torch.bfloat16, torch.float16):
        Engine(tiny_model(LLAMA).to(dtype), byte_tokenizer()).close()


# -- settings that models come with ------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "hybrid", "quantized", "offloaded", "dynamic", "x"])
def test_a_configured_cache_is_not_ours(make_engine: MakeEngine, kind: str) -> None:
    model = tiny_model(LLAMA)
    model.generation_config.cache_implementation = kind
    checks.check_answer(make_engine(model), LLAMA, ask(ids(40), 8), n_reused=0)


@pytest.mark.parametrize("use_cache", [True, False])
def test_use_cache_is_not_ours(make_engine: MakeEngine, use_cache: bool) -> None:
    model = tiny_model(LLAMA, use_cache=use_cache)
    model.generation_config.use_cache = use_cache
    engine = make_engine(model)
    checks.check_answer(engine, LLAMA, ask(ids(40), 8), n_reused=0)
    checks.check_answer(engine, LLAMA, ask([*ids(40), 3], 8), n_reused=40)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_in_training_is_served_in_eval(make_engine: MakeEngine, family: str) -> None:
    dropout = {"gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}}
    model = tiny_model(family, **dropout.get(family, {"attention_dropout": 0.5}))
    model.requires_grad_().train()
    model.activation_checkpointing_enable()
    engine = make_engine(model)
    checks.check_answer(engine, family, ask(ids(40), 8), n_reused=0)
    # Put back into training under the engine's eyes: its answers are still those of eval.
    model.train()
    checks.check_answer(engine, family, ask(ids(30, seed=1), 8), n_reused=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_models_own_attention_is_given_back(implementation: str) -> None:
    model = tiny_model(LLAMA)
    model.set_attn_implementation(implementation)
    engine = Engine(model, byte_tokenizer())
    assert tuple(oracle.greedy(model, ids(40), 8)) == right_answer(LLAMA, ids(40), 8)
    checks.check_answer(engine, LLAMA, ask(ids(40), 8), n_reused=0)
    engine.close()
    assert model.config._attn_implementation == implementation
    assert tuple(oracle.greedy(model, ids(40), 8)) == right_answer(LLAMA, ids(40), 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_generate_goes_on_beside_an_engine(make_engine: MakeEngine, family: str) -> None:
    """In another thread, over the same model, with its own cache, at the same time."""
    model = model_of(family)
    plain: list[list[int]] = []

    def generate() -> None:
        prompt = torch.tensor([ids(25, seed=4)])
        for _ in range(4):
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
            )
            plain.append(out[0, 25:].tolist())

    engine = make_engine(model)
    thread = threading.Thread(target=generate)
    thread.start()
    requests = [ask(ids(40, seed=n), 8) for n in range(4)]
    results = [
        result for request in requests for result in run_together(engine, [request, request])
    ]
    thread.join(60)
    for request, result in zip([r for r in requests for _ in range(2)], results, strict=True):
        checks.check_result(family, request, result)
    answer = list(right_answer(family, ids(25, seed=4), 8))
    eos = model.generation_config.eos_token_id
    assert [[t for t in out if t != eos] for out in plain] == [answer] * 4


def test_two_engines_over_one_model(make_engine: MakeEngine) -> None:
    """Each has a tree of its own; the model is given back with the last of them."""
    model = tiny_model(LLAMA)
    one, two = (Engine(model, byte_tokenizer()) for _ in range(2))
    for engine in (one, two):
        checks.check_answer(engine, LLAMA, ask(ids(40), 8), n_reused=0)
    one.kv.clear()
    checks.check_answer(two, LLAMA, ask(ids(40), 8), n_reused=40)
    one.close()
    assert model.config._attn_implementation != "sdpa"
    checks.check_answer(two, LLAMA, ask([*ids(40), 3], 8), n_reused=40)
    two.close()
    assert model.config._attn_implementation == "sdpa"
    checks.check_answer(make_engine(model), LLAMA, ask(ids(40), 8), n_reused=0)


def test_an_engine_does_not_keep_its_model() -> None:
    model = tiny_model(LLAMA)
    engine = Engine(model, byte_tokenizer())
    run(engine, ask(ids(9), 3))
    gone = weakref.ref(model)
    engine.close()
    del engine, model
    gc.collect()
    assert gone() is None


# -- isolation ---------------------------------------------------------------------------


def test_scopes_share_nothing_in_one_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(model_of(LLAMA))
    requests = [ask(ids(30), 5, scope=scope) for scope in ("", "a", "b", "ab", "a")]
    results = run_together(engine, requests)
    assert [result.n_reused_tokens for result in results] == [0, 0, 0, 0, 30]
    for request, result in zip(requests, results, strict=True):
        checks.check_result(LLAMA, request, result)
    assert {info.scope for info in engine.kv.segments()} == {"", "a", "b", "ab"}
    assert engine.kv.usage().n_tokens == 4 * len(stored(requests[0], results[0]))
    assert run(engine, ask(ids(30), 5, scope="c")).n_reused_tokens == 0
    assert run(engine, ask(ids(30), 5, scope="ab")).n_reused_tokens == 30


def test_equality_of_ids_decides_not_of_digits(make_engine: MakeEngine) -> None:
    """(1, 23) and (12, 3) look alike when they are joined."""
    engine = make_engine(model_of(LLAMA))
    checks.check_answer(engine, LLAMA, ask([1, 23, 7, 7], 5), n_reused=0)
    checks.check_answer(engine, LLAMA, ask([12, 3, 7, 7], 5), n_reused=0)
    checks.check_answer(engine, LLAMA, ask([1, 2, 37, 7], 5), n_reused=1)


# -- devices -----------------------------------------------------------------------------


MODULES = (
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.0",
    "model.layers.1",
    "model.norm",
    "lm_head",
)


def check_devices(engine: Engine) -> None:
    layers = engine._core.adapter.layout
    for segment in engine._core.tree.segments():
        assert [t.device for t in segment.keys] == [layer.device for layer in layers]
        assert [t.device for t in segment.values] == [layer.device for layer in layers]


def test_a_dispatched_model(make_engine: MakeEngine) -> None:
    """Accelerate's hooks between the layers, all of them on the CPU."""
    model = dispatch_model(
        tiny_model(LLAMA), device_map=dict.fromkeys(MODULES, "cpu"), force_hooks=True
    )
    engine = make_engine(model)
    requests = [ask([*ids(20), *ids(n, seed=n)], 6) for n in (1, 5)]
    results = run_together(engine, requests)
    for request, result in zip(requests, results, strict=True):
        checks.check_result(LLAMA, request, result)
    check_devices(engine)
    audit(engine, map(stored, requests, results))


@pytest.mark.parametrize("offloaded", ["model.layers.1", "model.embed_tokens"])
def test_offloaded_weights(make_engine: MakeEngine, tmp_path: Path, offloaded: str) -> None:
    """Between two passes they lie on the meta device; inputs go where they run."""
    device_map = {**dict.fromkeys(MODULES, "cpu"), offloaded: "disk"}
    model = dispatch_model(
        tiny_model(LLAMA), device_map=device_map, main_device="cpu", offload_dir=tmp_path
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    engine = make_engine(model)
    checks.check_answer(engine, LLAMA, ask(ids(40), 6), n_reused=0)
    checks.check_answer(engine, LLAMA, ask([*ids(40), 3], 6), n_reused=40)
    assert {layer.device.type for layer in engine._core.adapter.layout} == {"cpu"}
    check_devices(engine)


def test_layers_of_different_dtypes(make_engine: MakeEngine) -> None:
    """Each layer's rows are of that layer's dtype, not of the first one's."""
    model = tiny_model(LLAMA)
    attention = model.model.layers[1].self_attn.to(torch.bfloat16)
    original = attention.forward

    def forward(hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        rotary = tuple(t.bfloat16() for t in position_embeddings)
        out, weights = original(
            hidden_states=hidden_states.bfloat16(), position_embeddings=rotary, **kwargs
        )
        return out.float(), weights

    attention.forward = forward
    engine = make_engine(model, config=CacheConfig(prefill_chunk=7))
    request = ask(ids(40), 6, top_logprobs=0)
    result = run(engine, request)
    assert [layer.dtype for layer in engine._core.adapter.layout] == [
        torch.float32,
        torch.bfloat16,
    ]
    assert engine.kv.usage().n_bytes == len(stored(request, result)) * (256 + 128)
    expected = oracle.logits(model, [*ids(40), *result.token_ids]).log_softmax(-1)
    for i, found in enumerate(result.logprobs):
        assert abs(found.logprob - float(expected[39 + i, found.token_id])) < 0.25


def test_double_precision(make_engine: MakeEngine) -> None:
    model = tiny_model(LLAMA).double()
    engine = make_engine(model)
    requests = [ask([*ids(20), *ids(n, seed=n)], 6) for n in (1, 5)]
    for request, result in zip(requests, run_together(engine, requests), strict=True):
        assert list(result.token_ids) == oracle.greedy(model, request.prompt_ids, 6)
    assert engine.kv.usage().n_bytes == engine.kv.usage().n_tokens * 1024
