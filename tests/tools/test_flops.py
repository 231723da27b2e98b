"""FLOPs as torch counts them, held against the formulas of each model's products."""

from __future__ import annotations

import pytest
import torch
from tests.tools.subjects import SUBJECTS, B, D, L, M, S, each_mode, each_side, each_subject
from torch.utils import flop_counter

from headwise.layers import packing, parts

row = pytest.mark.tool(
    order=8,
    tool="FlopCounterMode",
    holds="every product of the model is counted, those inside attention too, forward and backward, train and eval",
    torch="0 in eval; no kernel of attention on the CPU (pytorch#195460)",
)
# 2*m*n*k of each product. The backward of a linear is twice its forward; the fused kernel's computes the scores
# again, so it is 2.5 times, as torch's own formula for other devices has it; two products and a softmax: twice.


def attention(queries, keys):
    """(linears, inside) of one attention on B samples."""
    return B * D * D * (4 * queries + 4 * keys), 4 * B * queries * keys * D


def feed_forward(length):
    return 4 * B * length * D * M, 0


def sum_of(*parts):
    return tuple(map(sum, zip(*parts, strict=True)))


def encoder_layer(length):
    return sum_of(attention(length, length), feed_forward(length))


def decoder_layer(queries, keys):
    return sum_of(attention(queries, queries), attention(queries, keys), feed_forward(queries))


WORK = {  # (linears, inside attention), forward
    "MultiheadAttention": attention(L, S),
    "TransformerEncoderLayer": encoder_layer(L),
    "TransformerEncoder": sum_of(*[encoder_layer(L)] * 2),
    "TransformerDecoderLayer": decoder_layer(L, S),
    "TransformerDecoder": sum_of(*[decoder_layer(L, S)] * 2),
    "Transformer": sum_of(encoder_layer(S), decoder_layer(L, S)),
    "upgraded model": sum_of(
        (2 * B * L * 10 * D + 2 * B * 2 * D * 6, 0),  # what goes in and what comes out
        *[encoder_layer(L)] * 2,
        attention(2, L),
    ),
}


@pytest.fixture(autouse=True)
def _torch_alone(request, monkeypatch):
    """What headwise says of torch's operators when it is imported is not to torch's credit."""
    if request.getfixturevalue("side") == "torch":
        for operator in list(flop_counter.flop_registry):
            if "for_cpu" in str(operator):
                monkeypatch.delitem(flop_counter.flop_registry, operator)


def count(call):
    with flop_counter.FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


@row
@each_subject
@each_side
@each_mode
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_forward(subject, side, training, padded):
    # Frozen in eval: without gradients the counter itself stumbles over a module that is given a view of a Parameter
    model = subject.build(side).train(training).requires_grad_(training)
    inputs = subject.inputs()
    words = subject.hide(inputs) if padded else {}
    with torch.set_grad_enabled(training):
        counted, out = count(lambda: subject.call(model, *inputs, **words))
        want = subject.call(model, *inputs, **words)
    assert counted == sum(WORK[subject.name])
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


@row
@each_subject
@each_side
def test_backward(subject, side):
    """To the inputs and to all parameters: both products of each linear's backward."""
    model = subject.build(side)
    inputs = tuple(x.requires_grad_() for x in subject.inputs())
    out = subject.call(model, *inputs)
    weights = torch.randn_like(out)
    counted, _ = count(lambda: out.backward(weights))
    linears, inside = WORK[subject.name]
    assert counted == 2 * linears + inside * 5 // 2


@row
@each_side
@each_mode
@pytest.mark.parametrize("average", [True, False], ids=["averaged", "each head"])
def test_with_weights(side, training, average):
    """Where the weights are returned the same two products are computed in the open."""
    subject = SUBJECTS["MultiheadAttention"]
    model = subject.build(side).train(training)
    inputs = tuple(x.requires_grad_(training) for x in subject.inputs())
    with torch.set_grad_enabled(training):
        counted, (out, weights) = count(lambda: model(*inputs, need_weights=True, average_attn_weights=average))
    linears, inside = WORK[subject.name]
    assert counted == linears + inside
    if training:
        both = (out, weights)
        counted, _ = count(lambda: torch.autograd.backward(both, [torch.ones_like(one) for one in both]))
        assert counted == 2 * (linears + inside)


@row
@each_side
@each_mode
def test_padding_that_would_be_skipped(side, training, monkeypatch):
    """So long a batch runs packed in an ordinary call of ours; the counter sees it as it came, padding and all."""
    subject, long = SUBJECTS["TransformerEncoderLayer"], 1499
    model = subject.build(side).train(training)
    inputs = subject.inputs(L=long)
    padding = torch.arange(long) >= torch.tensor([long, 17, 5])[:, None]
    words = {"src_key_padding_mask": padding}
    if side != "torch":
        words["query_padding_mask"] = padding
        packed = []

        def find(*args):
            packed.append(packing.find_packing(*args))
            return packed[-1]

        monkeypatch.setattr(parts, "find_packing", find)
    with torch.set_grad_enabled(training):
        counted, out = count(lambda: subject.call(model, *inputs, **words))
        want = subject.call(model, *inputs, **words)
    if side != "torch":
        assert [found is None for found in packed] == [True, False]
    assert counted == sum(encoder_layer(long))
    torch.testing.assert_close(out[~padding], want[~padding], rtol=1e-4, atol=1e-4)
