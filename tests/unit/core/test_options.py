"""What the options of attention compute, against the formulas written out here in float64; and that each one learns."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import EncoderBlock, MultiheadAttention, attention_weights, masks
from headwise.core.positions import Alibi, Rotary
from headwise.layers import own_names, tp_plan

D, H, B, L, S, KDIM, VDIM = 24, 6, 2, 5, 7, 13, 17

SETTINGS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1},
    "wide": {"head_dim": 10},
    "rotary": {"positions": "rotary"},
    "partly rotary": {"positions": lambda: Rotary(100.0, fraction=0.5, scaling="linear", factor=3.0)},
    "alibi": {"positions": "alibi"},
    "learned alibi": {"positions": lambda: Alibi(H, learned=True, dtype=torch.float64)},
    "rms": {"qk_norm": True},
    "layer": {"qk_norm": "layernorm"},
    "gate": {"gate": True},
    "sink": {"sink": True},
    "cap": {"softcap": 0.7},
}


def _pairs() -> dict[str, dict[str, Any]]:
    """Ten drawn pairs of options that do not set the same argument; always the same ones."""
    drawn, names = {}, list(SETTINGS)
    draw = random.Random(3)
    while len(drawn) < 10:
        one, two = draw.sample(names, 2)
        if not SETTINGS[one].keys() & SETTINGS[two].keys():
            drawn[f"{one} and {two}"] = SETTINGS[one] | SETTINGS[two]
    return drawn


REST = {"num_kv_heads": 3, "head_dim": 6, "qk_norm": "rmsnorm", "gate": True, "sink": True, "softcap": 2.0}
ALL = {"all, rotary": REST | {"positions": "rotary"}, "all, alibi": REST | SETTINGS["learned alibi"]}
PAIRS = _pairs()
EVERY = SETTINGS | PAIRS | ALL
# what shifts all scores of a row alike, and so does nothing, but for norms, angles, caps and sinks
SHIFTS = ("k_proj.bias", "k_norm.bias")
ALONE = pytest.mark.parametrize("name", SETTINGS)
TOGETHER = pytest.mark.parametrize("name", ALL)
LAYOUTS = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])


def slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def some(names: list[str], every: int, first: int = 0) -> list[Any]:
    """All of them, of which each `every`-th runs by default and the rest is slow."""
    return [name if place % every == first else slow([name])[0] for place, name in enumerate(names)]


def made(name: str, seed: int = 0, **words: Any) -> MultiheadAttention:
    """A module in float64 whose every Parameter holds numbers that matter."""
    options = {word: value() if callable(value) else value for word, value in EVERY[name].items()}
    module = MultiheadAttention(D, H, **{"batch_first": True, "dtype": torch.float64, **options, **words})
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(len(parameter), generator=draw) + (0.5 if "norm" in key else -0.5))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5)
    return module


def angles(positions: Tensor, width: int, base: float, factor: float) -> Tensor:
    """exp(i * angle), (.., width / 2)."""
    rate = torch.tensor([base ** (-2 * n / width) / factor for n in range(width // 2)], dtype=torch.float64)
    return torch.polar(torch.ones((), dtype=torch.float64), positions[..., None].double() * rate)


def by_hand(
    module: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and weights of each head, batch first, from the Parameters of a split module, head by head."""
    K, G = module.out_proj.weight.shape[1] // H, module.k_proj.weight.shape[0] * H // module.out_proj.weight.shape[1]
    q, k, v = (
        x @ child.weight.T + child.bias
        for x, child in zip((query, key, value), (module.q_proj, module.k_proj, module.v_proj), strict=True)
    )
    count = 0
    if module.bias_k is not None:
        count = 1
    positions = getattr(module, "positions", None)
    heads, weights = [], []
    for h in range(H):
        g = h // (H // G)
        one_q, one_k, one_v = q[..., h * K :][..., :K], k[..., g * K :][..., :K], v[..., g * K :][..., :K]
        if hasattr(module, "q_norm"):
            one_q, one_k = normed(one_q, module.q_norm), normed(one_k, module.k_norm)
        if isinstance(positions, Rotary):
            N = int(K * positions.fraction)
            turned = []
            for x in (one_q, one_k):
                unit = angles(torch.arange(x.shape[1]), N, positions.base, positions.factor)
                pair = torch.complex(x[..., : N // 2], x[..., N // 2 : N]) * unit
                turned.append(torch.cat([pair.real, pair.imag, x[..., N:]], dim=-1))
            one_q, one_k = turned
        if count:
            extra = [b[..., g * K :][..., :K].expand(len(key), 1, K) for b in (module.bias_k, module.bias_v)]
            one_k, one_v = torch.cat([one_k, extra[0]], 1), torch.cat([one_v, extra[1]], 1)
        score = one_q @ one_k.mT / math.sqrt(K)
        if module.softcap is not None:
            score = module.softcap * torch.tanh(score / module.softcap)
        if isinstance(positions, Alibi):
            slope = 2.0 ** (-2 * (h + 1)) if h < 4 else 2.0 ** -(2 * (h - 4) + 1)
            slope = slope if positions.slopes is None else positions.slopes[h]
            far = (torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])).abs()
            score = score - slope * nn.functional.pad(far, (0, count))
        if keep is not None:
            score = score.masked_fill(~nn.functional.pad(keep, (0, count), value=True), -math.inf)
        if hasattr(module, "sink"):
            score = torch.cat([score, module.sink[h].expand(*score.shape[:-1], 1)], dim=-1)
        weight = score.exp() / score.exp().sum(-1, keepdim=True)
        weight = weight[..., : one_k.shape[1]]
        heads.append(weight @ one_v)
        weights.append(weight)
    out = torch.cat(heads, dim=-1)
    if hasattr(module, "gate_proj"):
        out = out / (1 + (-(query @ module.gate_proj.weight.T + module.gate_proj.bias)).exp())
    return out @ module.out_proj.weight.T + module.out_proj.bias, torch.stack(weights, dim=1)


def normed(x: Tensor, norm: Any) -> Tensor:
    if isinstance(norm, nn.RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def same(actual: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- The formulas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_formula(name: str) -> None:
    """Self-attention: output, weights of each head, their mean, and the gradient of every Parameter and input."""
    module = made(name)
    x = randn(B, L, D).requires_grad_()
    want, want_weights = by_hand(module, x, x, x)
    out, weights = module(x, x, x, average_attn_weights=False)
    same(out, want, "out")
    same(weights, want_weights, "weights")
    same(module(x, x, x)[1], want_weights.mean(1), "averaged")
    wanted = dict(module.named_parameters()) | {"x": x}
    probe = randn(B, L, D, seed=2)
    expected = torch.autograd.grad((want * probe).sum(), list(wanted.values()))
    found = torch.autograd.grad((module(x, x, x, need_weights=False)[0] * probe).sum(), list(wanted.values()))
    for key, one, two in zip(wanted, found, expected, strict=True):
        same(one, two, f"gradient of {key}")
        assert two.abs().max() > 1e-6 or key in SHIFTS, key


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", [*SETTINGS, *ALL])
@LAYOUTS
def test_cross_attention_with_masks(name: str, fused: bool) -> None:
    """Other widths and lengths, the future and padding hidden, an appended key, padded queries, a hook that watches."""
    split = made(name, kdim=KDIM, vdim=VDIM, add_bias_kv=True)
    module = split
    if fused:
        module = made(name, seed=5, kdim=KDIM, vdim=VDIM, add_bias_kv=True, fused_qkv=True)
        module.load_state_dict(split.state_dict())
    query, key, value = randn(B, L, D), randn(B, S, KDIM, seed=2), randn(B, S, VDIM, seed=3)
    hidden = torch.arange(S) >= torch.tensor([S, 3])[:, None]
    keep = (torch.arange(S) <= torch.arange(L)[:, None]) & ~hidden[:, None]
    want, want_weights = by_hand(split, query, key, value, keep)
    seen: list[Any] = []
    handle = module.attend.register_forward_pre_hook(lambda _, given: seen.append(given))
    words = {"key_padding_mask": hidden, "is_causal": True, "average_attn_weights": False}
    out, weights = module(query, key, value, **words)
    handle.remove()
    same(out, want)
    same(weights, want_weights)
    q, k, _, mask, *rest = seen[0]
    softcap, sink = rest[4:] or (None, None)
    same(attention_weights(q, k, mask=mask, softcap=softcap, sink=sink), want_weights)
    same(module(query, key, value, need_weights=False, **words)[0], want)
    padded = torch.arange(L) >= torch.tensor([L, 2])[:, None]
    out, _ = module(query, key, value, query_padding_mask=padded, **words)
    same(out, want.masked_fill(padded[..., None], 0))


@TOGETHER
@LAYOUTS
def test_other_shapes_of_input(name: str, fused: bool) -> None:
    """Length first, unbatched, and a key that is the value but not the query."""
    module = made(name, fused_qkv=fused)
    x, y = randn(B, L, D), randn(B, S, D, seed=2)
    want, want_weights = module(x, y, y)
    same(want, by_hand(copy.deepcopy(module).split_projections(), x, y, y)[0])
    module.batch_first = False
    out, weights = module(x.transpose(0, 1), y.transpose(0, 1), y.transpose(0, 1))
    same((out.transpose(0, 1), weights), (want, want_weights))
    out, weights = module(x[1], y[1], y[1])
    same((out, weights), (want[1], want_weights[1]))


def test_the_zero_key_has_the_width_of_a_group() -> None:
    module = made("grouped", add_zero_attn=True)
    x = randn(B, L, D)
    _, weights = module(x, x, x, average_attn_weights=False)
    assert weights.shape == (B, H, L, L + 1)
    score = (x @ module.q_proj.weight.T + module.q_proj.bias)[..., : D // H]
    key = (x @ module.k_proj.weight.T + module.k_proj.bias)[..., : D // H]
    both = nn.functional.pad(score @ key.mT / math.sqrt(D // H), (0, 1))
    same(weights[:, 0], both.softmax(-1))


# --- Nested tensors, compiling, function transforms, other dtypes --------------------------------------------------


@pytest.mark.parametrize("name", some([*SETTINGS, *ALL], every=2))
def test_nested(name: str) -> None:
    """Each sample as if it were alone: with and without weights, self and cross, many short samples and few long."""
    module = made(name)
    for lengths, keys in (((5, 2, 7), (5, 2, 7)), ((5, 2, 7), (3, 6, 4)), ((29, 3), (29, 3))):
        samples = [randn(n, D, seed=n + place) for place, n in enumerate(lengths)]
        others = samples if keys == lengths else [randn(n, D, seed=50 + n) for n in keys]
        query = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
        key = query if others is samples else torch.nested.as_nested_tensor(others, layout=torch.jagged)
        for words in ({}, {"is_causal": True}):
            out, _ = module(query, key, key, need_weights=False, **words)
            padded, weights = module(query, key, key, average_attn_weights=False, **words)
            for place, (x, y) in enumerate(zip(samples, others, strict=True)):
                want, want_weights = module(x, y, y, average_attn_weights=False, **words)
                same(out[place], want)
                same(padded[place], want)
                same(weights[place, :, : len(x), : len(y)], want_weights)


@pytest.mark.parametrize("name", some([*SETTINGS, *ALL], every=2, first=1))
def test_nested_row_by_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs sequence by sequence, with positions of each sample in one row, is asked for here by force."""
    monkeypatch.setattr("headwise.core.nested._is_worth", lambda *_: True)
    test_nested(name)


@pytest.mark.parametrize(
    ("name", "fused", "backend"),
    [
        pytest.param(
            name,
            fused,
            backend,
            marks=() if (name, fused, backend) == ("all, alibi", True, "eager") else pytest.mark.slow,
        )
        for fused in (False, True)
        for name in ALL
        for backend in ("eager", "aot_eager")
    ],
)
def test_compiled(name: str, fused: bool, backend: str) -> None:
    """One graph, one answer, gradients too, for lengths that change."""
    module = made(name, fused_qkv=fused)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for length in (L, S):
        x = randn(B, length, D)
        hidden = torch.arange(length) >= torch.tensor([length, 3])[:, None]
        want = torch.autograd.grad(module(x, x, x, hidden)[0].sum(), list(module.parameters()))
        found = torch.autograd.grad(compiled(x, x, x, hidden)[0].sum(), list(module.parameters()))
        same(found, want)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("partly rotary", "gate") else pytest.mark.slow)
        for name in SETTINGS
        if name not in ("grouped", "one key head")
    ],
)
def test_exported(name: str) -> None:
    module = made(name).eval()
    x, y = randn(B, L, D), randn(B, S, D)
    length = torch.export.Dim("length", min=2, max=50)
    exported = torch.export.export(module, (x, x, x), dynamic_shapes=({1: length},) * 3)
    same(exported.module()(y, y, y), module(y, y, y))


@TOGETHER
def test_vmapped(name: str) -> None:
    """Over models and over samples."""
    module = made(name)
    x = randn(3, L, D)
    same(torch.vmap(lambda one: module(one, one, one, need_weights=False)[0])(x), module(x, x, x)[0])
    states = {key: torch.stack([value, value * 0.5]) for key, value in module.named_parameters()}
    out = torch.vmap(lambda state: torch.func.functional_call(module, state, (x, x, x))[0])(states)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    same(out[1], module(x, x, x)[0])


@pytest.mark.parametrize("name", [*SETTINGS, *ALL])
def test_sixteen_bit(name: str) -> None:
    """In bfloat16, and under autocast: near what float64 gives, in the dtype that torch's layer has too."""
    module, x = made(name).eval(), randn(B, L, D)
    want = module(x, x, x)[0]
    single = copy.deepcopy(module).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = single(x.float(), x.float(), x.float())
    assert out.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    low = copy.deepcopy(module).bfloat16()
    low_out, low_weights = low(x.bfloat16(), x.bfloat16(), x.bfloat16())
    assert low_out.dtype == low_weights.dtype == torch.bfloat16
    for got in (out, low_out):
        assert (got.double() - want).abs().max() < 0.06 * want.abs().max()


# --- Layouts, names, copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SETTINGS, *slow(PAIRS), *ALL])
def test_layouts_and_names(name: str) -> None:
    """Fused, split, copied, pickled, loaded either way: the same module; state_dict has torch's names for both."""
    module = made(name, add_bias_kv=True)
    x = randn(B, L, D)
    want = module(x, x, x)[0]
    state = module.state_dict()
    fused = made(name, seed=7, add_bias_kv=True, fused_qkv=True)
    assert [*state] == [*fused.state_dict()] == [key for key, _ in fused.named_parameters()]
    fused.load_state_dict(state)
    back = made(name, seed=8, add_bias_kv=True)
    back.load_state_dict(fused.state_dict())
    own = own_names(made(name, seed=9, add_bias_kv=True))
    own.load_state_dict(back.state_dict())
    back.load_state_dict(own.state_dict())
    assert [*own.state_dict()] == [key for key, _ in own.named_parameters()]
    turned = copy.deepcopy(module).fuse_projections()
    assert turned.fused_qkv
    same(dict(turned.state_dict()), {key: value.clone() for key, value in state.items()})
    again = copy.deepcopy(turned).split_projections()
    loaded = pickle.loads(pickle.dumps(again))
    for other in (fused, back, own, turned, again, loaded):
        same(other(x, x, x)[0], want)


@LAYOUTS
def test_joined_weights_of_unequal_heights(fused: bool) -> None:
    """`in_proj_weight` has (H + 2G)*K rows, and what is written there arrives."""
    module = made("all, rotary", fused_qkv=fused)
    assert module.in_proj_weight.shape == ((H + 2 * 3) * 6, D)
    assert module.in_proj_bias.shape == ((H + 2 * 3) * 6,)
    with torch.no_grad():
        module.in_proj_weight.fill_(0.25)
        module.in_proj_weight[H * 6 :].mul_(2)
        module.in_proj_bias.copy_(torch.arange(72.0))
    module.split_projections()
    assert module.q_proj.weight.eq(0.25).all()
    assert module.k_proj.weight.eq(0.5).all()
    same(module.v_proj.bias, torch.arange(54.0, 72, dtype=torch.float64))
    module.in_proj_weight = nn.Parameter(torch.arange(72.0 * D, dtype=torch.float64).view(72, D))
    same(module.k_proj.weight[0, 0], torch.tensor(36.0 * D, dtype=torch.float64))


def test_a_cap_is_the_constructors() -> None:
    """Set later it would be ignored by what was built without."""
    with pytest.raises(AttributeError):
        MultiheadAttention(D, H).softcap = 30.0


def test_a_checkpoint_of_other_heads_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for in_proj_weight.*\[72, 24\].*\[40, 24\]"):
        made("grouped").load_state_dict(nn.MultiheadAttention(D, H).state_dict())


@pytest.mark.parametrize("name", [*SETTINGS, *slow(PAIRS), *ALL])
def test_reset(name: str) -> None:
    """Both layouts draw the same under a seed; each projection by Xavier over the matrix that it is part of."""
    module, fused = made(name), made(name, fused_qkv=True)
    for one in (module, fused):
        torch.manual_seed(3)
        one.reset_parameters()
    same(dict(module.state_dict()), dict(fused.state_dict()))
    state = module.state_dict()
    rows = len(state["in_proj_weight"])
    limit = math.sqrt(6 / (rows + D))
    assert 0.9 * limit < state["in_proj_weight"].abs().max() <= limit
    torch.manual_seed(3)
    for child in module.children():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    for child in (module.q_proj, module.k_proj, module.v_proj):
        assert 0.5 * limit < child.weight.abs().max() <= limit
    if hasattr(module, "gate_proj"):
        limit = math.sqrt(6 / sum(module.gate_proj.weight.shape))
        assert 0.9 * limit < module.gate_proj.weight.abs().max() <= limit
        assert not module.gate_proj.bias.any()
    if hasattr(module, "sink"):
        assert not module.sink.any()
    if hasattr(module, "q_norm"):
        assert module.q_norm.weight.eq(1).all()
        assert module.k_norm.weight.eq(1).all()


def test_off_is_torchs_module() -> None:
    """Nothing of the options is there, and values that say nothing new switch nothing on."""
    for words in ({}, {"num_kv_heads": H, "head_dim": D // H}):
        torch.manual_seed(3)
        module = MultiheadAttention(D, H, **words)
        torch.manual_seed(3)
        theirs = nn.MultiheadAttention(D, H)
        assert "extended" not in vars(module)
        assert module.inner_dims is None
        assert [key for key, _ in module.named_children()][4:] == ["attn_dropout", "attend"]
        same(dict(module.state_dict()), dict(theirs.state_dict()))
        assert (module.head_dim, module.num_kv_heads, module.softcap) == (D // H, H, None)
        x = torch.randn(L, B, D)
        seen: list[int] = []
        module.attend.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(len(given)))
        module(x, x, x)
        assert seen == [8]


@ALONE
def test_repr(name: str) -> None:
    text, plain = repr(made(name)), repr(MultiheadAttention(D, H, batch_first=True))
    assert text != plain


# --- Other parts of the library ------------------------------------------------------------------------------------


@TOGETHER
def test_in_a_block(name: str) -> None:
    """An encoder block takes it; padding is computed as ever, and packed rows are left to modules without positions."""
    block = EncoderBlock(D, H, attention=made(name)).double().eval()
    x = randn(4, 300, D)
    hidden = torch.arange(300) >= torch.tensor([300, 10, 20, 30])[:, None]
    out = block(x, key_padding_mask=hidden, query_padding_mask=hidden)
    for sample, length in ((1, 10), (3, 30)):
        same(out[sample, :length], block(x[sample : sample + 1, :length])[0])
        assert not out[sample, length:].any()
    model = nn.ModuleList([block, nn.MultiheadAttention(D, H)])
    assert type(headwise.upgrade(model)[1]) is MultiheadAttention
    assert model[0] is block
    assert block.self_attn.extended


@ALONE
def test_torchs_layer_cannot(name: str) -> None:
    with pytest.raises(ValueError, match="have none of the options"):
        headwise.downgrade(nn.ModuleList([made(name)]))


def test_plans_of_tensor_parallelism() -> None:
    plan = tp_plan(made("gate"))
    assert list(plan) == ["", "q_proj", "k_proj", "v_proj", "gate_proj", "out_proj"]
    assert type(plan["gate_proj"]) is type(plan["q_proj"])
    with pytest.raises(ValueError, match="q_norm must have no parameters"):
        tp_plan(made("rms"))
    tp_plan(MultiheadAttention(D, H, qk_norm=lambda width: nn.RMSNorm(width, elementwise_affine=False)))
    with pytest.raises(ValueError, match="positions must be a Rotary or an Alibi"):
        tp_plan(MultiheadAttention(D, H, positions=type("Turned", (Rotary,), {})()))


def test_own_modules() -> None:
    """A module called like Rotary, and a norm that a callable makes."""

    class Shift(nn.Module):
        def forward(self, x: Tensor, positions: int | Tensor) -> Tensor:
            return x + positions + torch.arange(x.shape[2])[:, None]

    module = MultiheadAttention(D, H, positions=Shift(), qk_norm=lambda width: nn.Softmax(-1), batch_first=True)
    module.double()
    seen: list[Any] = []
    module.attend.register_forward_pre_hook(lambda _, given: seen.append(given))
    x = randn(B, L, D)
    module(x, x, x)
    heads = module.q_proj(x).view(B, L, H, D // H).transpose(1, 2)
    same(seen[0][0], heads.softmax(-1) + torch.arange(L)[:, None])


# --- What is refused -----------------------------------------------------------------------------------------------


def _no_module(width: int) -> None:
    """What a `qk_norm` may not be."""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_kv_heads": 4}, r"num_kv_heads must divide num_heads 6: one of 1, 2, 3, 6; got 4"),
        ({"num_kv_heads": 0}, r"num_kv_heads must be an int of at least 1; got 0"),
        ({"num_kv_heads": 2.0}, r"num_kv_heads must be an int"),
        ({"head_dim": 0}, r"head_dim must be an int of at least 1"),
        ({"head_dim": "4"}, r"head_dim must be an int"),
        ({"embed_dim": 25}, r"embed_dim must be a multiple of num_heads 6, such as 24 or 30, unless head_dim is given"),
        ({"head_dim": 5, "positions": "rotary"}, r"turned must be even.*5 of head_dim 5"),
        ({"positions": "sinusoid"}, r"positions must be 'rotary', 'alibi'"),
        ({"positions": True}, r"positions must be 'rotary', 'alibi'"),
        ({"positions": nn.Identity()}, r"positions must be .* or a module called like Rotary; got Identity\(\)"),
        ({"positions": Alibi(4)}, r"positions must be an Alibi of num_heads 6; got 4"),
        ({"qk_norm": "batchnorm"}, r"qk_norm must be True, False, 'rmsnorm'"),
        ({"qk_norm": nn.RMSNorm(4)}, r"qk_norm must be True, False, 'rmsnorm'.*a callable"),
        ({"qk_norm": _no_module}, r"qk_norm must be"),
        ({"qk_norm": None}, r"qk_norm must be"),
        ({"gate": 1}, r"gate must be True or False; got 1"),
        ({"sink": "yes"}, r"sink must be True or False; got 'yes'"),
        ({"softcap": 0.0}, r"softcap must be a finite number greater than 0"),
        ({"softcap": -3}, r"softcap must be"),
        ({"softcap": math.nan}, r"softcap must be"),
        ({"softcap": math.inf}, r"softcap must be"),
        ({"softcap": True}, r"softcap must be"),
        ({"softcap": "30"}, r"softcap must be"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0] if isinstance(value, dict) else "",
)
def test_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": D, "num_heads": H, **words})


# --- Each learns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some([*SETTINGS, *ALL], every=4))
def test_each_learns(name: str) -> None:
    """From a teacher of the same kind; every Parameter moves, and the error falls to a fifth."""
    teacher, student = made(name, seed=1), made(name, seed=2)
    x = randn(8, 6, D)
    with torch.no_grad():
        target = teacher(x, x, x)[0]
    before = {key: value.detach().clone() for key, value in student.named_parameters()}
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    losses = []
    for _ in range(80):
        loss = (student(x, x, x, need_weights=False)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    for key, value in student.named_parameters():
        assert (value - before[key]).abs().max() > 1e-3 or key in SHIFTS, key


@pytest.mark.parametrize(
    ("name", "key"),
    [("sink", "sink"), pytest.param("learned alibi", "positions.slopes", marks=pytest.mark.slow)],
)
def test_one_number_a_head_is_found(name: str, key: str) -> None:
    """All else being equal, sinks and slopes of the teacher are what is learned."""
    teacher, student = made(name, seed=1), made(name, seed=1)
    own, wanted = student.get_parameter(key), teacher.get_parameter(key)
    with torch.no_grad():
        own.add_(torch.linspace(-0.4, 0.4, H))
    x = randn(8, 6, D)
    target = teacher(x, x, x)[0].detach()
    optimizer = torch.optim.Adam([own], lr=0.05)
    for _ in range(150):
        loss = (student(x, x, x, need_weights=False)[0] - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (own - wanted).abs().max() < 0.02


@pytest.mark.slow
def test_rotary_learns_a_distance() -> None:
    """The number two places back: learned on 8 positions, found on 24, and out of reach without positions."""
    errors = {}
    for positions, steps in (("rotary", 200), (None, 60)):
        torch.manual_seed(0)
        module = MultiheadAttention(8, 1, head_dim=16, positions=positions, batch_first=True)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.03)
        for _ in range(steps):
            x = torch.randn(16, 8, 8)
            out = module(x, x, x, need_weights=False, is_causal=True)[0]
            loss = (out[:, 2:] - x[:, :-2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        x = torch.randn(16, 24, 8)
        out = module(x, x, x, need_weights=False, is_causal=True)[0]
        errors[positions] = (out[:, 2:] - x[:, :-2]).square().mean().item()
    assert errors["rotary"] < 0.2
    assert errors[None] > 0.7


def test_masks_of_a_bias_are_refused_where_they_cannot_be() -> None:
    slopes = torch.ones(H)
    for combine in (lambda: ~masks.alibi(slopes), lambda: masks.alibi(slopes) | masks.causal()):
        with pytest.raises(ValueError, match="hold no bias"):
            combine()
