"""Every implementation against transformers' own modules, in eager mode and float32."""

import pytest
import torch

import linnet.kernels as kernels

transformers = pytest.importorskip("transformers")


def implementations(slot):
    here = [each for each in kernels.implementations(slot) if each.available("cpu") is None]
    return [pytest.param(each, id=each.name) for each in here]


def accepted(implementation, *args, **kwargs):
    refusal = implementation.refusal(*args, **kwargs)
    if refusal is not None:
        pytest.skip(f"{implementation.name} refuses: {refusal.reason}")
    return implementation(*args, **kwargs)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "attn_implementation": "eager",
}
TOKENS = 11


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4))


def qwen2():
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def gemma2():
    settings = {"sliding_window": 4, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 20}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **settings))


FAMILIES = {
    "llama": (llama, {}),
    "mistral": (mistral, {"window": 4}),
    "qwen2": (qwen2, {}),
    "qwen3": (qwen3, {}),
    "gemma2": (gemma2, {"window": 4, "softcap": 1.5, "scale": 20**-0.5}),
}


class Layer:
    """What transformers' attention module saw and gave in one forward of a random model."""

    def __init__(self, build):
        torch.manual_seed(0)
        model = build().eval()
        self.module = model.model.layers[0].self_attn
        with torch.no_grad():
            for parameter in self.module.parameters():
                # Random biases and norms too: fresh ones are zeros and ones.
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        seen = {}

        def keep(module, args, kwargs, output):
            seen.update(kwargs, output=output[0])
            seen.setdefault("hidden_states", args[0] if args else None)

        handle = self.module.register_forward_hook(keep, with_kwargs=True)
        with torch.no_grad():
            model(torch.randint(0, 320, (1, TOKENS)))
        handle.remove()
        self.hidden = seen["hidden_states"][0]
        self.cos, self.sin = (angle[0] for angle in seen["position_embeddings"])
        self.output = seen["output"][0]

    def heads(self):
        """Query, key and value of every token, before rotation."""
        module = self.module
        query, key, value = (
            project(self.hidden).unflatten(-1, (-1, 8))
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        return query, key, value


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    build, settings = FAMILIES[request.param]
    return Layer(build), settings


@torch.no_grad()
@pytest.mark.parametrize("rotary", implementations("rotary"))
@pytest.mark.parametrize("prefill", implementations("prefill_attention"))
def test_prefilling_equals_the_familys_eager_attention(family, prefill, rotary):
    layer, settings = family
    query, key, value = layer.heads()
    query, key = accepted(rotary, query, key, layer.cos[:, :4], layer.sin[:, :4])
    starts, lengths = torch.tensor([0, TOKENS]).int(), torch.tensor([TOKENS]).int()
    out = accepted(prefill, query, key[None], value[None], starts, lengths, **settings)
    projected = layer.module.o_proj(out.flatten(1))
    torch.testing.assert_close(projected, layer.output, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("write", implementations("cache_write"))
@pytest.mark.parametrize("decode", implementations("decode_attention"))
def test_decoding_equals_the_familys_eager_attention(family, decode, write):
    layer, settings = family
    query, key, value = layer.heads()
    query, key = kernels.implementations("rotary")[-1](
        query, key, layer.cos[:, :4], layer.sin[:, :4]
    )
    caches = [torch.full((1, 16, 2, 8), float("nan")) for _ in range(2)]
    rows = []
    for token in range(TOKENS):
        one, lengths = slice(token, token + 1), torch.tensor([token + 1]).int()
        accepted(write, key[one], value[one], *caches, torch.tensor([token]))
        rows.append(accepted(decode, query[one], *caches, lengths, **settings))
    projected = layer.module.o_proj(torch.cat(rows).flatten(1))
    torch.testing.assert_close(projected, layer.output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", implementations("rms_norm"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_equals_llamas(norm, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(1)
    module = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    weight = torch.randn(576).to(dtype)
    module.weight.data.copy_(weight)
    x = torch.randn(5, 576).to(dtype)
    # Llama rounds to bfloat16 before it multiplies by the weight and linnet only after.
    rtol = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x, weight, eps=1e-5), module(x).detach(), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("activation", implementations("silu_mul"))
def test_silu_mul_equals_llamas_mlp(activation):
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(2)
    module = LlamaMLP(transformers.LlamaConfig(**SIZES))
    x = torch.randn(5, 64)
    with torch.no_grad():
        out = module.down_proj(activation(module.gate_proj(x), module.up_proj(x)))
        torch.testing.assert_close(out, module(x), rtol=1e-5, atol=1e-6)


SHAPES = [
    ([(12, 17), (6, 9), (3, 5), (2, 3)], 2, 50, 8, 32, 4),
    ([(20, 20), (10, 10), (5, 5)], 1, 300, 8, 32, 4),
    ([(12, 12)], 3, 30, 16, 16, 2),
    ([(1, 1), (1, 7)], 2, 5, 2, 8, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape[0])}-levels")
@pytest.mark.parametrize("deform", implementations("ms_deform_attn"))
def test_deformable_attention_equals_transformers_module(deform, shape):
    from transformers.models.deformable_detr.modeling_deformable_detr import (
        MultiScaleDeformableAttention,
    )

    levels, batch, queries, heads, channels, points = shape
    torch.manual_seed(3)
    value = torch.randn(batch, sum(h * w for h, w in levels), heads, channels)
    locations = torch.rand(batch, queries, heads, len(levels), points, 2) * 1.4 - 0.2
    weights = torch.rand(batch, queries, heads, len(levels), points)
    module = MultiScaleDeformableAttention()
    sizes = torch.tensor(levels)
    starts = (sizes.prod(1).cumsum(0) - sizes.prod(1)).long()
    expected = module(value, sizes, levels, starts, locations, weights, 64)
    out = accepted(deform, value, levels, locations, weights)
    if deform.name == "reference":
        assert torch.equal(out, expected)
        assert torch.equal(deform(value, sizes, locations, weights), expected)
    else:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-5)


def test_deformable_gradients_of_the_reference_equal_transformers_bit_by_bit():
    from transformers.models.deformable_detr.modeling_deformable_detr import (
        MultiScaleDeformableAttention,
    )

    levels = [(6, 9), (3, 5)]
    torch.manual_seed(4)
    leaves = [
        torch.randn(2, 69, 4, 8),
        torch.rand(2, 7, 4, 2, 3, 2),
        torch.rand(2, 7, 4, 2, 3),
    ]
    reference = kernels.implementations("ms_deform_attn")[-1]

    def gradients(call):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        call(*own).square().sum().backward()
        return [leaf.grad for leaf in own]

    ours = gradients(lambda value, places, weights: reference(value, levels, places, weights))
    sizes = torch.tensor(levels)
    starts = torch.tensor([0, 54])
    module = MultiScaleDeformableAttention()
    theirs = gradients(lambda v, p, w: module(v, sizes, levels, starts, p, w, 64))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
