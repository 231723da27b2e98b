"""`Int8Linear` against its state's float arithmetic, and what a layer in the wild goes through."""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading

import pytest
import torch
from torch import nn

import headwise
from headwise.quant import Int8Linear, make_state
from headwise.quant import backends as backends_module
from headwise.quant.backends import BACKENDS, X86

HERE = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without fbgemm")
KINDS = pytest.mark.parametrize("input_range", [None, (-4.0, 5.0)], ids=["dynamic", "static"])


def layer_and_state(N=13, K=29, bias=True, input_range=None):
    state = make_state(torch.randn(N, K), torch.randn(N) if bias else None, input_range)
    return Int8Linear.of(state), state


def close(got, want, state, x):
    """Equal but for inputs on the border between two levels: one step of one of them."""
    scale = state.input_scale or (x.amax() - x.amin()).item() / 255
    step = scale * state.weights().abs().amax()
    assert got.shape == want.shape
    assert ((got - want).abs() <= 3 * step + 1e-4 * want.abs().amax()).all()
    assert ((got - want).abs() > 0.2 * step).float().mean() < 0.02


@HERE
@KINDS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 29), (2, 3, 29), (2, 1, 5, 29), (97, 29), (0, 29), (3, 0, 29), (29,)])
def test_against_float_arithmetic(shape, bias, input_range):
    layer, state = layer_and_state(bias=bias, input_range=input_range)
    x = torch.randn(shape)
    got = layer(x)
    assert got.shape == (*shape[:-1], 13)
    if x.numel():
        close(got, state.reference(x), state, x)


@HERE
@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e-5, 1e-3, 1.0, 1e4, 1e15, 1e25, 1e35])
def test_every_magnitude_keeps_eight_bits(size, rows):
    layer, state = layer_and_state(N=16, K=64, bias=False)
    x = torch.randn(rows, 64) * size
    want = nn.functional.linear(x.double(), state.weights().double())
    assert (layer(x).double() - want).norm() / want.norm() < 0.02


@HERE
@KINDS
@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_no_numbers(bad, rows, input_range):
    layer, state = layer_and_state(input_range=input_range)
    x = torch.randn(rows, 29)
    x[2, 5] = bad
    got, want = layer(x), state.reference(x)
    assert got[2].isnan().all()
    others = [row for row in range(rows) if row != 2]
    assert got[others].isfinite().all()
    close(got[others], want[others], state, x[others])


@HERE
@KINDS
def test_together_is_each_alone(input_range):
    layers = [
        Int8Linear.of(make_state(torch.randn(n, 29), b, input_range)) for n, b in ((8, torch.randn(8)), (4, None))
    ]
    for rows in (2, 100):
        x = torch.randn(rows, 29)
        joined = Int8Linear.together(layers, x)
        for one, layer in zip(joined, layers, strict=True):
            torch.testing.assert_close(one, layer(x), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_together():
    one, _ = layer_and_state(input_range=(-1.0, 1.0))
    other, _ = layer_and_state(input_range=(-2.0, 1.0))
    dynamic, _ = layer_and_state()
    x = torch.randn(3, 29)
    for layers in ([one, other], [one, dynamic], [dynamic, one], [one, nn.Linear(29, 3)]):
        assert Int8Linear.together(layers, x) is None
    one.backend = "reference"
    assert Int8Linear.together([one, one], x) is None


@HERE
@KINDS
def test_packed_weights_follow_the_buffers(input_range):
    layer, _ = layer_and_state(input_range=input_range)
    other, _ = layer_and_state(input_range=(-3.0, 3.0) if input_range else None)
    x = torch.randn(3, 29)
    layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))
    layer.int_weight.zero_()
    with torch.no_grad():
        assert layer(x).std(0).max() == 0  # the bias alone
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(x), other(x))


@HERE
@KINDS
def test_copies_and_files(input_range):
    layer, _ = layer_and_state(input_range=input_range)
    x = torch.randn(3, 29)
    want = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), want)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), want)
    # Weights are stored once, and as int8
    assert sum(t.numel() * t.element_size() for t in layer.state_dict().values()) < 13 * 29 + 13 * 8 + 16
    assert not list(layer.parameters())


@HERE
def test_made_in_inference_mode():
    with torch.inference_mode():
        layer, state = layer_and_state(input_range=(-4.0, 4.0))
        x = torch.randn(3, 29)
        close(layer(x), state.reference(x), state, x)
    close(layer(x), state.reference(x), state, x)


@HERE
def test_several_threads_on_one_layer():
    layer, _ = layer_and_state(N=64, K=64)
    x = torch.randn(70, 64)
    want, got = copy.deepcopy(layer)(x), []
    threads = [threading.Thread(target=lambda: got.append(layer(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert all(torch.equal(one, want) for one in got)


@HERE
def test_torchs_engine_stays():
    before = torch.backends.quantized.engine
    layer, _ = layer_and_state()
    for rows in (1, 100):
        layer(torch.randn(rows, 29))
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("x", [torch.randn(3, 28), torch.randn(3, 29).double(), torch.randn(3, 29).bfloat16(), None])
def test_wrong_input(x):
    layer, _ = layer_and_state()
    with pytest.raises(ValueError, match=r"^Int8Linear: input must be float32 and 29 wide"):
        layer(x)


def test_gradients_are_refused():
    layer, _ = layer_and_state()
    x = torch.randn(3, 29, requires_grad=True)
    with pytest.raises(ValueError, match=r"train with headwise\.prepare_qat, or call under torch\.no_grad"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (3, 13)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, on jvp
@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_transforms_that_ask_for_gradients_are_refused(way):
    layer, _ = layer_and_state()
    x = torch.randn(3, 29)
    ways = {
        "grad": lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
    }
    with pytest.raises(ValueError, match="ask for no gradient, int8 has none"):
        ways[way]()
    assert torch.func.vmap(layer)(x[:, None]).shape == (3, 1, 13)


@HERE
@KINDS
def test_loaded_in_inference_mode(input_range):
    with torch.inference_mode():
        layer, _ = layer_and_state(input_range=input_range)
        other, _ = layer_and_state(input_range=input_range)
        x = torch.randn(3, 29)
        layer(x)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x), other(x))


@HERE
@KINDS
@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_scales_stay_float32(change, input_range):
    layer, _ = layer_and_state(input_range=input_range)
    layer = Int8Linear.of(make_state(1e-6 * layer.state.weights(), None, input_range))
    x = torch.randn(3, 29)
    want = layer(x)
    getattr(layer, change)()
    assert torch.equal(layer(x), want)
    with pytest.raises(ValueError, match="be float32 and 29 wide"):
        layer(getattr(x, change)())


@KINDS
@pytest.mark.parametrize("backend", [None, "reference"])
def test_without_an_input_the_bias_comes_out(backend, input_range):
    state = make_state(torch.randn(3, 0), torch.tensor([1.0, 2.0, 3.0]), input_range)
    layer = Int8Linear.of(state)
    layer.backend = backend
    torch.testing.assert_close(layer(torch.randn(2, 0)), torch.tensor([[1.0, 2.0, 3.0]] * 2))


@HERE
@KINDS
def test_one_row_is_the_same_with_and_without_a_batch(input_range):
    layer, _ = layer_and_state(input_range=input_range)
    x = torch.randn(29)
    assert torch.equal(layer(x), layer(x[None])[0])
    assert torch.equal(layer(input=x), layer(x))


@HERE
def test_many_lengths_are_few_sizes(monkeypatch):
    """oneDNN compiles for each number of rows; what is added does not change the numbers."""
    monkeypatch.setattr(backends_module, "_MUCH_WORK", 0)
    layer, state = layer_and_state(N=16, K=32)
    layer(torch.randn(64, 32))
    held = layer._kept.get((1, "onednn"))
    if held is None:
        pytest.skip("without oneDNN or VNNI")
    sizes, dynamic = set(), held.packed.dynamic

    def noted(x, *rest):
        sizes.add(x.shape[0])
        return dynamic(x, *rest)

    layer._kept[1, "onednn"] = held._replace(packed=held.packed._replace(dynamic=noted))
    for rows in range(64, 512, 3):
        x = torch.randn(rows, 32)
        close(layer(x), state.reference(x), state, x)
    assert len(sizes) <= 25
    assert layer(torch.randn(5, 13, 32)).shape == (5, 13, 16)


def test_names_of_backends():
    layer, _ = layer_and_state()
    for name in ("x86", None, "reference"):
        layer.backend = name
    with pytest.raises(ValueError, match="backend must be 'x86' or 'reference', or None; got 'refrence'"):
        layer.backend = "refrence"
    assert layer.backend == "reference"


def test_sparse_input():
    layer, _ = layer_and_state()
    with pytest.raises(ValueError, match=r"be dense; x.to_dense\(\)"):
        layer(torch.randn(3, 29).to_sparse())


def test_foreign_buffers_stay():
    linear = nn.Linear(3, 2)
    linear.register_buffer("gain", torch.tensor(2.0))
    linear.register_forward_hook(lambda module, given, out: out * module.gain)
    small, x = headwise.quantize(linear), torch.randn(4, 3)
    with torch.no_grad():
        torch.testing.assert_close(small(x), linear(x), rtol=0.05, atol=0.05)
    assert "gain" in small.state_dict()


@HERE
def test_pickled_after_compile():
    layer, _ = layer_and_state()
    layer.compile(backend="eager")
    x = torch.randn(3, 29)
    again = pickle.loads(pickle.dumps(layer))
    assert again(x).shape == (3, 13)


@KINDS
def test_graphs_with_free_sizes(input_range):
    layer, state = layer_and_state(input_range=input_range)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(layer, (torch.randn(4, 29),), dynamic_shapes=({0: batch},)).module()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for rows in (3, 7):
        x = torch.randn(rows, 29)
        torch.testing.assert_close(exported(x), state.reference(x))
        torch.testing.assert_close(compiled(x), state.reference(x))


def test_no_weight_to_read():
    layer, _ = layer_and_state()
    with pytest.raises(AttributeError, match="Int8Linear has no weight: int_weight and weight_scale"):
        layer.weight  # noqa: B018
    with pytest.raises(AttributeError, match="Int8Linear has no weight: int_weight and weight_scale"):
        layer.weight = nn.Parameter(torch.randn(13, 29))
    assert repr(layer) == "Int8Linear(29, 13, dynamic)"


def test_without_fbgemm(monkeypatch):
    layer, state = layer_and_state()
    monkeypatch.setattr(type(X86), "why_not", lambda *_: "torch has no fbgemm here, only qnnpack")
    x = torch.randn(3, 29)
    with pytest.raises(
        ValueError, match=r"x86, but torch has no fbgemm here, only qnnpack \(layer.backend = 'reference'"
    ):
        layer(x)
    layer.backend = "reference"
    assert torch.equal(layer(x), state.reference(x))


def test_without_vnni(monkeypatch):
    monkeypatch.setattr(backends_module, "has_vnni", lambda: False)
    full, small = (make_state(torch.randn(4, 9), None, (-1.0, 1.0), reduce_range=r) for r in (False, True))
    why = X86.why_not(full, torch.device("cpu"))
    assert "no VNNI" in why
    assert "overflow at weights of 127 (quantize with reduce_range=True)" in why
    assert X86.why_not(small, torch.device("cpu")) == ""
    assert X86.why_not(make_state(torch.randn(4, 9), None), torch.device("cpu")) == ""  # dynamic: 7 bits
    assert "it runs on the CPU" in X86.why_not(small, torch.device("meta"))


def test_another_device():
    layer, _ = layer_and_state()
    assert layer.to("meta")(torch.randn(3, 29, device="meta")).shape == (3, 13)


@KINDS
def test_compiled_and_exported_are_float_arithmetic(input_range):
    layer, state = layer_and_state(input_range=input_range)
    x = torch.randn(3, 29)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), state.reference(x))
    assert {backend.name for backend in BACKENDS} == {"x86", "reference"}


@pytest.mark.parametrize("kind", [headwise.MultiheadAttention, nn.MultiheadAttention])
def test_projections_are_one_product_where_inputs_are_one(kind, monkeypatch):
    attention = headwise.quantize(kind(32, 4, batch_first=True))
    calls = []
    together = Int8Linear.together
    monkeypatch.setattr(Int8Linear, "together", staticmethod(lambda c, x: calls.append(len(c)) or together(c, x)))
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    with torch.no_grad():
        own = attention(x, x, x, need_weights=False)[0]
        assert calls == [3]
        apart = attention(x, x.clone(), x.clone(), need_weights=False)[0]
        attention(x, memory, memory, need_weights=False)
    assert calls == [3]
    torch.testing.assert_close(own, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_nested_samples_are_as_alone(static):
    block = headwise.EncoderBlock(32, 4).eval()
    samples = [torch.randn(n, 32) for n in (5, 2, 7)]
    small = headwise.quantize(block, samples if static else None)
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged)
    with torch.no_grad():
        for got, sample in zip(small(nested).unbind(), samples, strict=True):
            torch.testing.assert_close(got, small(sample), rtol=0, atol=1e-4 if static else 0.05)


def test_hooked_projections_are_called():
    attention = headwise.quantize(headwise.MultiheadAttention(32, 4, batch_first=True))
    x, seen = torch.randn(2, 5, 32), []
    with torch.no_grad():
        want = attention(x, x, x)[0]
        attention.v_proj.register_forward_hook(lambda module, given, out: seen.append(out.shape))
        got = attention(x, x, x)[0]
    assert seen == [(2, 5, 32)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@KINDS
def test_bias_is_float(input_range):
    layer, state = layer_and_state(input_range=input_range)
    assert torch.equal(layer.bias, state.biases())
    without, _ = layer_and_state(bias=False, input_range=input_range)
    assert without.bias is None
