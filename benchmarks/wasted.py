"""What nobody needs and is not computed: padding, other documents, what lies outside a window, weights, a past.

Each case is built for a device, a dtype and sizes, so that benchmarks/gpu.py and the tests run the same ones.

Letters: B batch, L length, D model width, H heads, G key/value heads, K head width.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from benchmarks import peers
from benchmarks.cases import attention_flops, lengths
from benchmarks.harness import Call, Case, Clock, peak_bytes, times, wall
from benchmarks.peers import Core
from headwise import masks

SHARE = 0.9  # of a matrix product's FLOPs a second that dense attention reaches, at least
DRAWS = 8  # of dropout, to compare the mean and the variance


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    Attributes:
        device: of all tensors.
        dtype: of all tensors.
        rounded: what all numbers are rounded to before they are cast, so that a float64 twin sees the same ones.
        batch: B of the layers.
        length: L of the layers, padded from an eighth of it on.
        width: D.
        heads: H.
        documents: the lengths of the documents of one row, uneven and together the length of the windowed row.
        window: keys that a query sees.
        growth: lengths of the windowed rows whose times are compared.
        weights: L of the call that returns weights.
        past: tokens in the cache before decoding.
        steps: tokens that are decoded.
        compiled: whether FlexAttention is compiled and measured.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rounded: torch.dtype | None = None
    batch: int = 8
    length: int = 512
    width: int = 512
    heads: int = 8
    documents: tuple[int, ...] = (1021, 877, 701, 557, 401, 283, 173, 83)
    window: int = 128
    growth: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    weights: int = 2048
    past: int = 1024
    steps: int = 256
    compiled: bool = True

    @property
    def row(self) -> int:
        """Positions of the row of documents."""
        return sum(self.documents)

    @property
    def head_dim(self) -> int:
        """K."""
        return self.width // self.heads

    def cast(self, value: Tensor) -> Tensor:
        """To the device and the dtype."""
        value = value if self.rounded is None else value.to(self.rounded)
        return value.to(self.device, self.dtype)

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers, the same on every device and in every dtype."""
        return self.cast(torch.randn(*shape))

    def attention(self, *, dropout: float = 0.0) -> nn.MultiheadAttention:
        """torch's, with biases of 0: x-transformers has none."""
        theirs = nn.MultiheadAttention(self.width, self.heads, dropout, batch_first=True)
        with torch.no_grad():
            theirs.in_proj_weight.normal_(std=self.width**-0.5)
            theirs.out_proj.weight.normal_(std=self.width**-0.5)
            for parameter in theirs.parameters():
                parameter.copy_(parameter if self.rounded is None else parameter.to(self.rounded))
        return theirs.to(self.device, self.dtype)


TINY = Setting(  # the same code in a blink, for tests and `--quick`
    batch=3,
    length=24,
    width=32,
    heads=4,
    documents=(23, 13, 7),
    window=8,
    growth=(32, 64),
    weights=40,
    past=13,
    steps=5,
    compiled=False,
)


def beside(theirs: nn.MultiheadAttention) -> headwise.MultiheadAttention:
    """Ours with the same weights, in the default layout."""
    ours = headwise.MultiheadAttention(theirs.embed_dim, theirs.num_heads, theirs.dropout, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(theirs.in_proj_weight)


def dense(setting: Setting, mode: str) -> Case:
    """Nothing to leave out: what the machine can do."""
    B, L, D = setting.batch, setting.length, setting.width
    theirs = setting.attention()
    ours = beside(theirs)
    x, grad = setting.randn(B, L, D), setting.randn(B, L, D)

    def layer(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Call:
        return _call(mode, module, forward, x, grad)

    found = {
        "direct SDPA": peers.Projected(theirs, _sdpa(None)),
        "Hugging Face": peers.hugging_face_layer(theirs, None),
        "x-transformers": peers.x_transformers_layer(theirs, None),
    }
    baseline = layer(theirs, lambda x: theirs(x, x, x, need_weights=False)[0])
    return Case(
        f"dense, {mode}",
        layer(ours, lambda x: ours(x, x, x, need_weights=False)[0]),
        {"torch": baseline},
        attention_flops(B, L, D) * (1 if mode == "eval" else 3),
        peers=({"slow path": _slow_path(baseline)} if mode == "eval" else {}) | _layers(layer, found),
    )


def padded(setting: Setting, mode: str, *, causal: bool, queries: bool) -> Case:
    """A padded batch; with `queries` the padded query rows are said to be padding too, which torch cannot be told."""
    B, L = setting.batch, setting.length
    theirs = setting.attention()
    ours = beside(theirs)
    sizes = lengths(B, L)
    block = (torch.arange(L) >= sizes[:, None]).to(setting.device)
    future = torch.ones(L, L, dtype=torch.bool, device=setting.device).triu(1)
    scores = torch.zeros(L, L, dtype=setting.dtype, device=setting.device).masked_fill(future, float("-inf"))
    x, grad = setting.randn(B, L, setting.width), setting.randn(B, L, setting.width)
    grad = grad.masked_fill(block[..., None], 0) if queries else grad
    said = {"need_weights": False, "key_padding_mask": block}
    ways: dict[str, dict[str, Any]] = {"torch": said}
    if causal:
        hidden = torch.zeros_like(block, dtype=setting.dtype).masked_fill(block, float("-inf"))
        ways = {
            "torch bool masks": {**said, "attn_mask": future},
            "torch bool masks and hint": {**said, "attn_mask": future, "is_causal": True},
            "torch float masks": {**said, "attn_mask": scores, "key_padding_mask": hidden},
        }
    own = {**said, "is_causal": causal} | ({"query_padding_mask": block} if queries else {})

    def layer(module: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> Call:
        return _call(mode, module, forward or module, x, grad)

    baseline = {name: layer(theirs, lambda x, w=way: theirs(x, x, x, **w)[0]) for name, way in ways.items()}
    others: dict[str, Call | str] = {}
    if mode == "eval":
        others["slow path"] = _slow_path(next(iter(baseline.values())))
    keep = ~block
    seen = keep[:, None, None] & ~future if causal else keep[:, None, None]
    both = causal and setting.device == "cpu"  # the CPU's kernel takes a flag beside a mask, the others do not
    others |= _layers(
        layer,
        {
            "direct SDPA: mask": peers.Projected(theirs, _sdpa(keep[:, None, None] if both else seen, flag=both)),
            "Hugging Face": peers.hugging_face_layer(theirs, seen),
            # it makes padded rows 0, as ours where they are said to be padding: otherwise gradients differ
            "x-transformers": peers.x_transformers_layer(theirs, keep, causal=causal)
            if queries or mode == "eval"
            else "no gradient there",
        },
    )
    if queries:
        by_hand = peers.Projected(theirs, peers.each(sizes.tolist(), causal))
        others["direct SDPA: packed"] = layer(peers.Packed(by_hand, keep))
    others["FlexAttention"] = _flex(
        setting,
        mode,
        B,
        L,
        lambda b, h, i, j: keep[b, j] & (i >= j if causal else i >= 0),
        lambda core: layer(peers.Projected(theirs, core)),
    )
    others["nested"] = others["headwise nested"] = "computes real rows"
    if queries:
        row = peers.Projected(theirs, _sdpa(None, flag=causal), separate=True)
        nest = peers.nested(sizes.tolist(), setting.device)
        others["nested"] = "no causal on CPU" if both else _nested_call(mode, row, row, nest, x[keep], grad[keep])
        others["headwise nested"] = _nested_call(
            mode, ours, lambda x: ours(x, x, x, need_weights=False, is_causal=causal)[0], nest, x[keep], grad[keep]
        )
    name = f"padded{' and causal' if causal else ''}{', queries too' if queries else ''}, {mode}"
    return Case(name, layer(ours, lambda x: ours(x, x, x, **own)[0]), baseline, 0.0, padding=block, peers=others)


def documents(setting: Setting, mode: str, *, causal: bool) -> Case:
    """Several documents in one row, each attending to itself alone."""
    ids = torch.repeat_interleave(torch.arange(len(setting.documents)), torch.tensor(setting.documents))
    ids = ids.to(setting.device)
    keep = ids[:, None] == ids
    keep = keep.tril() if causal else keep
    mask = masks.documents(ids[None])
    mask = mask & masks.causal() if causal else mask
    hand: dict[str, Core | str] = {
        "direct SDPA: loop": peers.each(setting.documents, causal),
        "direct SDPA: padded": peers.padded_documents(setting.documents, causal, setting.device),
    }
    if causal and setting.device == "cpu":
        hand["nested"] = "no causal on CPU"
    else:
        hand["nested"] = peers.nested_documents(setting.documents, setting.device, causal=causal)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = ids[i] == ids[j]
        return same & (i >= j) if causal else same

    name = f"{len(setting.documents)} documents{', causal' if causal else ''} in {setting.row:,}, {mode}"
    return _row(setting, mode, name, setting.row, mask, keep, hand, rule)


def window(setting: Setting, mode: str, *, left: int, right: int) -> Case:
    """Keys at most `left` before and `right` after the query."""
    L = setting.row
    keep = _band(L, left, right, setting.device)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j <= left) & (j - i <= right)

    hand: dict[str, Core | str] = {"direct SDPA: runs": peers.chunks(keep, left, right), "nested": "no window"}
    name = f"window ({left}, {right}) at {L:,}, {mode}"
    return _row(setting, mode, name, L, masks.window(left, right), keep, hand, rule)


def dropout(setting: Setting) -> Case:
    """Forward and backward in training with dropout: other numbers on each side, of the same mean and variance."""
    p = 0.1
    theirs = setting.attention(dropout=p)
    ours = beside(theirs)
    x, grad = (setting.randn(setting.batch, setting.length, setting.width) for _ in range(2))
    forwards: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
        "headwise": (ours, lambda x: ours(x, x, x, need_weights=False)[0]),
        "torch": (theirs, lambda x: theirs(x, x, x, need_weights=False)[0]),
    }
    others: dict[str, Any] = {
        "direct SDPA": peers.Projected(theirs, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=p)),
        "Hugging Face": peers.hugging_face_layer(theirs, None, dropout=p),
        "x-transformers": peers.x_transformers_layer(theirs, None, dropout=p),
    }
    for name, module in others.items():
        if isinstance(module, nn.Module):
            forwards[name] = (module, _first(module))
    calls = {name: _call("train", module, forward, x, grad) for name, (module, forward) in forwards.items()}

    def same() -> None:
        with torch.no_grad():
            ours.dropout, theirs.dropout = 0.0, 0.0
            plain = forwards["torch"][1](x)
            torch.testing.assert_close(
                forwards["headwise"][1](x), plain, rtol=1e-4, atol=1e-5 if x.dtype == torch.float32 else 0.05
            )
            ours.dropout, theirs.dropout = p, p
        variances = {}
        slack = 3 / math.sqrt(setting.batch * setting.length)  # far beyond chance: each row and head draws for itself
        for name, (_, forward) in forwards.items():
            draws = torch.stack([forward(x).detach().float() for _ in range(DRAWS)])
            variances[name] = float(draws.var(0).mean())
            off = float((draws.mean(0) - plain.float()).square().mean()) * DRAWS / variances[name]
            assert abs(off - 1) < slack, (
                f"dropout, {name}: the mean of {DRAWS} draws is off by {off:.2f} of what it may be"
            )
        for name, variance in variances.items():
            part = variance / variances["torch"]
            assert abs(part - 1) < slack, f"dropout, {name}: the variance is {part:.3f} of torch's"

    name = f"dropout {p} at {setting.length}, train"
    rest = {peer: calls.get(peer, module) for peer, module in others.items()} | {
        "FlexAttention": "no dropout",
        "nested": "not padded",
    }
    return Case(name, calls["headwise"], {"torch": calls["torch"]}, 0.0, peers=rest, same=same)


def weights(setting: Setting) -> Case:
    """The output and the weights averaged over heads, in eval."""
    theirs = setting.attention()
    ours = beside(theirs)
    x = setting.randn(1, setting.weights, setting.width)
    theirs_slow = _call("eval", theirs, lambda x: theirs(x, x, x), x, x)
    others: dict[str, Call | str] = {
        "slow path": _slow_path(theirs_slow),
        "direct SDPA": "no weights",
        "FlexAttention": "no weights",
        "nested": "no weights",
    }
    eager = peers.hugging_face_layer(theirs, None, weights=True)
    others["Hugging Face"] = (
        eager if isinstance(eager, str) else _call("eval", eager, lambda x: _averaged(*eager(x)), x, x)
    )
    flat = peers.x_transformers_layer(theirs, None, weights=True)
    if isinstance(flat, str):
        others["x-transformers"] = flat
    else:

        def averaged(x: Tensor) -> tuple[Tensor, Tensor]:
            out, between = flat(x)
            return _averaged(out, between.post_softmax_attn)

        others["x-transformers"] = _call("eval", flat, averaged, x, x)
    return Case(
        f"averaged weights at {setting.weights:,}, eval",
        _call("eval", ours, lambda x: ours(x, x, x), x, x),
        {"torch": theirs_slow},
        0.0,
        peers=others,
    )


def decode(setting: Setting) -> Case:
    """Tokens one by one after a past, 8 query heads over 2 of keys and values; the cache is copied before each run."""
    D, H, K, past, steps = setting.width, setting.heads, setting.head_dim, setting.past, setting.steps
    G = max(1, H // 4)
    ours = headwise.MultiheadAttention(D, H, batch_first=True, num_kv_heads=G)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=D**-0.5)
            parameter.copy_(parameter if setting.rounded is None else parameter.to(setting.rounded))
    ours = ours.to(setting.device, setting.dtype).eval()
    x = setting.randn(1, past + steps, D)
    tokens = x[:, past:].split(1, 1)
    with torch.inference_mode():
        start = headwise.StaticCache(max_length=past + steps)
        ours(*[x[:, :past]] * 3, need_weights=False, is_causal=True, cache=start)

    @torch.inference_mode()
    def run() -> Tensor:
        cache = copy.deepcopy(start)
        return torch.cat([ours(x, x, x, need_weights=False, is_causal=True, cache=cache)[0] for x in tokens], 1)

    @torch.inference_mode()
    def by_hand() -> Tensor:
        keys, values = before.clone().unbind(0)
        parts = []
        for step, token in enumerate(tokens, past):
            keys[:, :, step] = ours.k_proj(token).unflatten(-1, (G, K))[:, 0]
            values[:, :, step] = ours.v_proj(token).unflatten(-1, (G, K))[:, 0]
            q = ours.q_proj(token).view(1, G, H // G, K)  # the queries of a group as rows: no key is repeated
            out = F.scaled_dot_product_attention(q, keys[:, :, : step + 1], values[:, :, : step + 1])
            parts.append(ours.out_proj(out.reshape(1, 1, D)))
        return torch.cat(parts, 1)

    with torch.inference_mode():
        before = x.new_zeros(2, 1, G, past + steps, K)
        for whole, project in zip(before, (ours.k_proj, ours.v_proj), strict=True):
            whole[:, :, :past] = project(x[:, :past]).unflatten(-1, (G, K)).transpose(1, 2)
    return Case(
        f"decoding {steps} after {past:,}, {H} heads over {G}",
        run,
        {"Hugging Face's static cache": peers.hugging_face_decoding(ours, x, past)},
        0.0,
        peers={
            "direct SDPA": by_hand,
            "Hugging Face": "the baseline",
            "x-transformers": "no static cache",
            "FlexAttention": "no cache",
            "nested": "no cache",
        },
    )


def growth(setting: Setting, rounds: int, clock: Clock = wall) -> Iterator[tuple[int, float, float]]:
    """For each length: seconds of a windowed forward and backward, and its ratio to the first over the length's."""
    left = setting.window - 1
    calls: dict[str, Call] = {}
    for L in setting.growth:
        leaves = [setting.randn(1, L, setting.heads, setting.head_dim) for _ in range(4)]
        grad = leaves.pop().transpose(1, 2)
        calls[str(L)] = _core_call("train", _headwise(masks.window(left, 0)), leaves, grad)
        hand = _core_call("train", peers.chunks(_band(L, left, 0, setting.device), left, 0), leaves, grad)
        for own, other in zip(calls[str(L)](), hand(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5 if own.dtype == torch.float32 else 0.05)
    seconds = {
        int(L): statistics.median(found) for L, found in times(calls, rounds=rounds, repeats=1, clock=clock).items()
    }
    first = setting.growth[0]
    for L, found in seconds.items():
        yield L, found, found / seconds[first] / (L / first)


def memory(setting: Setting) -> tuple[int, int]:
    """Bytes that a call with averaged weights holds at most beyond its inputs: ours, and torch's least."""
    case = weights(setting)
    ways = [*case.theirs.values(), case.peers["slow path"]]
    return peak_bytes(case.ours), min(peak_bytes(way) for way in ways if not isinstance(way, str))


def table(setting: Setting) -> Iterator[Case]:
    """The rows with their floors; built one by one, since compiling takes a while."""
    floors = {
        ("eval", False, False): 2.0,
        ("train", False, False): 1.4,
        ("eval", True, False): 3.0,
        ("train", True, False): 2.0,
        ("eval", True, True): None,
        ("train", True, True): 2.3,
    }
    for mode in ("eval", "train"):
        case = dense(setting, mode)
        case.share = SHARE
        yield case
    for (mode, queries, causal), floor in floors.items():
        case = padded(setting, mode, causal=causal, queries=queries)
        case.floor = floor
        yield case
    half = setting.window // 2
    for mode, floor in (("train", 5.0), ("eval", None)):
        for causal in (False, True):
            case = documents(setting, mode, causal=causal)
            case.floor = floor
            yield case
        for left, right in ((setting.window - 1, 0), (half, half)):
            case = window(setting, mode, left=left, right=right)
            case.floor = floor
            yield case
    for build, floor in ((dropout, 1.4), (weights, 1.5), (decode, 1.1)):
        case = build(setting)
        case.floor = floor
        yield case


def _row(
    setting: Setting,
    mode: str,
    name: str,
    L: int,
    mask: masks.Mask,
    keep: Tensor,
    hand: dict[str, Core | str],
    rule: Callable[..., Tensor],
) -> Case:
    """A case of heads alone: the baseline is one SDPA with the mask."""
    shape = (1, L, setting.heads, setting.head_dim)
    leaves = [setting.randn(*shape) for _ in range(3)]  # heads beside each other, as projections leave them
    grad = setting.randn(*shape).transpose(1, 2)

    def call(core: Core) -> Call:
        return _core_call(mode, core, leaves, grad)

    cores: dict[str, Core | str] = {
        **hand,
        "Hugging Face": peers.hugging_face_core(keep),
        "x-transformers": peers.x_transformers_core(keep),
    }
    others: dict[str, Call | str] = {
        name: core if isinstance(core, str) else call(core) for name, core in cores.items()
    }
    others["FlexAttention"] = _flex(setting, mode, None, L, rule, call)
    return Case(name, call(_headwise(mask)), {"SDPA": call(_sdpa(keep))}, 0.0, peers=others)


def _headwise(mask: masks.Mask) -> Core:
    return lambda q, k, v: headwise.attention(q, k, v, mask=mask)


def _sdpa(mask: Tensor | None, *, flag: bool = False) -> Core:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=flag)


def _band(L: int, left: int, right: int, device: str) -> Tensor:
    return torch.ones(L, L, dtype=torch.bool, device=device).tril(right).triu(-left)


def _averaged(out: Tensor, weights_BHLS: Tensor) -> tuple[Tensor, Tensor]:
    return out, weights_BHLS.mean(1)


def _first(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = module(x)
        return out[0] if isinstance(out, tuple) else out

    return forward


def _call(mode: str, module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor, grad: Tensor) -> Call:
    """Eval: the call in inference mode. Train: forward and backward, to the input too, as within a model."""
    module.train(mode == "train")
    if mode == "eval":
        return _inference(lambda: forward(x))
    x = x.clone().requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        module.zero_grad(set_to_none=True)
        x.grad = None
        out = forward(x)
        out.backward(grad)
        return out.detach(), x.grad

    return run


def _core_call(mode: str, core: Core, leaves: list[Tensor], grad: Tensor) -> Call:
    """The same for attention of heads; the leaves are (B, L, H, K)."""
    if mode == "eval":
        return _inference(lambda: core(*(leaf.transpose(1, 2) for leaf in leaves)))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def run() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = core(*(leaf.transpose(1, 2) for leaf in leaves))
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    return run


def _inference(call: Call) -> Call:
    def run() -> Any:
        with torch.inference_mode():
            return call()

    return run


def _slow_path(call: Call) -> Call:
    """torch's call with its fast path switched off for the whole process, which is faster on most CPUs."""

    def run() -> Any:
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return call()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    return run


def _layers(layer: Callable[..., Call], found: dict[str, nn.Module | str]) -> dict[str, Call | str]:
    return {name: what if isinstance(what, str) else layer(what, _first(what)) for name, what in found.items()}


def _flex(
    setting: Setting, mode: str, batch: int | None, L: int, rule: Callable[..., Tensor], call: Callable[[Core], Call]
) -> Call | str:
    """FlexAttention's call where it compiles; on a CPU it cannot train."""
    if mode == "train" and setting.device == "cpu":
        return peers.NO_TRAINING
    if not setting.compiled:
        return "not compiled"
    compiled = call(peers.flex(rule, batch, L, setting.device))
    return peers.compiles(compiled) or compiled


def _nested_call(
    mode: str,
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    nest: Callable[[Tensor], Tensor],
    rows: Tensor,
    grad: Tensor,
) -> Call:
    """A layer's call on a nested tensor, which is what goes in and comes out."""
    if mode == "eval":
        return _call(mode, module, forward, nest(rows), rows)
    run = _call(mode, module, lambda rows: forward(nest(rows)).values(), rows, grad)
    return lambda: tuple(map(nest, run()))
