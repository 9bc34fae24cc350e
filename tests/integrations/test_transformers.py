"""`attn_implementation="flexmod"` beside eager attention, both against float64, in tiny random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

transformers = pytest.importorskip("transformers", minversion="4.57")

from tiers import long_but  # noqa: E402
from transformers import masking_utils as masking  # noqa: E402

from flexmod import create_block_mask, create_mask, masks  # noqa: E402
from flexmod.errors import ArgumentTypeError, TransformersArgumentError  # noqa: E402
from flexmod.integrations import transformers as integration  # noqa: E402
from integrations import tiny_models  # noqa: E402
from integrations.tiny_models import LENGTH, MODELS, Batch, batch, make, results  # noqa: E402

EACH_MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()
    tiny_models.register_truth()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@EACH_MODEL
@pytest.mark.parametrize("kind", ["plain", "right", "left", "packed"])
def test_logits_and_gradients(name: str, kind: str) -> None:
    """In float32, no further from float64 than three times eager's own distance."""
    given = batch(kind)
    ours, eager = (results(make(name, implementation), given) for implementation in ("flexmod", "eager"))
    exact = results(make(name, "truth", torch.float64), given)
    assert ours.keys() == eager.keys() == exact.keys()
    for key, true in exact.items():
        limit = 3 * rms(eager[key] - true) + 2e-7 * rms(true)
        assert rms(ours[key] - true) <= limit, key


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("mistral", {"sliding_window": 100}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 100}),
        ("gpt-oss", {"sliding_window": 100}),
    ],
)
def test_a_window_or_cap_that_were_lost_would_be_seen(name: str, changed: dict[str, Any]) -> None:
    given = batch("plain")
    with torch.no_grad():
        with_it, without = (make(name, "flexmod", **options)(**given.inputs) for options in ({}, changed))
    assert rms(with_it.logits - without.logits) > 0.01


def test_a_sink_that_was_lost_would_be_seen() -> None:
    model, given = make("gpt-oss", "flexmod"), batch("plain")
    with torch.no_grad():
        logits = model(**given.inputs).logits
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-100.0)
        assert rms(model(**given.inputs).logits - logits) > 0.01


@pytest.mark.covering(1, long=1)
@EACH_MODEL
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation(name: str, cache: str) -> None:
    """The same tokens, from a batch padded at its left, each with a cache of keys and values."""
    given = batch("left").inputs
    tokens = [
        make(name, implementation).generate(
            **given, max_new_tokens=12, do_sample=False, cache_implementation=cache
        )
        for implementation in ("flexmod", "eager")
    ]
    assert torch.equal(*tokens)
    assert tokens[0].shape[1] == tiny_models.LENGTH + 12


def test_a_prompt_in_chunks_and_steps_of_several_queries() -> None:
    """A cache that is filled 20, 1 and 5 tokens at a time gives the logits of one call."""
    model = make("mistral", "flexmod")
    ids = batch("plain").inputs["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits
        cache, found = None, []
        for part in ids.split([20, 1, 5, 15], 1):
            result = model(part, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            found.append(result.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)


@EACH_MODEL
def test_a_static_cache_in_chunks(name: str) -> None:
    chunks_of_a_static_cache(make(name, "flexmod"), make(name, "eager"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma2", marks=pytest.mark.long),
        pytest.param("gpt-oss", marks=pytest.mark.every),
        pytest.param("mistral", marks=pytest.mark.every),
    ],
)
def test_a_static_cache_in_chunks_of_a_compiled_model(name: str) -> None:
    compiled = torch.compile(make(name, "flexmod"), backend="eager")
    chunks_of_a_static_cache(compiled, make(name, "eager"))


@pytest.mark.long
def test_two_chunks_of_a_compiled_layer() -> None:
    """Each makes TorchDynamo trace the model, for seconds."""
    options = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    compiled = torch.compile(make("gemma2", "flexmod", **options), backend="eager")
    chunks_of_a_static_cache(compiled, make("gemma2", "eager", **options), (20, 21), times=1)


def chunks_of_a_static_cache(
    ours: Any, eager: Any, chunks: tuple[int, ...] = (5, 20, 16), times: int = 2
) -> None:
    """A chunk after the first of so many queries that their mask is traced; the cache is used again."""
    ids = batch("plain").inputs["input_ids"]
    found = []
    for model in (ours, eager):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        parts = []
        for _ in range(times):
            with torch.no_grad():
                parts += [model(part, past_key_values=cache).logits for part in ids.split(chunks, 1)]
            cache.reset()
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


LEFT_PADDING = torch.tensor([0, 3])


def in_chunks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Llama 4's chunks of 8."""
    return (kv_idx - LEFT_PADDING[b]) // 8 == (q_idx - LEFT_PADDING[b]) // 8


MASK_FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "window": masking.sliding_window_causal_mask_function(5),
    "chunks": masking.and_masks(in_chunks, masking.causal_mask_function),
    "bidirectional": lambda b, h, q_idx, kv_idx: q_idx >= 0,
    "packed": masking.and_masks(
        masking.packed_sequence_mask_function(torch.arange(64).expand(2, -1) // 6),
        masking.causal_mask_function,
    ),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offsets", [(0, 0), (9, 0), (24, 6)], ids=str)
@pytest.mark.parametrize("queries", [1, 16, 40])
@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_masks_are_what_the_mask_function_says(
    name: str, queries: int, offsets: tuple[int, int], padded: bool
) -> None:
    """Element by element, with the offsets of a cache, by the interfaces of transformers 4 and 5."""
    start, first_key = offsets
    keys = start - first_key + queries
    padding = torch.ones(2, start + max(1, queries - 3), dtype=torch.bool) if padded else None
    if padding is not None:
        padding[1, :11] = False
    shared = {
        "batch_size": 2, "kv_length": keys, "kv_offset": first_key, "mask_function": MASK_FUNCTIONS[name],
        "attention_mask": padding,
    }  # fmt: skip
    b, q_idx, kv_idx = (torch.arange(size) for size in (2, queries, keys))
    head = torch.zeros(1, 1, 1, dtype=torch.int64)
    kept = MASK_FUNCTIONS[name](b[:, None, None, None], head, q_idx[:, None] + start, kv_idx + first_key)
    expected = kept.expand(2, 1, queries, keys)
    if padding is not None:
        seen = nn.functional.pad(padding, (0, 40))[:, first_key : first_key + keys]
        expected = expected & seen[:, None, None]
    calls: list[dict[str, Any]] = [
        {"q_length": queries, "q_offset": start, "use_vmap": False, "device": "cpu"},
        {"q_length": queries, "q_offset": torch.tensor(start), "device": "cpu"},
        {"cache_position": torch.arange(start, start + queries)},
    ]
    for given in calls:
        made = integration.attention_mask(**shared, **given)
        assert made.shape == (2, 1, queries, keys)
        found = create_mask(made.mask.mask_mod, 2, None, queries, keys, "cpu")
        assert torch.equal(found, expected)


def layer(heads: int = 4, keys: int = 30, queries: int = 30) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    shapes = ((2, heads, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class Layer(nn.Module):
    """What `attention` may ask a layer."""

    is_causal = True


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, softcap: float | None = None) -> Tensor:
    scores = 0.3 * q @ k.repeat_interleave(2, 1).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return ((scores + bias).softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)


def test_without_a_mask_the_layer_says_what_is_causal() -> None:
    q, k, v = layer()
    later = torch.ones(30, 30, dtype=torch.bool).triu(1)
    bias = torch.zeros(30, 30, dtype=torch.float64).masked_fill(later, -torch.inf)
    window = bias.masked_fill(torch.ones(30, 30, dtype=torch.bool).tril(-4), -torch.inf)
    for options, wanted in (
        ({}, bias),
        ({"sliding_window": 4}, window),
        ({"is_causal": False}, torch.zeros_like(bias)),
    ):
        out, weights = integration.attention(Layer(), q, k, v, None, 0.3, **options)
        assert weights is None
        torch.testing.assert_close(out, dense(q, k, v, wanted), rtol=0, atol=1e-12)
    out, _ = integration.attention(Layer(), q[:, :, :1], k, v, None, 0.3)
    torch.testing.assert_close(out, dense(q[:, :, :1], k, v, torch.zeros_like(bias[:1])), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 4])
def test_dense_masks_and_biases(heads: int) -> None:
    """As a user may give them: bool, added, or learned, longer than the keys where a cache is static."""
    q, k, v = layer()
    generator = torch.Generator().manual_seed(13)
    kept = torch.rand(2, heads, 30, 34, generator=generator) > 0.4
    kept[..., 0] = True
    added = torch.where(kept, torch.randn(kept.shape, generator=generator).double(), torch.finfo(q.dtype).min)
    bias = torch.randn(1, 4, 30, 30, generator=generator, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros((), dtype=torch.float64)
    for mask, position_bias, softcap, wanted in (
        (kept, None, None, nothing.masked_fill(~kept[..., :30], -torch.inf)),
        (added, None, None, added[..., :30].clamp(min=-1e300)),
        (added, bias, 1.5, added[..., :30].clamp(min=-1e300) + bias),
        (integration.CarriedMask(causal_block_mask()), bias, None, bias + causal_bias()),
        (added[:, :, :1], bias, None, added[:, :, :1, :30].clamp(min=-1e300) + bias),
        (kept, bias[:, :, :1], None, bias[:, :, :1].masked_fill(~kept[..., :30], -torch.inf)),
    ):
        options = {"softcap": softcap, "position_bias": position_bias}
        out, _ = integration.attention(Layer(), q, k, v, mask, 0.3, **options)
        truth = dense(q, k, v, wanted, softcap)
        torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
        if position_bias is not None:
            found, exact = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, truth))
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("axis", long_but({2}, [0, 2]))
def test_a_dense_mask_beside_a_query_with_symbols(axis: int) -> None:
    q, k, v = layer()
    kept = torch.rand(2, 1, 30, 30) > 0.4
    torch._dynamo.maybe_mark_dynamic(q, axis)

    def run(query: Tensor) -> Tensor:
        return integration.attention(nn.Module(), query, k, v, kept)[0]

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(q), run(q))


def causal_block_mask() -> Any:
    return create_block_mask(masks.causal(), None, None, 30, 30, "cpu")


def causal_bias() -> Tensor:
    later = torch.ones(30, 30, dtype=torch.bool).triu(1)
    return torch.zeros(30, 30, dtype=torch.float64).masked_fill(later, -torch.inf)


def test_block_masks_of_all_kinds_are_taken() -> None:
    q, k, v = layer()
    ours = causal_block_mask()
    theirs = torch_block_mask(masks.causal(), None, None, 30, 30, device="cpu")
    wanted = dense(q, k, v, causal_bias())
    for mask in (ours, theirs, integration.CarriedMask(ours), integration.CarriedMask(ours).to("cpu")):
        out, _ = integration.attention(Layer(), q, k, v, mask, 0.3)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)


def test_a_carried_mask_prints_and_slices_as_what_it_carries() -> None:
    carried = integration.CarriedMask(create_block_mask(masks.causal(), 2, None, 30, 30, "cpu"))
    assert str(carried) == repr(carried.mask)
    assert carried[1].shape == (1, 1, 30, 30)


@pytest.mark.parametrize("rows", [slice(-1, None), slice(7, 20), slice(0, 40)], ids=str)
def test_a_carried_mask_keeps_single_queries(rows: slice) -> None:
    """As Gemma 4 does for layers that share their keys, of which generation needs the last query alone."""
    q, k, v = layer()
    padded = masks.causal() & masks.padding(torch.tensor([30, 11]))
    part = integration.CarriedMask(create_block_mask(padded, 2, None, 30, 30, "cpu"))[:, :, rows, :]
    kept = torch.arange(30) < torch.tensor([30, 11])[:, None, None, None]
    bias = causal_bias().expand(2, 1, -1, -1).masked_fill(~kept, -torch.inf)[:, :, rows]
    out, _ = integration.attention(Layer(), q[:, :, rows], k, v, part, 0.3)
    torch.testing.assert_close(out, dense(q[:, :, rows], k, v, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("dropout", 0.1, "set the dropout of Layer to 0.0"),
        ("output_attentions", True, 'load the model with attn_implementation="eager"'),
        ("head_mask", torch.ones(4), "multiply the heads' outputs"),
        ("cache", object(), "flexmod reads no paged cache"),
        ("position_bias", torch.zeros(3, 1, 30, 30), "of the scores' shape, .2, 4, 30, 30"),
        ("position_bias", torch.zeros(1, 2, 30, 30), "of the scores' shape, .2, 4, 30, 30"),
        ("position_bias", torch.zeros(1, 4, 20, 30), "of the scores' shape, .2, 4, 30, 30"),
        ("position_bias", torch.zeros(1, 4, 30, 1), "of the scores' shape, .2, 4, 30, 30"),
    ],
)
def test_what_is_refused(name: str, value: Any, advice: str) -> None:
    with pytest.raises(TransformersArgumentError, match=f"{name} is .*\n.*{advice}"):
        integration.attention(Layer(), *layer(), None, **{name: value})


@pytest.mark.parametrize("shape", [(1, LENGTH), (3, LENGTH), (2, LENGTH, LENGTH)], ids=str)
def test_masks_of_other_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """Rows of another batch are never read past or ignored."""
    mask = torch.ones(shape, dtype=torch.bool).tril()
    with pytest.raises(TransformersArgumentError, match=r"attention_mask is .*\n.*the tokens, .2, tokens."):
        make("mistral", "flexmod")(**batch("plain").inputs, attention_mask=mask)


def test_the_name_is_a_text() -> None:
    with pytest.raises(ArgumentTypeError) as raised:
        integration.register(3)  # type: ignore[arg-type]
    assert str(raised.value) == (
        'name is 3.\n  Instead: give the text of attn_implementation, e.g. "flexmod".'
    )


def test_dropout_is_refused_when_training_alone() -> None:
    model = make("llama", "flexmod")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    given: Batch = batch("plain")
    model(**given.inputs)
    with pytest.raises(TransformersArgumentError, match="dropout is 0.1"):
        model.train()(**given.inputs)
    with pytest.raises(TransformersArgumentError, match="output_attentions is True"):
        model.eval()(**given.inputs, output_attentions=True)


@pytest.mark.parametrize("name", long_but({"gpt-oss"}, ["gemma2", "gpt-oss"]))
def test_options_reach_the_kernels(name: str) -> None:
    """What a model is called with is handed on: here, Triton's kernels in the interpreter."""
    model, given = make(name, "flexmod"), batch("left")
    with torch.no_grad():
        plain, interpreted = (
            model(**given.inputs, kernel_options=options).logits[given.valid]
            for options in (None, {"BACKEND": "INTERPRET"})
        )
    assert not torch.equal(plain, interpreted)
    torch.testing.assert_close(plain, interpreted, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", long_but({"packed"}, ["left", "packed"]))
def test_a_compiled_model_is_one_graph(kind: str) -> None:
    """Forward and backward, with the masks made inside."""
    given = batch(kind)
    model = make("gemma2", "flexmod")
    plain = results(make("gemma2", "flexmod"), given)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    for name, found in results(model, given).items():
        torch.testing.assert_close(found, plain[name], rtol=0, atol=0)


def test_compiled_generation_with_a_static_cache() -> None:
    """The mask of a step is made outside, as transformers does it, and one graph serves all steps."""
    config = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    config._compile_all_devices = True
    given, options = batch("left").inputs, {"max_new_tokens": 12, "do_sample": False}
    compiled = make("llama", "flexmod").generate(
        **given, **options, cache_implementation="static", compile_config=config
    )
    assert torch.equal(compiled, make("llama", "eager").generate(**given, **options))


def test_gradient_checkpointing() -> None:
    given = batch("left")
    plain = results(make("gemma2", "flexmod").train(), given)
    checkpointed = make("gemma2", "flexmod").train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for name, found in results(checkpointed, given).items():
        torch.testing.assert_close(found, plain[name], rtol=0, atol=0)
