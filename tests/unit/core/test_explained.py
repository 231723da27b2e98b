"""`MultiheadAttention.explain`, `.attention_weights` and `.backend`: what is said is what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from headwise import Alibi, MultiheadAttention, masks

B, L, D, H = 4, 256, 64, 4
PADDING = torch.arange(L) >= torch.tensor([[L], [16], [32], [16]])
LEFT = PADDING.flip(1)


class Adapter(nn.Linear):
    """An `nn.Linear` of another class."""


def built(change: Callable[[MultiheadAttention], Any] = lambda _: None, **options: Any) -> MultiheadAttention:
    module = MultiheadAttention(D, H, batch_first=True, **options).eval().requires_grad_(False)
    change(module)
    return module


def adapt(module: MultiheadAttention) -> None:
    module.v_proj = Adapter(D, D)


# what is done -> the module, the words of the call, and what is said of packing
CALLS: dict[str, tuple[Callable[[], MultiheadAttention], dict[str, Any], str | int]] = {
    "queries too": (built, {"key_padding_mask": PADDING, "query_padding_mask": PADDING}, 2 * 320),
    "keys alone": (built, {"key_padding_mask": PADDING}, B * L + 320),
    "causal": (built, {"key_padding_mask": PADDING, "query_padding_mask": PADDING, "is_causal": True}, 2 * 320),
    "no padding": (built, {}, "there is no padding mask"),
    "a hook": (
        lambda: built(lambda m: m.q_proj.register_forward_hook(lambda *_: None)),
        {"key_padding_mask": PADDING},
        "a hook on q_proj would see other shapes",
    ),
    "a hook on attend": (
        lambda: built(lambda m: m.attend.register_forward_hook(lambda *_: None)),
        {"key_padding_mask": PADDING},
        "a hook on attend would see other shapes",
    ),
    "an adapter": (lambda: built(adapt), {"key_padding_mask": PADDING}, "v_proj is "),
    "add_bias_kv": (lambda: built(add_bias_kv=True), {"key_padding_mask": PADDING}, "add_bias_kv and add_zero_attn"),
    "forbidden": (lambda: built(backend="sdpa"), {"key_padding_mask": PADDING}, "backend='sdpa' was asked for"),
    "a mask of queries": (
        built,
        {"key_padding_mask": PADDING, "attn_mask": torch.rand(L, L) < 0.1},
        "a mask speaks of single queries",
    ),
    "a floating mask": (built, {"key_padding_mask": -1e9 * PADDING.float()}, "a padding mask is floating"),
    "left, keys alone, causal": (built, {"key_padding_mask": LEFT, "is_causal": True}, "positions count"),
    "left, ALiBi": (
        lambda: built(positions=Alibi(H)), {"key_padding_mask": PADDING}, "ALiBi counts distances"
    ),
    "little padding": (built, {"key_padding_mask": torch.arange(L) >= L - torch.ones(B, 1)}, "it would save"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_packing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, words, said = CALLS[name]
    module, x = build(), torch.randn(B, L, D)
    seen: list[int] = []
    original = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *w: (seen.append(x.shape[:-1].numel()), original(x, *w))[1])
    answer = module.explain(x, x, x, **words)
    assert seen == [], "nothing is computed"
    out, _ = module(x, x, x, need_weights=False, **words)
    if isinstance(said, int):
        assert answer.packed == (said, 2 * B * L)
        assert min(seen) == 320
        assert f"packed: {said:,} of 2,048 positions are projected" in str(answer)
        assert answer.flops < answer.dense_flops
    else:
        assert str(answer.packed).startswith(said)
        assert set(seen) == {B * L}
        assert f"not packed: {said}" in str(answer)
    assert (answer.backend == module.backend) or module.backend is None
    module.backend = "plain"
    assert_close(out, module(x, x, x, need_weights=False, **words)[0], rtol=1e-4, atol=1e-5)


def test_a_small_batch() -> None:
    x = torch.randn(2, 4, D)
    answer = built().explain(x, x, x, key_padding_mask=torch.arange(4) >= torch.tensor([[4], [1]]))
    assert str(answer.packed).startswith("the batch is small")


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "head_dim": 24, "gate": True}], ids=["usual", "grouped"])
def test_flops(options: dict[str, Any]) -> None:
    module, x = built(**options), torch.randn(B, L, D)
    K, G = options.get("head_dim", D // H), options.get("num_kv_heads", H)
    gates = 2 + ("gate" in options)
    dense = B * (2 * L * D * K * (gates * H + 2 * G) + 4 * L * L * H * K)
    answer = module.explain(x, x, x)
    assert (answer.flops, answer.dense_flops, answer.saved) == (dense, dense, 0)
    packed = module.explain(x, x, x, key_padding_mask=PADDING, query_padding_mask=PADDING)
    pairs = L * L + 2 * 16 * 16 + 32 * 32
    assert packed.flops == 2 * 320 * D * K * (gates * H + 2 * G) + 4 * pairs * H * K
    assert packed.dense_flops == dense


def test_backend() -> None:
    module, x = built(), torch.randn(B, L, D)
    assert module.backend is None
    for name in ("sdpa", "plain", "tiled", None):
        module.backend = name
        want = name or "tiled"
        assert module.explain(x, x, x, key_padding_mask=PADDING).backend == want
    with pytest.raises(ValueError, match=r"backend must be 'tiled' or 'varlen' or 'sdpa' or 'plain', or None; got 'fl"):
        module.backend = "flash"
    with pytest.raises(ValueError, match="backend must be"):
        MultiheadAttention(D, H, backend="auto")
    module.backend = "varlen"
    with pytest.raises(ValueError, match="backend must take this call, and varlen does not: it needs sequences"):
        module(x, x, x, need_weights=False)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "positions": "rotary", "sink": True, "softcap": 3.0}])
@pytest.mark.parametrize("fused", [False, True])
def test_some_weights(options: dict[str, Any], fused: bool) -> None:
    module = built(fused_qkv=fused, dtype=torch.float64, **options)
    x, memory = torch.randn(2, 7, D, dtype=torch.float64), torch.randn(2, 11, D, dtype=torch.float64)
    padding = torch.arange(11) >= torch.tensor([[11], [6]])
    words: dict[str, Any] = {"key_padding_mask": padding, "mask": masks.window(4, 5)}
    for average in (False, True):
        _, want = module(x, memory, memory, average_attn_weights=average, **words)
        got = module.attention_weights(x, memory, average_attn_weights=average, **words)
        assert_close(got, want, rtol=1e-10, atol=1e-12)
        got = module.attention_weights(x, memory, average_attn_weights=average, rows=[-1, 2], **words)
        assert_close(got, want[..., [6, 2], :], rtol=1e-10, atol=1e-12)
        weights, keys = module.attention_weights(x, memory, average_attn_weights=average, top=3, **words)
        assert_close(weights, want.topk(3).values, rtol=1e-10, atol=1e-12)
        assert_close(want.gather(-1, keys), weights, rtol=1e-10, atol=1e-12)
    one = module.attention_weights(x[0], memory[0])
    assert_close(one, module(x[:1], memory[:1], memory[:1])[1][0], rtol=1e-10, atol=1e-12)


def test_weights_of_a_row_by_its_number() -> None:
    module, x = built(), torch.randn(2, 7, D)
    whole = module.attention_weights(x, x)
    assert isinstance(whole, Tensor)
    assert_close(module.attention_weights(x, x, rows=-1), whole[:, -1:])


def test_what_is_refused() -> None:
    x = torch.randn(2, 7, D)
    with pytest.raises(ValueError, match=r"attention_weights: module must have neither add_bias_kv"):
        built(add_zero_attn=True).attention_weights(x, x)
    nested = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    for name in ("explain", "attention_weights"):
        given = (nested,) * (3 if name == "explain" else 2)
        with pytest.raises(ValueError, match=f"^{name}: query and key must be dense"):
            getattr(built(), name)(*given)
    with pytest.raises(ValueError, match=r"key must be 64 wide"):
        built().explain(x, x[..., :3], x)
