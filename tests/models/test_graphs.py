"""Recording the decoder: torch.export, torch.compile, and inference without gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from linnet.models import Decoder, load
from linnet.models.cache import Generics

CLOSE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture
def model(make_reference: Callable[..., Any], save: Callable[..., Path]) -> Decoder:
    return load(save(make_reference("mistral", sliding_window=6)), generics={"MaxSeq": 32})


def some(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 320, (batch, length), generator=torch.Generator().manual_seed(length))


def test_export_has_portable_operations_and_every_size(model: Decoder):
    dynamic = {"tokens": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}}
    program = torch.export.export(model, (some(2, 7),), dynamic_shapes=dynamic)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [target for target in targets if "linnet" in target or "mkldnn" in target]
    for batch, length in ((1, 2), (2, 7), (3, 20), (5, 33)):
        ids = some(batch, length)
        torch.testing.assert_close(program.module()(ids), model(ids), **CLOSE)


def test_an_exported_program_holds_each_weight_once(model: Decoder):
    program = torch.export.export(model, (some(2, 7),))
    held = sum(tensor.numel() for tensor in program.state_dict.values())
    held += sum(tensor.numel() for tensor in program.constants.values())
    own = sum(parameter.numel() for parameter in model.parameters())
    assert own <= held < own + 1000


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_traced_model_gives_the_same(model: Decoder):
    ids = some(2, 9)
    traced = torch.jit.trace(model, (ids,))
    torch.testing.assert_close(traced(ids), model(ids), **CLOSE)


def test_compiled_decoding_gives_the_same_and_compiles_once(model: Decoder):
    torch.compiler.reset()
    counted = CompileCounter()
    decode = torch.compile(model.decode, backend=counted, fullgraph=True)
    ids = some(1, 12)[0]
    expected = model(ids[None])[0]
    # Made beforehand: a cache that appears in the first call is a change that compiles anew.
    assert model.cache.rows
    with torch.inference_mode():
        for place, token in enumerate(ids):
            logits = decode(token.view(1, 1), torch.tensor([place]))
            torch.testing.assert_close(logits[0], expected[place], **CLOSE)
    assert counted.frame_count == 1


def test_loading_compiled_gives_the_same(
    make_reference: Callable[..., Any], save: Callable[..., Path]
):
    torch.compiler.reset()
    folder = save(make_reference())
    model, plain = load(folder, compile="aot_eager"), load(folder)
    ids = some(2, 7)
    torch.testing.assert_close(model(ids), plain(ids), **CLOSE)
    step = (torch.tensor([[3]]), torch.tensor([0]))
    torch.testing.assert_close(model.decode(*step), plain.decode(*step), **CLOSE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_cache_outlives_the_mode_that_made_it(model: Decoder, mode: Callable[[], Any]):
    ids = some(1, 6)[0]
    expected = model(ids[None])[0]
    with mode():
        model.decode(ids[0].view(1, 1), torch.tensor([0]))
    for place in range(1, 6):
        with torch.inference_mode(place % 2 == 0):
            logits = model.decode(ids[place].view(1, 1), torch.tensor([place]))
    torch.testing.assert_close(logits[0], expected[5], **CLOSE)


def test_autocast_runs_products_in_the_lower_dtype(model: Decoder):
    ids = some(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(ids), rtol=0.1, atol=0.1)


def test_no_entry_reads_anything_on_the_host(model: Decoder):
    # A tensor on the meta device has no values: whoever asks for one fails.
    model.generics = Generics(model.config, {"Batch": 2, "MaxSeq": 32})
    model.to("meta")

    def some(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    pack, step = [some(9)] * 4, [some(2, 1), some(2)]
    with torch.inference_mode():
        assert model.decode(*step).shape == (2, 320)
        assert model.prefill_slots(some(2, 5), some(2), some(2)).shape == (2, 320)
        assert model.prefill_packed(*pack, some(2)).shape == (2, 320)
        assert model.step_packed(*pack, some(2), *step).shape == (4, 320)
        model.reset()
        model.generics = Generics(model.config, {"MaxSeq": 32, "PageSize": 8})
        table = some(3, 4).int()
        rows, steps = [some(9)] * 4, [some(3, 1), some(3)]
        assert model.decode_paged(*steps, table).shape == (3, 320)
        assert model.prefill_paged(*rows, some(3), table).shape == (3, 320)
        assert model.step_paged(*rows, some(3), *steps, table).shape == (6, 320)
