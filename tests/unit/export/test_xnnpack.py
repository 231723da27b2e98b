"""What stands in for layers in an ExecuTorch file gives the same numbers in torch; no ExecuTorch is needed here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import headwise
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.export.xnnpack import DynamicInt8, LeanAttend, Norm, lean
from headwise.quant import Int8Linear, make_state

B, L, S, D = 3, 7, 11, 16


def lean_copy(module: nn.Module) -> nn.Module:
    return lean(copy.deepcopy(module)).model


def masks() -> dict[str, dict[str, Any]]:
    keys = torch.rand(B, S) < 0.3
    keys[:, 0] = False
    pairs = torch.rand(L, S) < 0.5
    pairs[2] = True  # this query sees nothing
    return {
        "none": {},
        "padding": {"key_padding_mask": keys},
        "pairs": {"attn_mask": pairs},
        "both": {"key_padding_mask": keys, "attn_mask": pairs},
        "added": {"attn_mask": torch.randn(L, S)},
        "infinite": {"attn_mask": torch.randn(L, S).masked_fill(pairs, float("-inf"))},
        "heads": {"attn_mask": torch.rand(B * 4, L, S) < 0.5},
        "causal": {"is_causal": True},
        "causal and padding": {"is_causal": True, "key_padding_mask": keys},
    }


@pytest.mark.parametrize("batch", [B, 1])
@pytest.mark.parametrize("average", [None, True, False])
@pytest.mark.parametrize("kind", list(masks()))
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"softcap": 3.0}, {"sink": True}])
def test_attention_is_the_same(options: dict[str, Any], kind: str, average: bool | None, batch: int) -> None:
    mha = MultiheadAttention(D, 4, batch_first=True, **options).eval().requires_grad_(False)
    words = masks()[kind]
    if batch == 1:
        words = {k: v[:1] if k == "key_padding_mask" else v for k, v in words.items()}
        words = {k: v[:4] if k == "attn_mask" and v.dim() == 3 else v for k, v in words.items()}
    query, key = torch.randn(batch, L, D), torch.randn(batch, S, D)
    words |= {"need_weights": average is not None, "average_attn_weights": average}
    small = lean_copy(mha)
    assert type(small.attend) is LeanAttend
    out, weights = small(query, key, key, **words)
    wanted, wanted_weights = mha(query, key, key, **words)
    torch.testing.assert_close(out, wanted)
    assert (weights is None) == (wanted_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, wanted_weights)


def test_what_padding_holds_has_no_influence() -> None:
    mha = MultiheadAttention(D, 4, batch_first=True).eval().requires_grad_(False)
    x, padding = torch.randn(B, L, D), torch.zeros(B, L, dtype=torch.bool)
    padding[:, -2:] = True
    wanted = lean_copy(mha)(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    x[:, -2:] = torch.nan
    got = lean_copy(mha)(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(got[:, :-2], wanted[:, :-2])


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(D),
        nn.LayerNorm(D, elementwise_affine=False),
        nn.LayerNorm(D, bias=False, eps=1e-3),
        nn.RMSNorm(D),
        nn.RMSNorm(D, eps=1e-3, elementwise_affine=False),
    ],
)
def test_norm_is_the_same(norm: nn.Module) -> None:
    for name, parameter in norm.named_parameters():
        nn.init.normal_(parameter, mean=float(name == "weight"))
    x = 3 * torch.randn(B, L, D) + 5
    torch.testing.assert_close(Norm(norm)(x), norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("known", [None, (-3.0, 4.0)])
def test_weights_stay_what_they_are(known: tuple[float, float] | None, bias: bool) -> None:
    linear = nn.Linear(D, 5, bias=bias)
    state = make_state(linear.weight.detach(), linear.bias.detach() if bias else None, known)
    small = lean(nn.Sequential(Int8Linear.of(state)))
    (layer,) = small.model
    assert type(layer) is DynamicInt8
    assert (small.num_int8, small.num_static) == (1, int(known is not None))
    assert torch.equal(layer.int_weight, state.weight)
    assert torch.equal(layer.scale, state.weight_scale)
    # identity rows are on every grid: 0 and 1 alone
    bare = layer(torch.eye(D)) - (0 if state.biases() is None else state.biases())
    torch.testing.assert_close(bare, state.weights().T, rtol=1e-5, atol=1e-5)


def test_each_row_has_its_own_scale() -> None:
    small = DynamicInt8(make_state(torch.randn(5, D), None, None))
    x = torch.randn(4, D)
    wild = torch.cat([x, 1e4 * torch.randn(1, D)])
    torch.testing.assert_close(small(wild)[:4], small(x))


def test_together_rounds_once_and_is_the_same() -> None:
    block = headwise.quantize(headwise.EncoderBlock(D, 4).eval())
    small = lean_copy(block)
    attention: Any = small.self_attn
    x = torch.randn(B, L, D)
    children = [attention.q_proj, attention.k_proj, attention.v_proj]
    joined = DynamicInt8.together(children, x)
    assert joined is not None
    for child, out in zip(children, joined, strict=True):
        torch.testing.assert_close(out, child(x))
    assert DynamicInt8.together([attention.q_proj, nn.Linear(D, D)], x) is None


def test_what_is_shared_or_hooked() -> None:
    norm, watched = nn.LayerNorm(D), nn.LayerNorm(D)
    watched.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict({"a": norm, "b": norm, "c": watched, "d": nn.LayerNorm((2, D))})
    small: Any = lean(model).model
    assert small["a"] is small["b"]
    assert type(small["a"]) is Norm
    assert type(small["c"]) is nn.LayerNorm
    assert type(small["d"]) is nn.LayerNorm


def test_a_changed_attend_stays() -> None:
    class Own(Attend):
        def forward(self, query: Tensor, *rest: Any) -> tuple[Tensor, None]:  # type: ignore[override]
            return 0 * query, None

    mha = MultiheadAttention(D, 4)
    mha.attend = Own()
    assert type(lean_copy(mha).attend) is Own


def test_a_fused_projection_that_is_computed_stays() -> None:
    """It cannot be split."""

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    mha = MultiheadAttention(D, 4, batch_first=True, fused_qkv=True).eval()
    parametrize.register_parametrization(mha, "in_proj_weight", Double())
    x = torch.randn(B, L, D)
    small = lean_copy(mha)
    assert type(small.attend) is LeanAttend
    torch.testing.assert_close(small(x, x, x)[0], mha(x, x, x)[0])
