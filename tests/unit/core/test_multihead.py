"""The module around the projections: dropout as a child, `attend` as a window, defaults, repr, torch's own layers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import MultiheadAttention, attention_weights, masks
from headwise.core import reference

D, H, B, L, S, KDIM, VDIM = 15, 3, 2, 7, 11, 13, 17
LAYOUTS = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
NEED_WEIGHTS = pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])


def made(fused: bool = False, **flags: Any) -> MultiheadAttention:
    module = MultiheadAttention(D, H, fused_qkv=fused, **{"batch_first": True, **flags})
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return module


def heads_of(module: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    state = module.state_dict()
    parts = zip(state["in_proj_weight"].chunk(3), state["in_proj_bias"].chunk(3), (x, y, y), strict=True)
    return [(t @ w.T + b).unflatten(-1, (H, D // H)).transpose(1, 2) for w, b, t in parts]


def by_hand(module: Any, x: Tensor, y: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and weights per head, from the module's state; `factor` multiplies the weights, as dropout does."""
    state = module.state_dict()
    out, weights = reference.attention(*heads_of(module, x, y), factor=factor)
    out = out.transpose(1, 2).flatten(2) @ state["out_proj.weight"].double().T + state["out_proj.bias"].double()
    return out.float(), weights.float()


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-4, atol=2e-5)


# --- Dropout ------------------------------------------------------------------------------------------------------


def test_dropout_is_the_childs() -> None:
    module = made(dropout=0.25)
    assert module.dropout == module.attn_dropout.p == 0.25
    module.dropout = 0.5
    assert module.attn_dropout.p == 0.5
    module.attn_dropout.p = 0.125
    assert module.dropout == 0.125
    module.attn_dropout = nn.Dropout(0.75)
    assert module.dropout == 0.75


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_dropout_outside_its_range_raises(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\]"):
        made(dropout=wrong)
    module = made(dropout=0.25)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\]"):
        module.dropout = wrong
    assert module.dropout == 0.25


def test_dropout_of_a_child_without_probability() -> None:
    """Setting it there would be read back, and drop nothing."""
    module = made(dropout=0.5)
    module.attn_dropout = nn.Identity()
    assert module.dropout is None
    with pytest.raises((ValueError, AttributeError)):
        module.dropout = 0.5
    assert module.dropout is None


@LAYOUTS
@NEED_WEIGHTS
@pytest.mark.parametrize("child", [True, False], ids=["child trains", "child evals"])
@pytest.mark.parametrize("parent", [True, False], ids=["parent trains", "parent evals"])
def test_the_childs_own_training_flag_decides(fused: bool, need_weights: bool, child: bool, parent: bool) -> None:
    """Monte Carlo dropout: the model in eval, its dropouts in train."""
    module, x = made(fused, dropout=0.5).train(parent), torch.randn(B, L, D)
    module.attn_dropout.train(child)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            outs = [module(x, x, x, need_weights=need_weights)[0] for _ in range(2)]
        assert torch.equal(*outs) != child
        assert close(outs[0], by_hand(module, x, x)[0]) != child


@NEED_WEIGHTS
@TRAINING
def test_dropout_of_1_leaves_the_output_bias(need_weights: bool, training: bool) -> None:
    module, x = made(dropout=1.0).train(training), torch.randn(B, L, D)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, weights = module(x, x, x, need_weights=need_weights)
        expected, whole = by_hand(module, x, x)
        assert close(out, module.out_proj.bias.expand_as(out) if training else expected)
        assert weights is None or close(weights, whole.mean(dim=1))


@NEED_WEIGHTS
@pytest.mark.parametrize("average", [True, False])
def test_weights_are_from_before_dropout_which_is_right_on_average(need_weights: bool, average: bool) -> None:
    module, x = made(dropout=0.25), torch.randn(B, L, D)
    expected, whole = by_hand(module, x, x)
    outs = []
    with torch.no_grad():
        for _ in range(400):
            out, weights = module(x, x, x, need_weights=need_weights, average_attn_weights=average)
            outs.append(out)
            assert weights is None or close(weights, whole.mean(dim=1) if average else whole)
    stacked = torch.stack(outs)
    error = (stacked.mean(dim=0) - expected) / (stacked.std(dim=0) / 20)
    assert error.abs().max() < 5


# --- The dropout child hooked or replaced -------------------------------------------------------------------------


@LAYOUTS
@TRAINING
@NEED_WEIGHTS
@pytest.mark.parametrize("grad", [True, False])
def test_a_hooked_dropout_is_called_on_the_weights(fused: bool, training: bool, need_weights: bool, grad: bool) -> None:
    module, x, y = made(fused, dropout=0.0).train(training), torch.randn(B, L, D), torch.randn(B, S, D)
    module(x, y, y, need_weights=need_weights)
    factor, seen = torch.rand(B, H, L, S), []

    def hook(child: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        seen.append(args[0].detach())
        return out * factor

    handle = module.attn_dropout.register_forward_hook(hook)
    with torch.set_grad_enabled(grad):
        out, weights = module(x, y, y, need_weights=need_weights)
    expected, whole = by_hand(module, x, y, factor)
    assert close(out, expected)
    assert [tuple(t.shape) for t in seen] == [(B, H, L, S)]
    assert close(seen[0], whole)
    assert weights is None or close(weights, whole.mean(dim=1))
    handle.remove()
    assert close(module(x, y, y, need_weights=need_weights)[0], by_hand(module, x, y)[0])


class Halved(nn.Module):
    def forward(self, weights: Tensor) -> Tensor:
        assert weights.shape[1] == H
        return weights / 2


class OwnDropout(nn.Dropout):
    def forward(self, weights: Tensor) -> Tensor:
        return weights / 2


@TRAINING
@NEED_WEIGHTS
@pytest.mark.parametrize("child", [Halved(), OwnDropout(0.9), nn.Identity(), nn.Sequential(nn.Identity(), Halved())])
def test_a_replaced_dropout_is_called(training: bool, need_weights: bool, child: nn.Module) -> None:
    module, x = made(dropout=0.9).train(training), torch.randn(B, L, D)
    module.attn_dropout = child.train(training)
    expected = by_hand(module, x, x, torch.tensor(1.0 if isinstance(child, nn.Identity) else 0.5))[0]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert close(module(x, x, x, need_weights=need_weights)[0], expected)


def test_a_patched_dropout_is_called() -> None:
    module, x = made(dropout=0.9).eval(), torch.randn(B, L, D)
    module.attn_dropout.forward = lambda weights: weights / 2
    assert close(module(x, x, x, need_weights=False)[0], by_hand(module, x, x, torch.tensor(0.5))[0])


@pytest.mark.parametrize("kind", ["hooked", "replaced"])
def test_gradients_through_a_called_dropout(kind: str) -> None:
    module, x = made(), torch.randn(B, L, D)
    twin = copy.deepcopy(module)
    if kind == "hooked":
        module.attn_dropout.register_full_backward_hook(lambda *_: None)
    else:
        module.attn_dropout = nn.Identity()
    for m in (module, twin):
        m(x, x, x, need_weights=False)[0].square().sum().backward()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


# --- `attend` -----------------------------------------------------------------------------------------------------


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": torch.arange(L) >= torch.tensor([[L], [3]])},
    "attn_mask": {"attn_mask": torch.ones(L, L).triu(2).bool()},
    "bias": {"attn_mask": torch.linspace(-1, 1, L * L).view(L, L)},
    "mask": {"mask": masks.window(2, 1)},
    "all": {
        "is_causal": True,
        "key_padding_mask": torch.arange(L) >= torch.tensor([[L], [3]]),
        "mask": masks.window(2, 1),
    },
}


@LAYOUTS
@TRAINING
@pytest.mark.parametrize("flags", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "bias_kv"])
@pytest.mark.parametrize("masked", MASKS.values(), ids=MASKS.keys())
def test_attend_shows_what_the_weights_come_from(fused: bool, training: bool, flags: Any, masked: Any) -> None:
    module, x, seen = made(fused, dropout=0.3, **flags).train(training), torch.randn(B, L, D), []
    module.attend.register_forward_pre_hook(lambda child, args: seen.append(args[:4]))
    for grad, need_weights in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            module(x, x, x, need_weights=need_weights, **masked)
    with torch.no_grad():
        weights = module(x, x, x, average_attn_weights=False, **masked)[1]
    keys = L + 2 * bool(flags)
    assert len(seen) == 5
    for query, key, value, mask in seen:
        assert query.shape == (B, H, L, D // H)
        assert key.shape == value.shape == (B, H, keys, D // H)
        assert mask is None or isinstance(mask, masks.Mask)
        assert close(attention_weights(query, key, mask=mask).detach(), weights)
    for ours, theirs in zip(seen[-1][:3], heads_of(module, x, x), strict=True):
        assert close(ours[:, :, :L], theirs)
    assert any(hidden in str(sorted(masked)) for hidden in ("causal", "mask")) == (seen[0][3] is not None)


def test_attend_has_no_parameters_and_no_state() -> None:
    module = made()
    assert not list(module.attend.parameters())
    assert not list(module.attend.state_dict())
    assert [name for name, _ in module.named_children()] == [
        *("q_proj", "k_proj", "v_proj", "out_proj"),
        *("attn_dropout", "attend"),
    ]


@LAYOUTS
@TRAINING
@NEED_WEIGHTS
def test_a_replaced_or_patched_attend_is_called(fused: bool, training: bool, need_weights: bool) -> None:
    module, x = made(fused).train(training), torch.randn(B, L, D)
    original = module.attend.forward

    class Attended(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = original(*args, **kwargs)
            return 0 * out, weights

    twin = copy.deepcopy(module)
    twin.attend.forward = Attended().forward
    module.attend = Attended()
    for m in (module, twin):
        out = m(x, x, x, need_weights=need_weights)[0]
        assert close(out, m.out_proj.bias.expand_as(out))


@NEED_WEIGHTS
def test_a_hook_on_attend_may_change_its_result(need_weights: bool) -> None:
    module, x = made().eval(), torch.randn(B, L, D)
    module.attend.register_forward_hook(lambda child, args, result: (result[0] * 0, result[1]))
    out = module(x, x, x, need_weights=need_weights)[0]
    assert close(out, module.out_proj.bias.expand_as(out))


# --- Defaults, layouts, repr --------------------------------------------------------------------------------------


def test_the_constructors_default_of_averaging() -> None:
    x = torch.randn(B, L, D)
    for default in (True, False):
        module = made(average_attn_weights=default)
        whole = by_hand(module, x, x)[1]
        for given in (None, True, False):
            weights = module(x, x, x, average_attn_weights=given)[1]
            average = default if given is None else given
            assert close(weights, whole.mean(dim=1) if average else whole)
        assert module(x, x, x, need_weights=False)[1] is None
        module.average_attn_weights = not default
        assert module(x, x, x)[1].dim() == (4 if default else 3)


@LAYOUTS
@pytest.mark.parametrize("flags", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": KDIM, "vdim": VDIM}])
@pytest.mark.parametrize("average", [True, False])
def test_batch_first_length_first_and_unbatched_agree(fused: bool, flags: dict[str, Any], average: bool) -> None:
    first = made(fused, **flags)
    second = made(fused, batch_first=False, **flags)
    second.load_state_dict(first.state_dict())
    calls = [[torch.randn(B, L, D), torch.randn(B, S, first.kdim), torch.randn(B, S, first.vdim)]]
    if not flags.get("kdim"):
        calls += [[calls[0][0]] * 3, [calls[0][0], calls[0][1], calls[0][1]]]
    for call, grad, masked in itertools.product(calls, (True, False), (True, False)):
        lengths = torch.tensor([[call[1].shape[1]], [3]])
        padding = torch.arange(call[1].shape[1]) >= lengths if masked else None
        kept = {id(t): t.transpose(0, 1) for t in call}
        turned = [kept[id(t)] for t in call]  # the same object where it was the same
        with torch.set_grad_enabled(grad):
            out, weights = first(*call, padding, average_attn_weights=average)
            out_2, weights_2 = second(*turned, padding, average_attn_weights=average)
            assert close(out_2.transpose(0, 1), out)
            assert close(weights_2, weights)
            assert close(first(*call, padding, need_weights=False)[0], out)
            assert close(second(*turned, padding, need_weights=False)[0].transpose(0, 1), out)
            for module, sample in itertools.product((first, second), range(B)):
                kept = {id(t): t[sample] for t in call}
                alone = [kept[id(t)] for t in call]
                hidden = None if padding is None else padding[sample]
                out_1, weights_1 = module(*alone, hidden, average_attn_weights=average)
                assert close(out_1, out[sample])
                assert close(weights_1, weights[sample])
                assert close(module(*alone, hidden, need_weights=False)[0], out[sample])


@LAYOUTS
def test_repr_shows_the_configuration(fused: bool) -> None:
    flags: dict[str, Any] = {"kdim": KDIM, "vdim": VDIM, "bias": False, "add_bias_kv": True, "add_zero_attn": True}
    shown = repr(made(fused, dropout=0.25, average_attn_weights=False, **flags))
    for text in (
        *(f"MultiheadAttention(\n  {D}, num_heads={H}", "batch_first=True", f"kdim={KDIM}", f"vdim={VDIM}"),
        *("bias=False", "add_bias_kv=True", "add_zero_attn=True", "average_attn_weights=False"),
        *("(out_proj): Linear", "(attn_dropout): Dropout(p=0.25"),
    ):
        assert text in shown
    assert ("fused_qkv=True" in shown) == fused
    assert ("(q_proj): Linear" in shown) == (not fused)
    plain = repr(made(fused, batch_first=False))
    assert "batch_first=False" in plain
    for text in ("kdim", "vdim", "bias=False", "add_", "average"):
        assert text not in plain.split("(out_proj)")[0].replace("bias=True", "")


@pytest.mark.parametrize("name", ["q_proj", "out_proj", "attn_dropout"])
@pytest.mark.parametrize(
    "child", [nn.Identity(), nn.Sequential(nn.Linear(D, D), nn.ReLU())], ids=["Identity", "Sequential"]
)
def test_repr_survives_a_replaced_child(name: str, child: nn.Module) -> None:
    module = made()
    setattr(module, name, child)
    assert type(child).__name__ in repr(module)


# --- Inside torch's own layers ------------------------------------------------------------------------------------


MODEL, HEADS = 14, 2


def stock(fused: bool, norm_first: bool, activation: str = "relu") -> tuple[nn.TransformerEncoderLayer, Any, list[Any]]:
    """A torch layer, the same with our module in place of its own, and a list that grows with each call of ours."""
    flags = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "activation": activation}
    layer = nn.TransformerEncoderLayer(MODEL, HEADS, 19, **flags)
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    ours = copy.deepcopy(layer)
    ours.self_attn = Counted(MODEL, HEADS, batch_first=True, fused_qkv=fused)
    ours.self_attn.load_state_dict(layer.self_attn.state_dict())
    return layer.eval(), ours.eval(), Counted.calls


class Counted(MultiheadAttention):
    """Counts without a hook, which would turn torch's shortcut off."""

    calls: list[Any] = []  # noqa: RUF012

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return super().forward(*args, **kwargs)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Counted.calls.clear()


def eval_by_hand(layer: Any, x: Tensor, padding: Tensor | None) -> Tensor:
    """torch's layer in training mode without dropout: the same numbers, and no shortcut."""
    return copy.deepcopy(layer).train()(x, src_key_padding_mask=padding).detach()


PADDED = pytest.mark.parametrize("padding", [None, torch.arange(L) >= torch.tensor([[L], [3]])], ids=["", "padded"])
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])


@LAYOUTS
@PADDED
@MODES
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_stock_encoder_layer_calls_ours(
    fused: bool, padding: Any, mode: Any, norm_first: bool, activation: str
) -> None:
    layer, ours, calls = stock(fused, norm_first, activation)
    x = torch.randn(B, L, MODEL)
    expected = eval_by_hand(layer, x, padding)
    with mode():
        out = ours(x, src_key_padding_mask=padding)
    assert len(calls) == 1
    assert close(out, expected)


@LAYOUTS
@PADDED
@MODES
@pytest.mark.parametrize("built", ["from ours", "replaced"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_stock_encoder_calls_ours(fused: bool, padding: Any, mode: Any, built: str) -> None:
    """`replaced`: built of torch's layers, so that the stack still means to make nested tensors of padded input."""
    layer, ours, calls = stock(fused, norm_first=False)
    if built == "from ours":
        encoder = nn.TransformerEncoder(ours, 2, enable_nested_tensor=False)
    else:
        encoder = nn.TransformerEncoder(layer, 2)
        for inner in encoder.layers:
            inner.self_attn = copy.deepcopy(ours.self_attn)
    x = torch.randn(B, L, MODEL)
    expected = x
    for _ in range(2):
        expected = eval_by_hand(layer, expected, padding)
    with mode():
        out = encoder.eval()(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    shown = torch.ones(B, L, dtype=torch.bool) if padding is None else ~padding
    assert close(out[shown], expected[shown])  # torch's stack may zero the padded rows


@LAYOUTS
def test_a_stock_encoder_says_why_it_makes_no_nested_tensors(fused: bool) -> None:
    _, ours, _ = stock(fused, norm_first=False)
    with pytest.warns(UserWarning, match="use_nested_tensor is False because"):
        nn.TransformerEncoder(ours, 2)


@pytest.mark.parametrize(("fused", "name"), [(False, "v_proj"), (False, "out_proj"), (True, "out_proj")])
@pytest.mark.parametrize("change", ["hook", "wrap", "weight"])
def test_changes_of_a_projection_hold_inside_a_stock_layer(fused: bool, name: str, change: str) -> None:
    """torch's shortcut reads the weights and calls nobody. With value or output 0, what is left is a bias."""
    _, ours, _ = stock(fused, norm_first=False)
    attn, x = ours.self_attn, torch.randn(B, L, MODEL)
    child = getattr(attn, name)
    with torch.no_grad():
        before = ours(x)
        if change == "hook":
            child.register_forward_hook(lambda child, args, out: 0 * out)
        elif change == "wrap":
            setattr(attn, name, nn.Sequential(child, nn.Threshold(1e9, 0.0)))
        else:
            child.weight.data, child.bias.data = torch.zeros(MODEL, MODEL), torch.zeros(MODEL)
        out = ours(x)
        expected = ours.norm1(x + (attn.out_proj.bias if name == "v_proj" else 0))
        expected = ours.norm2(expected + ours.linear2(torch.relu(ours.linear1(expected))))
    assert close(out, expected)
    assert not close(out, before)


@LAYOUTS
def test_a_stock_decoder_layer_calls_ours(fused: bool) -> None:
    layer = nn.TransformerDecoderLayer(MODEL, HEADS, 19, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(layer)
    for name in ("self_attn", "multihead_attn"):
        setattr(ours, name, Counted(MODEL, HEADS, batch_first=True, fused_qkv=fused))
        getattr(ours, name).load_state_dict(getattr(layer, name).state_dict())
    x, memory, causal = torch.randn(B, L, MODEL), torch.randn(B, S, MODEL), torch.ones(L, L).triu(1).bool()
    for training, grad in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            out, expected = (m.train(training)(x, memory, tgt_mask=causal, tgt_is_causal=True) for m in (ours, layer))
        assert close(out, expected)
    assert len(Counted.calls) == 8
