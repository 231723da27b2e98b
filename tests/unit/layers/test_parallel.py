"""The plan of tensor parallelism: what it names, what it refuses, and the masks of one process's heads.

What a sharded model computes is in tests/tools/test_distributed.py.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import parametrize, prune

import headwise
from headwise import DecoderBlock, EncoderBlock, MultiheadAttention, masks
from headwise.core.algebra import appended, lower
from headwise.core.lowering import Size
from headwise.core.traits import visible_keys
from headwise.layers import parallel, tp_plan

D, H = 12, 4
ATTENTION = ["", ".q_proj", ".k_proj", ".v_proj", ".out_proj"]


def kinds(plan: dict[str, Any]) -> dict[str, str]:
    """C, R or A (our own style of an attention)."""
    short = {ColwiseParallel: "C", RowwiseParallel: "R"}
    return {name: next((s for k, s in short.items() if isinstance(style, k)), "A") for name, style in plan.items()}


def names(start: str) -> list[str]:
    return [start + name if start else name.lstrip(".") for name in ATTENTION]


@pytest.mark.parametrize(
    ("model", "attentions", "linears"),
    [
        (MultiheadAttention(D, H), [""], []),
        (MultiheadAttention(D, H, bias=False, add_bias_kv=True, kdim=5, vdim=7), [""], []),
        (EncoderBlock(D, H), ["self_attn"], ["linear1", "linear2"]),
        (EncoderBlock(D, H, activation="swiglu"), ["self_attn"], ["linear1", "linear2", "linear3"]),
        (DecoderBlock(D, H, memory_dim=5), ["self_attn", "multihead_attn"], ["linear1", "linear2"]),
        (headwise.TransformerEncoderLayer(D, H, 8), ["self_attn"], ["linear1", "linear2"]),
        (
            nn.ModuleDict({"a": MultiheadAttention(D, H), "b": headwise.upgrade(nn.TransformerDecoderLayer(D, H, 8))}),
            ["a", "b.self_attn", "b.multihead_attn"],
            ["b.linear1", "b.linear2"],
        ),
    ],
    ids=["attention", "without biases", "block", "swiglu", "decoder block", "layer", "upgraded"],
)
def test_names_and_styles(model: nn.Module, attentions: list[str], linears: list[str]) -> None:
    before = copy.deepcopy(model.state_dict())
    plan = kinds(tp_plan(model))
    want = {name: style for start in attentions for name, style in zip(names(start), "ACCCR", strict=True)}
    want |= {name: "R" if name.endswith("linear2") else "C" for name in linears}
    assert plan == want
    assert all(isinstance(model.get_submodule(name), nn.Module) for name in plan)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_all_layers_of_a_stack() -> None:
    plan = kinds(tp_plan(headwise.Transformer(D, H, 2, 1, 8)))
    assert sum(style == "A" for style in plan.values()) == 4
    assert [name for name in plan if name.endswith("linear1")] == [
        "encoder.layers.0.linear1",
        "encoder.layers.1.linear1",
        "decoder.layers.0.linear1",
    ]


def test_what_is_shared_comes_once() -> None:
    block, attention = EncoderBlock(D, H), MultiheadAttention(D, H)
    model = nn.ModuleList([block, block, attention])
    model.append(EncoderBlock(D, attention=MultiheadAttention(D, H, batch_first=True)))
    model[3].self_attn.q_proj = attention.q_proj
    plan = tp_plan(model)
    assert not any(name.startswith("1.") for name in plan)
    assert "2.q_proj" in plan
    assert "3.self_attn.q_proj" not in plan
    assert len({id(model.get_submodule(name)) for name in plan}) == len(plan)


@pytest.mark.parametrize("activation", [nn.Softmax(-1), nn.PReLU(48), lambda x: x.cumsum(-1)])
def test_a_feed_forward_that_looks_across_its_width_stays_whole(activation: Any) -> None:
    plan = tp_plan(EncoderBlock(D, H, activation=activation))
    assert list(plan) == names("self_attn")


def test_another_feed_forward_stays_whole() -> None:
    class Own(EncoderBlock):
        def _feed_forward(self, x: Tensor) -> Tensor:
            return self.linear2(self.linear1(x).flip(-1))

    assert list(tp_plan(Own(D, H))) == names("self_attn")


def adapted(model: MultiheadAttention) -> None:
    model.v_proj = nn.Sequential(model.v_proj)


def tied(model: MultiheadAttention) -> None:
    model.v_proj.weight = model.k_proj.weight


def elsewhere(model: MultiheadAttention) -> None:
    model.head = model.q_proj


def both_ways(model: MultiheadAttention) -> None:
    model.out_proj = model.q_proj


def patched(model: MultiheadAttention) -> None:
    model.q_proj.forward = lambda x: x


def replaced(model: MultiheadAttention) -> None:
    model.attn_dropout = nn.Dropout1d(0.5)


def reattending(model: MultiheadAttention) -> None:
    model.attend = nn.Identity()


class Subclass(MultiheadAttention):
    def forward(self, *arguments: Any, **words: Any) -> Any:
        return super().forward(*arguments, **words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: m.fuse_projections(),
            "at.0 must have split projections; call split_projections() on it, or upgrade",
        ),
        (adapted, "at.0.v_proj must be exactly an nn.Linear; merge adapters first; got Seq"),
        (patched, "at.0.q_proj must be exactly an nn.Linear"),
        (lambda m: parametrize.register_parametrization(m.q_proj, "weight", nn.Identity()), "at.0.q_proj must be exac"),
        (lambda m: prune.random_unstructured(m.k_proj, "weight", 0.5), "at.0.k_proj must hold a plain weight and bias"),
        (lambda m: parametrize.register_parametrization(m, "bias_k", nn.Identity()), "at.0.bias_k must be a plain"),
        (
            tied,
            "at.0.k_proj.weight must be a parameter of its own: tied ones would come apart; got at.0.k_proj.weight, ",
        ),
        (elsewhere, "at.0.q_proj must have no place in other modules; got at.0.head is it too"),
        (both_ways, "at.0.out_proj must have one place; got the module of at.0.q_proj too, cut otherwise"),
        (replaced, "at.0.attn_dropout must be an nn.Dropout: it would see the heads of one process; got Dropout1d"),
        (reattending, "at.0 must compute what MultiheadAttention does"),
        (lambda m: setattr(m, "__class__", Subclass), "at.0 must compute what MultiheadAttention does; write the plan"),
        (lambda m: setattr(m.attend, "shards", 2), "at.0 must not be sharded yet; got one that is, over 2 processes"),
    ],
)
def test_what_cannot_be_sharded_raises(change: Any, words: str) -> None:
    model = nn.ModuleDict({"at": nn.ModuleList([MultiheadAttention(D, H, add_bias_kv=True)])})
    change(model["at"][0])
    with pytest.raises(ValueError, match=r"^tp_plan: ") as caught:
        tp_plan(model)
    assert words in str(caught.value)


def test_a_model_without_layers_of_ours() -> None:
    model = nn.ModuleDict({"body": nn.TransformerEncoderLayer(D, H, 8), "head": nn.Linear(D, 2)})
    with pytest.raises(
        ValueError, match=r"call upgrade\(model\) first; got body \(TransformerEncoderLayer\), body.self"
    ):
        tp_plan(model)
    with pytest.raises(ValueError, match="hold layers of headwise's"):
        tp_plan(nn.Linear(D, D))
    with pytest.raises(ValueError, match="must be a module; got dict"):
        tp_plan({})


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SHARDS, B, L, S = 2, 2, 3, 5
MASKS: dict[str, masks.Mask] = {
    "each head": masks.dense(drawn(B, H, L, S) > 0),
    "all heads": masks.dense(drawn(B, 1, L, S) > 0),
    "a bias of each": masks.bias(drawn(1, H, 1, S)) & masks.causal(),
    "torch's": masks.from_torch(drawn(B * H, L, S) > 0, drawn(B, S) > 1, True),
    "a sample's": masks.from_torch(drawn(B, L, S)),
    "either": masks.dense(drawn(1, H, L, S) > 0) | ~masks.dense(drawn(B, 1, 1, S, seed=2) > 0),
    "appended": appended(masks.dense(drawn(B, H, 1, S - 1) > 0), 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_heads_of_one_process(name: str) -> None:
    whole = Size(B, H, L, S, torch.device("cpu"))
    want, own = lower(MASKS[name], whole), []
    visible = visible_keys(MASKS[name], whole)
    for rank in range(SHARDS):
        mesh: Any = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: SHARDS)
        mine = whole._replace(heads=H // SHARDS)
        mask = parallel._own(mesh, MASKS[name])
        own.append(lower(mask, mine))
        heads = slice(rank * H // SHARDS, (rank + 1) * H // SHARDS)
        seen = visible_keys(mask, mine)
        assert (seen is None) == (visible is None)
        if visible is not None and seen is not None:
            assert torch.equal(seen.expand(B, H // SHARDS, 1, S), visible.expand(B, H, 1, S)[:, heads])
    for part in ("keep", "bias"):
        parts, all_heads = [getattr(lowered, part) for lowered in own], getattr(want, part)
        if all_heads is None:
            assert parts == [None] * SHARDS
        else:
            joined = torch.cat([one.expand(B, H // SHARDS, L, S) for one in parts], dim=1)
            assert torch.equal(joined, all_heads.expand(B, H, L, S))
    assert {lowered.causal for lowered in own} == {want.causal}


def test_a_mask_that_speaks_of_the_heads_of_one_process_is_refused() -> None:
    """As in one process: (B*H, L, S) counts all heads."""
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: SHARDS)
    mask = masks.from_torch(drawn(B * H // SHARDS, L, S) > 0)
    assert mask is not None
    with pytest.raises(ValueError, match="with B = 2, H = 4"):
        lower(parallel._own(mesh, mask), Size(B, H // SHARDS, L, S, torch.device("cpu")))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("call", ["self", "memory", "apart"])
def test_half_of_a_packed_projection_by_hand_raises(call: str, pieces: int) -> None:
    """Its first rows would be cut in three somewhere, and heads mixed, in silence."""
    model = MultiheadAttention(16, H, batch_first=True, fused_qkv=True)
    for name in ("in_proj_weight", "in_proj_bias"):
        kept = [part.chunk(2)[0] for part in getattr(model, name).detach().chunk(pieces)]
        setattr(model, name, nn.Parameter(torch.cat(kept)))
    model.out_proj = nn.Linear(8, 16)
    x, y, z = torch.randn(3, B, L, 16).unbind()
    inputs = {"self": (x, x, x), "memory": (x, y, y), "apart": (x, y, z)}[call]
    with pytest.raises(RuntimeError, match=r"split|invalid for input"):
        model(*inputs, need_weights=False)


class Cumulative(EncoderBlock):
    """Looks across the inner width, which one process has a part of."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.linear2(self.linear1(x).cumsum(-1))


def hooked() -> nn.Module:
    block = EncoderBlock(D, H, activation=nn.SiLU())
    block.activation.register_forward_hook(lambda _, __, out: out / out.norm(dim=-1, keepdim=True))
    return block


def replaced() -> nn.Module:
    block = EncoderBlock(D, H)
    block._feed_forward = lambda x: x
    return block


@pytest.mark.parametrize("make", [lambda: Cumulative(D, H), hooked, replaced], ids=["subclass", "hook", "replaced"])
def test_a_feed_forward_that_was_changed_stays_whole(make: Any) -> None:
    assert list(tp_plan(make())) == names("self_attn")


@pytest.mark.parametrize("where", ["", "attend"])
def test_a_replaced_forward_is_refused(where: str) -> None:
    attention = MultiheadAttention(D, H)
    part = attention.get_submodule(where)
    part.forward = part.forward
    with pytest.raises(ValueError, match="forward"):
        tp_plan(attention)
