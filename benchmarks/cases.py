"""What is measured: pairs of calls that give the same answer, headwise's and torch's best.

Letters: B batch, L length, D model width, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from benchmarks import peers
from benchmarks.harness import Call, Case, parts
from headwise.data.samples import collate, japanese_vowels

LARGE = (8, 512, 512, 8)  # B, L, D, H
SHORT = ((1, 1, 64, 4), (1, 16, 64, 4), (8, 16, 64, 4), (32, 24, 64, 4), (1, 16, 256, 8), (1, 128, 256, 8))
MASKS = ("none", "causal", "padding", "weights")
LAYERS = {  # which layer -> masks it is measured under
    "encoder layer": ("none", "causal", "padding"),
    "decoder layer": ("none", "causal", "padding", "causal, padding"),
    "six-layer encoder": ("none", "padding"),
}
SHORT_LAYER = (8, 16, 64, 4)  # where the calls around the products are what takes time


def lengths(batch: int, longest: int) -> Tensor:
    """Evenly spread from an eighth of the longest to the longest, as (B,) integers."""
    return torch.linspace(longest / 8, longest, batch).round().long()


def attention_flops(B: int, L: int, D: int) -> float:
    """Forward: four projections and the two products of attention, all positions, no mask taken into account."""
    return 8.0 * B * L * D * D + 4.0 * B * L * L * D


def large(mode: str, kind: str, *, fused: bool) -> Case:
    """Self-attention at B=8, L=512, D=512, H=8: forward in eval, forward and backward in train."""
    B, L, D, H = LARGE
    ours, theirs, x = _modules(B, L, D, H, fused=fused, training=mode == "train")
    padding = torch.arange(L) >= lengths(B, L)[:, None]
    future = nn.Transformer.generate_square_subsequent_mask(L)
    our_options = {
        "none": {"need_weights": False},
        "causal": {"need_weights": False, "is_causal": True},
        "padding": {"need_weights": False, "key_padding_mask": padding},
        "weights": {"need_weights": True},
    }[kind]
    their_options = {"torch": dict(our_options)}
    if kind == "causal":  # torch has no flag of its own: the mask, with and without the hint
        their_options = {
            "torch mask": {"need_weights": False, "attn_mask": future},
            "torch mask and hint": {"need_weights": False, "attn_mask": future, "is_causal": True},
        }
    flops = attention_flops(B, L, D)
    if mode == "eval":
        return Case(
            f"{mode} {kind}",
            _inference(lambda: ours(x, x, x, **our_options)[0]),
            {name: _inference(lambda o=o: theirs(x, x, x, **o)[0]) for name, o in their_options.items()},
            flops,
        )
    grad = torch.randn(B, L, D)
    return Case(
        f"{mode} {kind}",
        _step(ours, lambda: ours(x, x, x, **our_options)[0], grad),
        {name: _step(theirs, lambda o=o: theirs(x, x, x, **o)[0], grad) for name, o in their_options.items()},
        3 * flops,
    )


def layer(mode: str, which: str, kind: str, shape: tuple[int, int, int, int] = LARGE, *, fused: bool = False) -> Case:
    """torch's layers, and the same ones after `headwise.upgrade`; M = 4*D, padding from an eighth of the length on.

    In train a forward and backward pass from real positions, without dropout, which draws other numbers on each side.
    """
    B, L, D, H = shape
    sizes = {"d_model": D, "nhead": H, "dim_feedforward": 4 * D, "dropout": 0.0, "batch_first": True}
    layers = 1
    if which == "decoder layer":
        theirs: nn.Module = nn.TransformerDecoderLayer(**sizes)
    else:
        theirs = nn.TransformerEncoderLayer(**sizes)
    if which == "six-layer encoder":
        layers = 6
        theirs = nn.TransformerEncoder(theirs, layers)
    ours = headwise.upgrade(copy.deepcopy(theirs), fused_qkv=fused)
    padding = torch.arange(L) >= lengths(B, L)[:, None] if "padding" in kind else None
    future = nn.Transformer.generate_square_subsequent_mask(L) if "causal" in kind else None
    if which == "decoder layer":
        inputs = torch.randn(2, B, L, D).unbind(0)
        words = {"tgt_key_padding_mask": padding, "memory_key_padding_mask": padding}
        words |= {"tgt_mask": future, "tgt_is_causal": future is not None}
    else:
        inputs = (torch.randn(B, L, D),)
        words = {"src_key_padding_mask": padding, "is_causal": future is not None}
        words |= {"mask" if layers > 1 else "src_mask": future}
    attentions = 2 if which == "decoder layer" else 1
    flops = layers * (attentions * attention_flops(B, L, D) + 16.0 * B * L * D * D)
    name = f"{mode} {kind}"
    for model in (ours, theirs):
        model.train(mode == "train")
    if mode == "eval":
        calls = [_inference(lambda m=model: m(*inputs, **words)) for model in (ours, theirs)]
    else:
        grad = torch.randn(B, L, D)
        grad = grad if padding is None else grad.masked_fill(padding[..., None], 0)
        calls = [_step(model, lambda m=model: m(*inputs, **words), grad) for model in (ours, theirs)]
        flops *= 3
    return Case(name, calls[0], {"torch": calls[1]}, flops, padding=padding)


def short(mode: str, shape: tuple[int, int, int, int], *, fused: bool) -> Case:
    """A short call without mask or weights: forward in inference mode, or forward in train with gradients recorded."""
    B, L, D, H = shape
    ours, theirs, x = _modules(B, L, D, H, fused=fused, training=mode == "train")
    wrap: Callable[[Call], Call] = _inference if mode == "eval" else (lambda call: call)
    others: dict[str, nn.Module | str] = {  # x-transformers has no biases
        "direct SDPA": peers.Projected(theirs, F.scaled_dot_product_attention),
        "Hugging Face": peers.hugging_face_layer(theirs, None),
    }
    for other in others.values():
        if isinstance(other, nn.Module):
            other.train(mode == "train")
    return Case(
        f"{shape}",
        wrap(lambda: ours(x, x, x, need_weights=False)[0]),
        {"torch": wrap(lambda: theirs(x, x, x, need_weights=False)[0])},
        attention_flops(B, L, D),
        peers={
            name: other if isinstance(other, str) else wrap(lambda layer=other: parts(layer(x))[0])
            for name, other in others.items()
        },
    )


def classifier(mode: str) -> Case:
    """The classifier of `headwise demo` on its first batch; in train a whole step, AdamW's part of it too.

    Torch's side is the same model with `nn.MultiheadAttention` in the place of ours. Without dropout, so that both give
    the same numbers: torch's attention returns another memory layout, which makes dropout draw other units.
    """
    train, _ = japanese_vowels()
    x, padding, labels = collate([train[index] for index in range(0, 256, 8)])
    ours = headwise.SequenceClassifier(len(train.class_names), num_channels=train.num_channels, dropout=0.0)
    ours.embedding.fit_scale(train.values)
    theirs = with_torch_attention(ours)
    B, L, _ = x.shape
    D, layers = ours.config["embed_dim"], ours.config["num_layers"]
    flops = layers * (attention_flops(B, L, D) + 16.0 * B * L * D * D)
    if mode == "eval":
        for model in (ours, theirs):
            model.eval()
        return Case(
            mode, _inference(lambda: ours(x, padding)), {"torch": _inference(lambda: theirs(x, padding))}, flops
        )
    return Case(
        mode,
        _training(ours, x, padding, labels),
        {"torch": _training(theirs, x, padding, labels)},
        3 * flops,
    )


def with_torch_attention(model: headwise.SequenceClassifier) -> headwise.SequenceClassifier:
    """A copy whose blocks attend by `torch.nn.MultiheadAttention`, with the same weights."""
    model = copy.deepcopy(model)
    for block in model.encoder.layers:
        own = block.self_attn
        theirs = nn.MultiheadAttention(own.embed_dim, own.num_heads, own.dropout, batch_first=True)
        theirs.load_state_dict(own.state_dict())
        block.self_attn = theirs.train(own.training)
    return model


def _training(model: nn.Module, x: Tensor, padding: Tensor, labels: Tensor) -> Call:
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> Tensor:
        logits: Tensor = model(x, padding)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        return logits.detach()

    return run


def _modules(
    B: int, L: int, D: int, H: int, *, fused: bool, training: bool
) -> tuple[headwise.MultiheadAttention, nn.MultiheadAttention, Tensor]:
    theirs = nn.MultiheadAttention(D, H, batch_first=True)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=D**-0.5)
    ours = headwise.MultiheadAttention(D, H, batch_first=True, fused_qkv=fused)
    ours.load_state_dict(theirs.state_dict())
    return ours.train(training), theirs.train(training), torch.randn(B, L, D)


def _inference(call: Call) -> Call:
    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def _step(module: nn.Module, forward: Callable[[], Tensor], grad: Tensor) -> Call:
    def run() -> Tensor:
        module.zero_grad(set_to_none=True)
        out = forward()
        out.backward(grad)
        return out.detach()

    return run
