"""`torch.compile`: one whole graph, one more for all other sizes, the eager numbers.

Most tests compile with a backend that counts graphs and runs them as they are; a few go through inductor.
"""

from __future__ import annotations

import pytest
import torch
from tests.compiling import Counter
from tests.tools.subjects import SUBJECTS, each_mode, each_side, each_subject, split_side
from torch import nn

row = pytest.mark.tool(
    order=5,
    tool="torch.compile",
    holds="`fullgraph=True`, with masks of all kinds, train and eval: one graph, one more for all other sizes, "
    "the eager numbers",
    torch="stacks read the values of a mask (pytorch#134616); a replaced `out_proj` is not called",
)
SIZES = ((3, 7, 5), (2, 11, 13), (5, 13, 7), (7, 5, 11))  # batch, L, S
SQUARE = {  # the word of a square mask, and of which input
    "MultiheadAttention": {},
    "TransformerEncoderLayer": {"src_mask": 0},
    "TransformerEncoder": {"mask": 0},
    "TransformerDecoderLayer": {"tgt_mask": 0},
    "TransformerDecoder": {"tgt_mask": 0},
    "Transformer": {"src_mask": 0, "tgt_mask": 1},
}
OBLONG = {"MultiheadAttention": "attn_mask", "TransformerDecoder": "memory_mask"}  # (L, S)
each_masked = pytest.mark.parametrize("subject", [SUBJECTS[name] for name in SQUARE], ids=list(SQUARE))


def hidden(queries, keys):
    """(queries, keys) bool, True = may not attend: the future and every fifth pair, never all of a row."""
    pairs = torch.arange(queries)[:, None] * 3 + torch.arange(keys)
    return ((pairs % 5 == 4) | torch.ones(queries, keys, dtype=torch.bool).triu(1)) & (torch.arange(keys) > 0)


def masks(subject, inputs, kind):
    """The keywords of all attention masks a subject takes: "bool" or "float", the latter no mere -inf and 0."""
    sizes = {word: (inputs[at].shape[1],) * 2 for word, at in SQUARE[subject.name].items()}
    if subject.name in OBLONG:
        sizes[OBLONG[subject.name]] = (inputs[0].shape[1], inputs[1].shape[1])
    made = {word: hidden(*size) for word, size in sizes.items()}
    if kind == "bool":
        return made
    return {word: torch.randn(mask.shape).masked_fill(mask, float("-inf")) for word, mask in made.items()}


def agree(got, want, tolerance=1e-4):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def run(model, call, inputs):
    """The output; in train mode the gradients of inputs and parameters too."""
    if not model.training:
        with torch.no_grad():
            return call(*inputs)
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    out = call(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    used = [*leaves, *model.parameters()]
    return out, *torch.autograd.grad((out * weights).sum(), used)


def count_graphs(model, subject, words_of, sizes=SIZES, **options):
    """Compile, call with each size, compare with eager, and count."""
    counter = Counter()
    options = {"backend": counter, "fullgraph": True} | options
    compiled = torch.compile(model, **options)
    for seed, (batch, L, S) in enumerate(sizes):
        inputs = subject.inputs(batch, seed=seed, L=L, S=S)
        words = words_of(inputs)
        want = run(model, lambda *x, words=words: subject.call(model, *x, **words), inputs)
        got = run(model, lambda *x, words=words: subject.call(compiled, *x, **words), inputs)
        agree(got, want)
    return len(counter.graphs)


@row
@each_masked
@split_side
def test_training_with_bool_masks(subject, side):
    assert count_graphs(subject.build(side), subject, lambda inputs: masks(subject, inputs, "bool")) <= 2


@row
@each_masked
@pytest.mark.parametrize("side", ["torch", "fused"])
def test_evaluation_with_float_masks(subject, side):
    model = subject.build(side).eval()
    assert count_graphs(model, subject, lambda inputs: masks(subject, inputs, "float")) <= 2


@row
@each_subject
@pytest.mark.parametrize("side", ["torch", "fused"])
def test_training_with_padding(subject, side):
    assert count_graphs(subject.build(side), subject, subject.hide) <= 2


@row
@each_subject
@split_side
def test_evaluation_with_padding(subject, side):
    assert count_graphs(subject.build(side).eval(), subject, subject.hide) <= 2


@row
@each_side
@each_mode
def test_weights(side, training):
    """Of the attention, averaged in train mode and of each head in eval, with all masks at once."""
    subject = SUBJECTS["MultiheadAttention"]
    model, counter = subject.build(side).train(training), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch, queries, keys in SIZES:
        inputs = subject.inputs(batch, L=queries, S=keys)
        words = {"average_attn_weights": training, **masks(subject, inputs, "bool"), **subject.hide(inputs)}
        with torch.set_grad_enabled(training):
            agree(compiled(*inputs, **words), model(*inputs, **words))
    assert len(counter.graphs) <= 2


@row
@each_side
def test_changing_kinds_of_masks(side):
    """A kind that was seen before compiles nothing anew."""
    subject = SUBJECTS["TransformerDecoder"]
    model, counter = subject.build(side).eval(), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    kinds = (lambda _: {}, subject.hide, lambda inputs: masks(subject, inputs, "float"))
    with torch.no_grad():
        for batch, queries, keys in SIZES:
            inputs = subject.inputs(batch, L=queries, S=keys)
            for words_of in kinds:
                words = words_of(inputs)
                agree(subject.call(compiled, *inputs, **words), subject.call(model, *inputs, **words))
    assert len(counter.graphs) <= len(kinds)


@row
@each_side
def test_sizes_marked_dynamic(side):
    """One graph from the start; `mark_dynamic` fails where a size became a constant."""
    subject = SUBJECTS["upgraded model"]
    model, counter = subject.build(side), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch, queries, keys in SIZES:
        inputs = subject.inputs(batch, L=queries, S=keys)
        words = subject.hide(inputs)
        for tensor in (*inputs, *words.values()):
            torch._dynamo.mark_dynamic(tensor, (0, 1))
        agree(subject.call(compiled, *inputs, **words), subject.call(model, *inputs, **words))
    assert len(counter.graphs) == 1


class Adapter(nn.Module):
    """A linear with something of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@row
@split_side
def test_a_replaced_linear(side):
    """An adapter in the place of the first layer's `out_proj` and `linear1` learns what it learns in eager mode."""
    subject = SUBJECTS["TransformerEncoder"]
    model = subject.build(side)
    first = model.layers[0]
    first.self_attn.out_proj, first.linear1 = Adapter(first.self_attn.out_proj), Adapter(first.linear1)
    assert count_graphs(model, subject, subject.hide) <= 2


@row
@each_side
def test_autocast_inside(side):
    """The compiled call has autocast's dtype and numbers."""
    subject = SUBJECTS["TransformerEncoder"]
    model, counter = subject.build(side), Counter()
    inputs = subject.inputs()

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return subject.call(model, *inputs, **subject.hide(inputs))

    with torch.autocast("cpu", torch.bfloat16):
        want = subject.call(model, *inputs, **subject.hide(inputs))
    got = compiled(*inputs)
    assert got.dtype == want.dtype
    agree(got, want, 2e-2)
    assert len(counter.graphs) == 1


@row
@each_side
def test_compiled_autograd(side):
    """The backward pass compiled too."""
    subject = SUBJECTS["TransformerEncoderLayer"]
    model, inputs = subject.build(side), subject.inputs()
    words = masks(subject, inputs, "bool")
    want = run(model, lambda *x: subject.call(model, *x, **words), inputs)[1:]
    compiled, counter = torch.compile(model, backend="aot_eager", fullgraph=True), Counter()
    leaf = inputs[0].clone().requires_grad_()
    out = subject.call(compiled, leaf, **words)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    assert counter.graphs
    agree((leaf.grad, *[parameter.grad for parameter in model.parameters()]), want)


@row
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("side", "name"),
    [("torch", "TransformerEncoder"), ("split", "TransformerEncoder"), ("fused", "TransformerDecoder")],
)
def test_inductor(name, side):
    """Real kernels, forward and backward, at two sizes."""
    subject = SUBJECTS[name]
    model = subject.build(side)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for batch, queries, keys in SIZES[:2]:
        inputs = subject.inputs(batch, L=queries, S=keys)
        words = {**masks(subject, inputs, "bool"), **subject.hide(inputs)}
        want = run(model, lambda *x, words=words: subject.call(model, *x, **words), inputs)
        got = run(model, lambda *x, words=words: subject.call(compiled, *x, **words), inputs)
        agree(got, want)
