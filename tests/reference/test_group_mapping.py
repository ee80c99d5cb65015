"""Each kv head serves neighbouring query heads, 0,0,1,1 and not 0,1,0,1 (onnx/onnx#7274)."""

import io

import pytest
import torch

import linnet.kernels as kernels
from linnet import reference

EXPECTED = [0.0, 0.0, 1.0, 1.0]


@pytest.fixture
def call():
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 4, 16, generator=generator)
    key = torch.randn(1, 6, 2, 16, generator=generator)
    value = torch.arange(2.0).reshape(1, 1, 2, 1).expand(1, 6, 2, 16).contiguous()
    return query, key, value, torch.tensor([5], dtype=torch.int32)


def heads_of(out):
    assert bool((out == out[..., :1]).all())
    return out[0, :, 0].tolist()


def test_decoding_from_rows(decode, call):
    torch.testing.assert_close(heads_of(decode(*call)), EXPECTED, rtol=0, atol=1e-6)


def test_decoding_from_pages(decode, call):
    query, key, value, lengths = call
    pages = [cache.reshape(3, 2, 2, 16) for cache in (key, value)]
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    out = decode(query, *pages, lengths, table=table)
    torch.testing.assert_close(heads_of(out), EXPECTED, rtol=0, atol=1e-6)


def test_prefilling(prefill, call):
    query, key, value, lengths = call
    out = prefill(query.expand(3, -1, -1), key, value, torch.tensor([0, 3]).int(), lengths)
    for token in out:
        torch.testing.assert_close(heads_of(token[None]), EXPECTED, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dynamo", [True, False])
def test_an_onnx_file(call, dynamo, tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")

    class Decode(torch.nn.Module):
        def forward(self, query, key, value, lengths):
            return reference.decode_attention(query, key, value, lengths)

    if dynamo:
        program = torch.onnx.export(Decode().eval(), call, dynamo=True, verbose=False)
        file = tmp_path / "decode.onnx"
        program.save(str(file))
        data = file.read_bytes()
    else:
        buffer = io.BytesIO()
        torch.onnx.export(Decode().eval(), call, buffer, dynamo=False)
        data = buffer.getvalue()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, call, strict=True)}
    out = torch.as_tensor(session.run(None, feed)[0])
    torch.testing.assert_close(heads_of(out), EXPECTED, rtol=0, atol=1e-6)


def test_six_query_heads_over_four_are_refused(call):
    cache = torch.zeros(1, 6, 4, 16)
    with pytest.raises(ValueError, match="6 query heads do not divide among 4 kv heads"):
        kernels.decode_attention(torch.zeros(1, 6, 16), cache, cache, call[3])
    with pytest.raises(ValueError, match="6 query heads do not divide among 4 kv heads"):
        kernels.prefill_attention(
            torch.zeros(2, 6, 16), cache, cache, torch.tensor([0, 2]).int(), call[3]
        )
