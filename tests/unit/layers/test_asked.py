"""What `who_asks` sees: every usual way in which code around a layer asks for its class, and what is no question."""

from __future__ import annotations

import functools

import pytest
from torch import nn
from torch.nn import MultiheadAttention as Attention

from headwise.layers.asked import who_asks

KINDS = (nn.Linear, nn.MultiheadAttention)


def helper(module):
    return isinstance(module, nn.MultiheadAttention)


def harmless(module):
    return isinstance(module, nn.Linear)


class ByName(nn.Module):
    def forward(self, x):
        return isinstance(self.attn, nn.MultiheadAttention)


class ByAnotherName(nn.Module):
    def forward(self, x):
        return isinstance(self.attn, Attention)


class ByTuple(nn.Module):
    def forward(self, x):
        return isinstance(self.attn, KINDS)


class ByType(nn.Module):
    def forward(self, x):
        return type(self.attn) is nn.MultiheadAttention


class BySubclass(nn.Module):
    def forward(self, x):
        return issubclass(self.attn.__class__, nn.MultiheadAttention)


class ByMatch(nn.Module):
    def forward(self, x):
        match self.attn:
            case nn.MultiheadAttention():
                return x


class ByHelper(nn.Module):
    def forward(self, x):
        return helper(self.attn)


class InComprehension(nn.Module):
    def forward(self, x):
        return [one for one in self.children() if isinstance(one, nn.MultiheadAttention)]


class InProperty(nn.Module):
    @property
    def forward_kind(self):
        return isinstance(self.attn, nn.MultiheadAttention)


class InCachedProperty(nn.Module):
    @functools.cached_property
    def kind(self):
        return isinstance(self.attn, nn.MultiheadAttention)


class InClassMethod(nn.Module):
    @classmethod
    def takes(cls, module):
        return isinstance(module, nn.MultiheadAttention)


class WithMisleadingName(nn.Module):
    def get_representation(self, x):
        return isinstance(self.attn, nn.MultiheadAttention)


class Inherited(ByName):
    def forward_later(self, x):
        return x


class AtSetUp(nn.Module):
    def __init__(self):
        super().__init__()
        assert isinstance(nn.MultiheadAttention(2, 1), nn.MultiheadAttention)

    def _init_weights(self, module):
        return isinstance(module, nn.MultiheadAttention)

    def reset_parameters(self):
        return isinstance(self.attn, nn.MultiheadAttention)

    def extra_repr(self):
        return str(isinstance(self.attn, nn.MultiheadAttention))


class Others(nn.Module):
    """Builds one, asks for others."""

    def build(self):
        return nn.MultiheadAttention(2, 1)

    def forward(self, x):
        return harmless(self.attn) or isinstance(self.attn, nn.Linear) or isinstance(x, (list, tuple))


ASKING = [
    ByName, ByAnotherName, ByTuple, ByType, BySubclass, ByMatch, ByHelper, InComprehension, InProperty,
    InCachedProperty, InClassMethod, WithMisleadingName,
]  # fmt: skip


@pytest.mark.parametrize("kind", ASKING)
def test_a_question_is_seen(kind):
    method = next(name for name in vars(kind) if not name.startswith("__"))
    assert who_asks([nn.Sequential(), kind()], (nn.MultiheadAttention,)) == f"{kind.__name__}.{method}"


def test_a_question_of_a_base_class_is_seen():
    assert who_asks([Inherited()], (nn.MultiheadAttention,)) == "ByName.forward"


@pytest.mark.parametrize("kind", [AtSetUp, Others, nn.TransformerEncoder, nn.Module])
def test_what_is_no_question(kind):
    made = kind.__new__(kind)
    assert who_asks([made], (nn.MultiheadAttention,)) is None


def test_each_class_has_its_own_questions():
    assert who_asks([ByName()], (nn.TransformerEncoderLayer,)) is None
    assert who_asks([ByTuple()], (nn.Linear,)) == "ByTuple.forward"


class ForBoth(nn.Module):
    def forward(self, x):
        import headwise

        return isinstance(self.attn, (nn.MultiheadAttention, headwise.MultiheadAttention))


def test_who_asks_for_ours_too_is_no_obstacle():
    assert who_asks([ForBoth()], (nn.MultiheadAttention,)) is None
