"""Other people's attention with given weights, for the columns beside torch's: the same numbers, asserted.

Each is called in its best form: direct SDPA by hand (one product for the three projections, a flag instead of a mask
where one does, loops over what hides nothing), the packages' modules as published. `make bench` installs the packages;
what is not there says so in its cells.

Letters: B batch, L and S positions, D model width, H heads, G key/value heads, K head width, P packed positions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from benchmarks.harness import Call

Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # attention of heads: (B, H, L, K) three times, (B, H, L, K)
NAMES = ("direct SDPA", "Hugging Face", "x-transformers", "FlexAttention", "nested")
MISSING = "not installed"
NO_TRAINING = "no training on CPU"


def missing(package: str) -> bool:
    """Whether a package is not there."""
    return importlib.util.find_spec(package) is None


class Projected(nn.Module):
    """An attention layer by hand with a copy of torch's weights: projections, `core` on heads, the last projection."""

    def __init__(self, theirs: nn.MultiheadAttention, core: Core, *, separate: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(part.detach().clone()) for part in (theirs.in_proj_weight, theirs.in_proj_bias)
        )
        self.out = nn.Linear(theirs.embed_dim, theirs.embed_dim, device=self.weight.device, dtype=self.weight.dtype)
        self.out.load_state_dict(theirs.out_proj.state_dict())
        self.heads, self.core, self.separate = theirs.num_heads, core, separate

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) to the same, or nested."""
        if self.separate:  # nested tensors do not go from one product to three strided parts
            three = [F.linear(x, *part) for part in zip(self.weight.chunk(3), self.bias.chunk(3), strict=True)]
        else:
            three = list(F.linear(x, self.weight, self.bias).chunk(3, -1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in three)
        out: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return out


class Packed(nn.Module):
    """`Projected` on the real positions alone, as one row, and zeros elsewhere: packing by hand."""

    def __init__(self, layer: Projected, keep_BL: Tensor) -> None:
        super().__init__()
        self.layer, self.real = layer, keep_BL.flatten().nonzero().squeeze(1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) to the same."""
        rows = x.flatten(0, 1)
        out = self.layer(rows.index_select(0, self.real)[None])[0]
        return torch.zeros_like(rows).index_copy(0, self.real, out).view_as(x)


def each(lengths: Sequence[int], causal: bool) -> Core:
    """SDPA of one document after the other in a row."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        three = (part.split(list(lengths), 2) for part in (q, k, v))
        parts = [F.scaled_dot_product_attention(*part, is_causal=causal) for part in zip(*three, strict=True)]
        return torch.cat(parts, 2)

    return core


def padded_documents(lengths: Sequence[int], causal: bool, device: Any) -> Core:
    """SDPA of the documents of a row as a padded batch."""
    count, longest = len(lengths), max(lengths)
    keep = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    real = keep.flatten().nonzero().squeeze(1)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def pad(part: Tensor) -> Tensor:
            row = part[0].transpose(0, 1)
            whole = row.new_zeros(count * longest, *row.shape[1:]).index_copy(0, real, row)
            return whole.unflatten(0, (count, longest)).transpose(1, 2)

        mask = None if causal else keep[:, None, None]  # causal: padding comes after what is real
        out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), attn_mask=mask, is_causal=causal)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, real).transpose(0, 1)[None]

    return core


def chunks(keep_LS: Tensor, left: int, right: int) -> Core:
    """SDPA of runs of queries with the keys that a window leaves them."""
    L, size = len(keep_LS), 2 * (left + right + 1)
    runs = [(start, max(0, start - left), min(L, start + size + right)) for start in range(0, L, size)]
    masks = [keep_LS[start : start + size, low:high] for start, low, high in runs]

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, start : start + size], k[:, :, low:high], v[:, :, low:high], attn_mask=mask
            )
            for (start, low, high), mask in zip(runs, masks, strict=True)
        ]
        return torch.cat(parts, 2)

    return core


def nested(lengths: Sequence[int], device: Any) -> Callable[[Tensor], Tensor]:
    """Packed rows (P, ...) as a jagged nested tensor, which knows its shortest and longest sample."""
    offsets = F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0))
    shortest, longest = min(lengths), max(lengths)

    def nest(rows: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=shortest, max_seqlen=longest)

    with quiet():  # SDPA makes one of the older layout on the CPU, the first of which says that it is a prototype
        torch.nested.as_nested_tensor([torch.zeros(1)])
    return nest


def nested_documents(lengths: Sequence[int], device: Any, *, causal: bool = False) -> Core:
    """SDPA of the documents of a row as a nested tensor."""
    nest = nested(lengths, device)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():  # nested tensors cannot be made in it
            with torch.inference_mode(False), torch.no_grad():
                return core(q, k, v)
        three = (nest(part[0].transpose(0, 1)).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(*three, is_causal=causal)
        return out.transpose(1, 2).values().transpose(0, 1)[None]

    return core


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(keep: Callable[..., Tensor], batch: int | None, length: int, device: Any) -> Core | str:
    """Compiled FlexAttention under a rule `keep(b, h, query, key)`; or why it does not compile here."""
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = create_block_mask(keep, batch, None, length, length, device=device)
    run = _compiled()

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q, k, v, block_mask=blocks)

    return core


def compiles(call: Callable[[], Any]) -> str | None:
    """Why a compiled call fails, shortly; None where it runs."""
    try:
        call()
    except Exception as error:  # a missing compiler, a size that inductor does not take: all say it in the cell
        return f"fails: {type(error).__name__}"
    return None


def hugging_face_core(keep: Tensor) -> Core | str:
    """transformers' SDPA attention function with a mask."""
    if missing("transformers"):
        return MISSING
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = types.SimpleNamespace(is_causal=False)
    return lambda q, k, v: sdpa_attention_forward(module, q, k, v, keep)[0].transpose(1, 2)


def hugging_face_layer(
    theirs: nn.MultiheadAttention,
    mask: Tensor | None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    weights: bool = False,
) -> nn.Module | str:
    """transformers' CLIP attention: its plainest layer with biases, as `layer(x)`."""
    if missing("transformers"):
        return MISSING
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPAttention

    config = CLIPVisionConfig(
        hidden_size=theirs.embed_dim,
        num_attention_heads=theirs.num_heads,
        attention_dropout=dropout,
        attn_implementation="eager" if weights else "sdpa",
    )
    layer = CLIPAttention(config).to(theirs.in_proj_weight)
    state = {f"out_proj.{name}": value for name, value in theirs.out_proj.state_dict().items()}
    for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        state |= {f"{name}_proj.weight": weight, f"{name}_proj.bias": bias}
    layer.load_state_dict(state)
    options = {"is_causal": True} if causal and mask is None else {}
    return _Taking(layer, lambda x: layer(x, attention_mask=mask, **options))


def x_transformers_core(keep: Tensor) -> Core | str:
    """x-transformers' `Attend` with a mask."""
    if missing("x_transformers"):
        return MISSING
    with quiet():
        from x_transformers.attend import Attend
    attend = Attend(flash=True)
    return lambda q, k, v: attend(q, k, v, mask=keep.expand(1, 1, *keep.shape[-2:]))[0]


def x_transformers_layer(
    theirs: nn.MultiheadAttention,
    keep: Tensor | None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    weights: bool = False,
) -> nn.Module | str:
    """x-transformers' `Attention`, which has no biases: torch's have to be 0. It makes padded positions 0."""
    if missing("x_transformers"):
        return MISSING
    with quiet():
        from x_transformers.x_transformers import Attention
    heads = theirs.num_heads
    layer = Attention(
        theirs.embed_dim,
        dim_head=theirs.head_dim,
        heads=heads,
        causal=causal,
        flash=not weights,
        dropout=dropout,
    ).to(theirs.in_proj_weight)
    state = dict(zip(("to_q.weight", "to_k.weight", "to_v.weight"), theirs.in_proj_weight.chunk(3), strict=True))
    layer.load_state_dict(state | {"to_out.weight": theirs.out_proj.weight})
    return _Taking(layer, lambda x: layer(x, mask=keep, return_intermediates=weights))


def hugging_face_decoding(ours: headwise.MultiheadAttention, x: Tensor, past: int) -> Call | str:
    """transformers' Llama attention on its static cache, without the rotary step, which ours does not take either.

    Its masks are rows of one tensor made beforehand: a model makes one a step, but for all its layers.
    """
    if missing("transformers"):
        return MISSING
    from transformers import LlamaConfig, StaticCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import LlamaAttention

    total, D = x.shape[1:]
    config = LlamaConfig(
        hidden_size=D,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        num_hidden_layers=1,
        attention_bias=True,
        attn_implementation="sdpa",
    )
    layer = LlamaAttention(config, 0).to(x)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).load_state_dict(getattr(ours, name).state_dict())
    layer.o_proj.load_state_dict(ours.out_proj.state_dict())
    layer.eval()
    seen = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()[None, None]

    def step(x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        shape = (*x.shape[:-1], -1, layer.head_dim)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        k, v = cache.update(k, v, 0)
        out, _ = sdpa_attention_forward(layer, q, k, v, mask, scaling=layer.scaling)
        result: Tensor = layer.o_proj(out.reshape(*x.shape[:-1], -1).contiguous())
        return result

    with torch.inference_mode():
        start = StaticCache(config, max_cache_len=total)
        step(x[:, :past], start, seen[:, :, :past])

    @torch.inference_mode()
    def run() -> Tensor:
        cache = copy.deepcopy(start)
        return torch.cat([step(x[:, at : at + 1], cache, seen[:, :, at : at + 1]) for at in range(past, total)], 1)

    return run


class _Taking(nn.Module):
    """A layer whose call takes x alone."""

    def __init__(self, layer: nn.Module, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Any:
        """`call`."""
        return self.call(x)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings; x-transformers scripts a function at import, which torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def versions() -> str:
    """The packages that are there, as words to add to a line on the machine."""
    found = [name for name in ("transformers", "x-transformers") if not missing(name.replace("-", "_"))]
    return "".join(f", {name} {importlib.metadata.version(name)}" for name in found)
