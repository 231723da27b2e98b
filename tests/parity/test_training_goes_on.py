"""Training goes on after `upgrade` as it would have: the loss curves of stock and upgraded models coincide."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.parity.pair import LAYOUTS
from torch import nn

import headwise

B, L, S, D, H, M, V, STEPS, BEFORE = 3, 7, 11, 22, 2, 13, 17, 40, 5
layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())
nested = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


class Tagger(nn.Module):
    """A label for each token, by `nn.TransformerEncoder`, which computes padding in training."""

    def __init__(self, norm_first):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, H, M, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D))
        self.head = nn.Linear(D, V)

    def forward(self, source, target, source_padding, target_padding):
        return self.head(self.encoder(self.embedding(source), src_key_padding_mask=source_padding))


class Translator(nn.Module):
    """The next token of a target, by `nn.Transformer` with a causal mask and padding on both sides."""

    def __init__(self, norm_first):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.transformer = nn.Transformer(D, H, 1, 2, M, 0.0, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(D, V)

    def forward(self, source, target, source_padding, target_padding):
        future = nn.Transformer.generate_square_subsequent_mask(L)
        masks = {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding}
        return self.head(
            self.transformer(
                self.embedding(source),
                self.embedding(target),
                tgt_mask=future,
                tgt_key_padding_mask=minus_inf(target_padding),
                **masks,
            )
        )


def minus_inf(padding):
    """Of the dtype of the causal mask: torch warns of two kinds of masks."""
    return torch.zeros(padding.shape).masked_fill(padding, -torch.inf)


def losses(model, optimizer, steps, seed):
    """The loss over real positions at each step, on tokens and lengths that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(steps):
        source, target = (torch.randint(V, (B, n), generator=generator) for n in (S, L))
        source_padding, target_padding = (
            torch.arange(n) >= torch.randint(2, n + 1, (B, 1), generator=generator) for n in (S, L)
        )
        out = model(source, target, source_padding, target_padding)
        tokens, padding = (source, source_padding) if out.shape[1] == S else (target, target_padding)
        loss = nn.functional.cross_entropy(out[~padding], (tokens[~padding] + 1) % V)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


@pytest.mark.thin(2)
@nested
@layouts
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("kind", [Tagger, Translator])
def test_loss_curves_coincide(kind, norm_first, fused_qkv):
    """AdamW is built, and has taken steps, before the upgrade; nothing is dropped, padding has no loss."""
    torch.manual_seed(0)
    theirs = kind(norm_first).double()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1) for model in (theirs, ours)]
    torch.set_default_dtype(torch.float64)  # for torch's causal mask
    try:
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            losses(model, optimizer, BEFORE, seed=1)
        headwise.upgrade(ours, optimizers[1], fused_qkv=fused_qkv)
        want, got = (
            losses(model, optimizer, STEPS, seed=2) for model, optimizer in zip((theirs, ours), optimizers, strict=True)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert want[-5:].mean() < want[:5].mean() - 0.1  # it learns
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    headwise.downgrade(ours)
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=1e-8, atol=1e-8)
