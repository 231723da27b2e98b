"""headwise.core.masks: pictures, repr, errors, and what each mask is lowered to."""

from __future__ import annotations

import copy
import math
import pickle
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import masks
from headwise.core.algebra import Lowered, Size, appended, lower
from headwise.core.traits import visible_keys

B, H, L, S = 3, 2, 5, 7
SIZE = Size(B, H, L, S, torch.device("cpu"))
INF = math.inf


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def drawn(mask: masks.Mask, *sizes: int, **where: int) -> str:
    return "\n" + mask.draw(*sizes, **where)


# --- pictures ---------------------------------------------------------------------------------------------------------

PICTURES: list[tuple[masks.Mask, tuple[int, ...], str]] = [
    (
        masks.causal(), (3, 5), """
                0 1 2 3 4
            0   # . . . .
            1   # # . . .
            2   # # # . .
        """,
    ),
    (
        masks.causal(2), (3, 5), """
                0 1 2 3 4
            0   # # # . .
            1   # # # # .
            2   # # # # #
        """,
    ),
    (
        masks.causal(-1), (3,), """
                0 1 2
            0   . . .
            1   # . .
            2   # # .
        """,
    ),
    (
        masks.window(1, 0), (4,), """
                0 1 2 3
            0   # . . .
            1   # # . .
            2   . # # .
            3   . . # #
        """,
    ),
    (
        masks.window(1, 1), (4,), """
                0 1 2 3
            0   # # . .
            1   # # # .
            2   . # # #
            3   . . # #
        """,
    ),
    (
        masks.window(0, None), (3, 5), """
                0 1 2 3 4
            0   # # # # #
            1   . # # # #
            2   . . # # #
        """,
    ),
    (
        masks.window(None, None), (2,), """
                0 1
            0   # #
            1   # #
        """,
    ),
    (
        masks.padding([3]), (2, 5), """
                0 1 2 3 4
            0   # # # . .
            1   # # # . .
        """,
    ),
    (
        masks.padding(torch.tensor([[False, True, False, True]])), (2,), """
                0 1 2 3
            0   . # . #
            1   . # . #
        """,
    ),
    (
        masks.documents(ints(0, 0, 1, 1, 1)), (), """
                0 1 2 3 4
            0   # # . . .
            1   # # . . .
            2   . . # # #
            3   . . # # #
            4   . . # # #
        """,
    ),
    (
        masks.documents(ints(0, 1), ints(1, 0, 0)), (), """
                0 1 2
            0   . # #
            1   # . .
        """,
    ),
    (
        masks.causal() | masks.prefix(2), (4,), """
                0 1 2 3
            0   # # . .
            1   # # . .
            2   # # # .
            3   # # # #
        """,
    ),
    (
        masks.causal() & masks.padding([2]), (3,), """
                0 1 2
            0   # . .
            1   # # .
            2   # # .
        """,
    ),
    (
        ~masks.causal(), (3,), """
                0 1 2
            0   . # #
            1   . . #
            2   . . .
        """,
    ),
    (
        masks.bias(torch.tensor([[0.0, -0.5, -INF], [1.25, 0.0, 100.0]])), (), """
                   0    1    2
            0      0 -0.5    .
            1   1.25    0  100
        """,
    ),
    (
        masks.bias(torch.tensor([[0.0, -0.5], [1.0, 0.0]])) & masks.causal(), (), """
                0 1
            0   0 .
            1   1 0
        """,
    ),
    (
        masks.bias(torch.tensor([[0.0, -INF], [0.0, 0.0]])), (), """
                0 1
            0   # .
            1   # #
        """,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "sizes", "picture"), PICTURES, ids=lambda part: repr(part) if isinstance(part, masks.Mask) else ""
)
def test_a_picture(mask: masks.Mask, sizes: tuple[int, ...], picture: str) -> None:
    assert mask.draw(*sizes) == textwrap.indent(textwrap.dedent(picture).strip("\n"), "    ")


def test_a_picture_has_these_very_characters() -> None:
    assert masks.causal().draw(2) == "        0 1\n    0   # .\n    1   # #"
    assert masks.prefix(1).draw(2, 11) == (
        "        0 1 2 3 4 5 6 7 8 9 0\n    0   # . . . . . . . . . .\n    1   # . . . . . . . . . ."
    )
    assert masks.bias(torch.full((1, 11), 2.5)).draw().splitlines()[0] == (
        "          0   1   2   3   4   5   6   7   8   9  10"
    )


def test_a_picture_of_blocks() -> None:
    """Beyond 48 rows or columns; `+` is partly visible, and the scale is said."""
    lines = masks.causal().draw(96).splitlines()
    assert len(lines) == 1 + 48 + 1
    assert lines[0] == "        " + " ".join(str(n % 10) for n in range(48))
    assert lines[1] == "    0   + " + " ".join("." * 47)
    assert lines[2] == "    2   # + " + " ".join("." * 46)
    assert lines[48] == "   94   " + " ".join("#" * 47) + " +"
    assert lines[-1] == "        one cell is 2 queries x 2 keys; + is partly visible"
    lines = masks.padding([50]).draw(3, 100).splitlines()
    assert lines[1] == "    0   " + " ".join("#" * 16 + "+" + "." * 17)
    assert lines[-1] == "        one cell is 1 queries x 3 keys; + is partly visible"
    assert len(lines) == 1 + 3 + 1
    assert len(masks.causal().draw(48).splitlines()) == 1 + 48
    assert len(masks.causal().draw(49).splitlines()) == 1 + 25 + 1
    biased = masks.bias(torch.full((60, 60), 0.5)).draw().splitlines()
    assert biased[1] == "    0   " + " ".join("#" * 30)


def test_a_picture_is_of_one_sample_and_head() -> None:
    mask = masks.padding([3, 1])
    assert drawn(mask, 1, 3) == "\n        0 1 2\n    0   # # #"
    assert drawn(mask, 1, 3, sample=1) == "\n        0 1 2\n    0   # . ."
    slopes = masks.bias(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 1, 2)) & masks.padding([2, 1])
    assert drawn(slopes, 1, sample=1, head=1) == "\n        0 1\n    0   2 ."
    assert drawn(slopes, 1, sample=0, head=1) == "\n        0 1\n    0   2 2"
    assert drawn(masks.causal(), 2, sample=4) == drawn(masks.causal(), 2)  # the same for every sample
    for name, where, most in (("sample", {"sample": 2}, 1), ("head", {"head": -1}, 1), ("sample", {"sample": -1}, 1)):
        with pytest.raises(ValueError, match=rf"^Mask.draw: {name} must be in 0 .. {most}; got {where[name]}$"):
            slopes.draw(**where)


def test_a_picture_takes_its_size_from_the_mask() -> None:
    def shape(text: str) -> tuple[int, int]:
        lines = text.splitlines()
        return len(lines) - 1, len(lines[0].split())

    dense = masks.dense(torch.ones(2, 3, dtype=torch.bool))
    keys = masks.padding(torch.ones(2, 3, dtype=torch.bool))
    assert shape(masks.causal().draw()) == (8, 8)
    assert shape(masks.causal().draw(2)) == (2, 2)
    assert shape(masks.causal().draw(keys=4)) == (4, 4)
    assert shape(dense.draw()) == (2, 3)
    assert shape((dense & masks.causal()).draw()) == (2, 3)
    assert shape((~masks.causal() | dense).draw()) == (2, 3)
    assert shape(keys.draw()) == (3, 3)
    assert shape(keys.draw(5)) == (5, 3)
    assert shape(masks.dense(torch.ones(1, 1, 1, 3, dtype=torch.bool)).draw(5)) == (5, 3)
    assert shape(masks.from_torch(torch.zeros(2, 3)).draw()) == (2, 3)
    for given in (torch.zeros(1, 1, 1, 3), torch.zeros(2, 1, 1, 3)):
        assert shape(masks.from_torch(given).draw()) == (3, 3)
    with pytest.raises(ValueError, match=r"^dense: keep must broadcast to \(B, H, L, S\) = \(1, 1, 4, 3\)"):
        dense.draw(4)
    for sizes in ((0, 3), (3, 0), (-1, 2)):
        with pytest.raises(ValueError, match=r"^Mask.draw: queries and keys must be at least 1"):
            masks.causal().draw(*sizes)


def test_a_picture_of_torch_masks() -> None:
    """The polarity is turned: what torch blocks is a dot."""
    block = torch.tensor([[False, True], [False, False]])
    assert drawn(masks.from_torch(block), 2) == "\n        0 1\n    0   # .\n    1   # #"
    both = masks.from_torch(block, torch.tensor([[False, False], [True, False]]), True)
    assert both is not None
    assert drawn(both, sample=0) == "\n        0 1\n    0   # .\n    1   # #"
    assert drawn(both, sample=1) == "\n        0 1\n    0   . .\n    1   . #"


def test_a_picture_of_a_learned_bias_does_not_touch_its_graph() -> None:
    scores = torch.ones(1, 2, requires_grad=True)
    assert masks.bias(scores * 2).draw(1) == "        0 1\n    0   2 2"


# --- repr -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.causal(), "causal()"),
        (masks.causal(3), "causal(offset=3)"),
        (masks.causal(ints(1, 2)), "causal(offset=[1, 2])"),
        (masks.window(2, None), "window(2, None)"),
        (masks.window(None, 0), "causal()"),
        (masks.padding([3, 5]), "padding(lengths=[3, 5])"),
        (masks.padding(torch.arange(9)), "padding(lengths=torch.int64 (9,))"),
        (masks.padding(torch.ones(2, 5, dtype=torch.bool)), "padding(keep (2, 1, 1, 5))"),
        (masks.documents(ints(0, 0, 1)), "documents(ids (3,))"),
        (masks.prefix(4), "prefix(4)"),
        (masks.dense(torch.ones(2, 5, dtype=torch.bool)), "dense(keep (1, 1, 2, 5))"),
        (masks.bias(torch.ones(2, 5)), "bias(scores (1, 1, 2, 5))"),
        (masks.from_torch(torch.ones(2, 5)), "from_torch(attn_mask (2, 5))"),
        (masks.from_torch(None, torch.ones(2, 5)), "from_torch(key_padding_mask (2, 5))"),
        (masks.causal() & ~masks.prefix(1) | masks.window(0, 0), "((causal() & ~prefix(1)) | window(0, 0))"),
        (appended(masks.causal(), 2), "appended(causal(), 2)"),
    ],
)
def test_repr(mask: masks.Mask, text: str) -> None:
    assert repr(mask) == text


# --- errors -----------------------------------------------------------------------------------------------------------

BOOL_2D, FLOAT_2D = torch.ones(L, S, dtype=torch.bool), torch.zeros(L, S)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (masks.causal, (1.0,), r"causal: offset must be an int or an integer tensor of shape \(\) or \(B,\); got 1.0"),
        (masks.causal, (True,), r"causal: offset must be an int or .*; got True"),
        (masks.causal, (None,), r"causal: offset must .*; got None"),
        (masks.causal, (torch.tensor(1.0),), r"causal: offset must .*; got 1.0"),
        (masks.causal, (torch.zeros(2, 3, dtype=torch.int64),), r"causal: offset must .*; got torch.int64 \(2, 3\)"),
        (masks.causal, (torch.tensor([True]),), r"causal: offset must .*; got \[True\]"),
        (masks.window, (-1, 0), r"window: left must be an int of at least 0, or None for no limit; got -1"),
        (masks.window, (0, 1.5), r"window: right must be an int .*; got 1.5"),
        (masks.window, (False, 0), r"window: left must be an int .*; got False"),
        (masks.window, (torch.tensor(1), 0), r"window: left must be an int .*; got tensor\(1\)"),
        (
            masks.padding,
            (torch.ones(2),),
            r"padding: lengths must be integers \(B,\) or a bool keep mask \(B, S\); got \[1.0, 1.0\]",
        ),
        (masks.padding, (3,), r"padding: lengths must .*; got 3"),
        (masks.padding, ([],), r"padding: lengths must .*; got \[\]"),
        (masks.padding, ([[3, 5]],), r"padding: lengths must .*; got torch.int64 \(1, 2\)"),
        (masks.padding, (torch.ones(2, 3),), r"padding: lengths must .*; got torch.float32 \(2, 3\)"),
        (masks.padding, (torch.ones(3, dtype=torch.bool),), r"padding: lengths must .*; got \[True, True, True\]"),
        (masks.documents, ([0, 1],), r"documents: ids must be an integer tensor \(L,\) or \(B, L\); got \[0, 1\]"),
        (masks.documents, (torch.zeros(3),), r"documents: ids must .*; got \[0.0, 0.0, 0.0\]"),
        (masks.documents, (torch.tensor(1),), r"documents: ids must .*; got 1"),
        (masks.documents, (ints(1), torch.ones(1, dtype=torch.bool)), r"documents: key_ids must .*; got \[True\]"),
        (masks.documents, (None,), r"documents: ids must .*; got None"),
        (masks.prefix, (2.0,), r"prefix: n must be an int or an integer tensor of shape \(\) or \(B,\); got 2.0"),
        (masks.prefix, (torch.zeros(1, 1, dtype=torch.int64),), r"prefix: n must .*; got torch.int64 \(1, 1\)"),
        (
            masks.dense,
            (FLOAT_2D,),
            r"dense: keep must be a bool tensor .*; float scores go into bias\(\); got torch.float32 \(5, 7\)",
        ),
        (
            masks.dense,
            (torch.ones(3, dtype=torch.bool),),
            r"dense: keep must be a bool tensor \(L, S\), \(B, L, S\) or 4-D; .*; got \[",
        ),
        (
            masks.dense,
            (torch.ones(1, 1, 1, 2, 3, dtype=torch.bool),),
            r"dense: keep must .*; got torch.bool \(1, 1, 1, 2, 3\)",
        ),
        (masks.dense, ([[True]],), r"dense: keep must .*; got \[\[True\]\]"),
        (masks.dense, (torch.ones(2, 3, dtype=torch.uint8),), r"dense: keep must .*; got torch.uint8 \(2, 3\)"),
        (
            masks.bias,
            (BOOL_2D,),
            r"bias: scores must be a floating tensor .*; bool masks go into dense\(\); got torch.bool \(5, 7\)",
        ),
        (
            masks.bias,
            (torch.zeros(3),),
            r"bias: scores must be a floating tensor \(L, S\), \(B, L, S\) or 4-D; .*; got \[",
        ),
        (masks.bias, (0.5,), r"bias: scores must .*; got 0.5"),
        (
            masks.from_torch,
            (torch.zeros(L, S, dtype=torch.int64),),
            r"from_torch: attn_mask must be a bool \(True blocks\) or floating \(added\) .*; got torch.int64 \(5, 7\)",
        ),
        (
            masks.from_torch,
            (torch.zeros(S),),
            r"from_torch: attn_mask must be \(L, S\), \(B\*H, L, S\), .*; got 1-D \(7,\)",
        ),
        (
            masks.from_torch,
            (torch.zeros(1, 1, 1, L, S),),
            r"from_torch: attn_mask must be .*; got 5-D \(1, 1, 1, 5, 7\)",
        ),
        (masks.from_torch, (None, torch.zeros(S)), r"from_torch: key_padding_mask must be \(B, S\); got 1-D \(7,\)"),
        (
            masks.from_torch,
            (None, torch.zeros(1, B, S)),
            r"from_torch: key_padding_mask must be \(B, S\); got 3-D \(1, 3, 7\)",
        ),
        (masks.from_torch, ([[0.0]],), r"from_torch: attn_mask must be a bool .*; got \[\[0.0\]\]"),
    ],
)
def test_constructors_refuse(function: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        function(*arguments)


def test_combinations_refuse_what_is_no_mask() -> None:
    """A tensor has no polarity; whichever side it stands on."""
    for other in (BOOL_2D, True, None, "causal"):
        with pytest.raises(
            ValueError, match=r"^Mask &: the other operand must be a Mask \(wrap a tensor in masks.dense"
        ):
            _ = masks.causal() & other
        with pytest.raises(ValueError, match=r"^Mask \|: the other operand must be a Mask"):
            _ = masks.causal() | other
    for combine in (lambda: BOOL_2D & masks.causal(), lambda: BOOL_2D | masks.causal()):
        with pytest.raises((ValueError, TypeError)):
            combine()


def test_combinations_refuse_a_bias_under_or_and_not() -> None:
    biased = masks.bias(FLOAT_2D)
    for combine in (
        lambda: biased | masks.causal(),
        lambda: masks.causal() | biased,
        lambda: masks.causal() | (masks.prefix(1) & biased),
        lambda: masks.from_torch(FLOAT_2D) | masks.causal(),
    ):
        with pytest.raises(ValueError, match=r"^Mask \|: an operand must hold no bias: scores add under & only; got "):
            combine()
    for combine in (
        lambda: ~biased,
        lambda: ~(masks.causal() & biased),
        lambda: ~masks.from_torch(None, torch.zeros(B, S)),
    ):
        with pytest.raises(ValueError, match=r"^Mask ~: an operand must hold no bias: scores add under & only; got "):
            combine()


def test_refusals_of_sizes_come_when_the_mask_is_used() -> None:
    for mask, message in (
        (
            masks.dense(torch.ones(L, L, dtype=torch.bool)),
            r"dense: keep must broadcast to \(B, H, L, S\) = \(3, 2, 5, 7\); got \(1, 1, 5, 5\)",
        ),
        (masks.bias(torch.ones(2, L, S)), r"bias: scores must broadcast .*; got \(2, 1, 5, 7\)"),
        (masks.padding([1, 2]), r"padding: lengths must have one entry per sample, B = 3; got \(2,\)"),
        (masks.padding(torch.ones(B, L, dtype=torch.bool)), r"padding: keep must broadcast to .*; got \(3, 1, 1, 5\)"),
        (masks.causal(ints(1, 2)), r"causal: offset must have one entry per sample, B = 3; got \(2,\)"),
        (masks.prefix(ints(1, 2)), r"prefix: n must have one entry per sample, B = 3; got \(2,\)"),
        (
            masks.documents(torch.arange(L)),
            r"documents: key_ids must be \(7,\) or \(3, 7\) for these scores; L != S needs key_ids; got \(5,\)",
        ),
        (masks.documents(torch.arange(S)), r"documents: ids must be \(5,\) or \(3, 5\) .*; got \(7,\)"),
        (
            masks.documents(torch.zeros(2, L, dtype=torch.int64), torch.arange(S)),
            r"documents: ids must be .*; got \(2, 5\)",
        ),
        (
            masks.from_torch(torch.zeros(S, L)),
            r"from_torch: attn_mask must be \(L, S\), .* with B = 3, H = 2, L = 5, S = 7; got \(7, 5\)",
        ),
        (
            masks.from_torch(None, torch.zeros(B, L)),
            r"from_torch: key_padding_mask must be \(B, S\) with .*; got \(3, 5\)",
        ),
    ):
        assert mask is not None
        for whole in (mask, masks.causal() & mask):
            with pytest.raises(ValueError, match=f"^{message}"):
                lower(whole, SIZE)


def test_refusals_of_devices() -> None:
    for mask, message in (
        (masks.dense(BOOL_2D.to("meta")), "dense: keep"),
        (masks.bias(FLOAT_2D.to("meta")), "bias: scores"),
        (masks.padding(ints(1, 2, 3).to("meta")), "padding: lengths"),
        (masks.prefix(ints(1, 2, 3).to("meta")), "prefix: n"),
        (masks.causal(ints(1, 2, 3).to("meta")), "causal: offset"),
        (masks.documents(torch.arange(L), torch.arange(S).to("meta")), "documents: key_ids"),
        (masks.from_torch(None, torch.zeros(B, S, device="meta")), "from_torch: key_padding_mask"),
    ):
        with pytest.raises(ValueError, match=f"^{message} must be on the query's device cpu; got meta$"):
            lower(mask, SIZE)


# --- what they are lowered to -----------------------------------------------------------------------------------------


def shapes(lowered: Lowered) -> tuple[bool, tuple[int, ...] | None, tuple[int, ...] | None]:
    return (
        lowered.causal,
        None if lowered.keep is None else tuple(lowered.keep.shape),
        None if lowered.bias is None else tuple(lowered.bias.shape),
    )


LENGTHS, KEEP = masks.padding([1, 2, 3]), masks.padding(torch.ones(B, S, dtype=torch.bool))


@pytest.mark.parametrize(
    ("mask", "causal", "keep", "bias"),
    [
        (None, False, None, None),
        (masks.causal(), True, None, None),
        (masks.window(None, 0), True, None, None),
        (masks.window(None, None), False, None, None),
        (masks.causal() & masks.causal(), True, None, None),
        (LENGTHS, False, (B, 1, 1, S), None),
        (KEEP, False, (B, 1, 1, S), None),
        (masks.padding([4]), False, (1, 1, 1, S), None),
        (LENGTHS & KEEP, False, (B, 1, 1, S), None),
        (masks.causal() & LENGTHS, True, (B, 1, 1, S), None),
        (LENGTHS & (masks.causal() & KEEP), True, (B, 1, 1, S), None),
        (masks.prefix(2), False, (1, 1, 1, S), None),
        (masks.prefix(ints(1, 2, 3)), False, (B, 1, 1, S), None),
        (LENGTHS | masks.prefix(2), False, (B, 1, 1, S), None),
        (~LENGTHS, False, (B, 1, 1, S), None),
        (masks.causal(1), False, (1, 1, L, S), None),
        (masks.causal(ints(0, 0, 0)), False, (B, 1, L, S), None),
        (masks.causal(torch.tensor(0)), False, (1, 1, L, S), None),
        (masks.causal() | masks.prefix(2), False, (1, 1, L, S), None),
        (~masks.causal(), False, (1, 1, L, S), None),
        (masks.window(2, 1), False, (1, 1, L, S), None),
        (masks.documents(torch.arange(L), torch.arange(S)), False, (1, 1, L, S), None),
        (masks.documents(torch.zeros(B, L, dtype=torch.int64), torch.arange(S)), False, (B, 1, L, S), None),
        (masks.dense(BOOL_2D), False, (1, 1, L, S), None),
        (masks.dense(torch.ones(B, L, S, dtype=torch.bool)), False, (B, 1, L, S), None),
        (masks.dense(torch.ones(1, H, 1, S, dtype=torch.bool)), False, (1, H, 1, S), None),
        (masks.bias(FLOAT_2D), False, None, (1, 1, L, S)),
        (masks.bias(torch.zeros(1, H, 1, 1)) & masks.causal(), True, None, (1, H, 1, 1)),
        (masks.bias(torch.zeros(B, 1, 1, S)) & LENGTHS & masks.causal(), True, (B, 1, 1, S), (B, 1, 1, S)),
        (masks.from_torch(~BOOL_2D), False, (1, 1, L, S), None),
        (masks.from_torch(torch.zeros(B * H, L, S)), False, None, (B, H, L, S)),
        (masks.from_torch(torch.zeros(B, L, S).bool()), False, (B, 1, L, S), None),
        (masks.from_torch(torch.zeros(1, L, S).bool()), False, (1, 1, L, S), None),
        (masks.from_torch(None, torch.zeros(B, S).bool(), True), True, (B, 1, 1, S), None),
        (masks.from_torch(None, torch.zeros(B, S), True), True, None, (B, 1, 1, S)),
        (masks.from_torch(FLOAT_2D, torch.zeros(B, S).bool()), False, (B, 1, 1, S), (1, 1, L, S)),
        (masks.from_torch(is_causal=True), True, None, None),
        (appended(LENGTHS, 2), False, (B, 1, 1, S), None),
        (appended(masks.bias(torch.zeros(B, 1, 1, S - 2)), 2), False, None, (B, 1, 1, S)),
    ],
    ids=lambda part: repr(part) if isinstance(part, masks.Mask) else None,
)
def test_lowered_to_the_cheapest_form(
    mask: masks.Mask | None, causal: bool, keep: tuple[int, ...] | None, bias: tuple[int, ...] | None
) -> None:
    """A flag, a view over heads and queries, or, last, the whole; bool stays bool."""
    lowered = lower(mask, SIZE)
    assert shapes(lowered) == (causal, keep, bias)
    assert lowered.keep is None or lowered.keep.dtype == torch.bool
    assert lowered.bias is None or lowered.bias.dtype == torch.float32


def test_nothing_given_is_no_mask() -> None:
    assert masks.from_torch() is None
    assert appended(None, 2) is None
    assert appended(masks.causal(), 0) is not None


def test_given_tensors_are_not_copied() -> None:
    for mask, held in (
        (masks.dense(BOOL_2D), BOOL_2D),
        (masks.bias(FLOAT_2D), FLOAT_2D),
        (masks.from_torch(FLOAT_2D), FLOAT_2D),
    ):
        lowered = lower(mask, SIZE, torch.float32)
        part = lowered.keep if lowered.bias is None else lowered.bias
        assert part is not None
        assert part.data_ptr() == held.data_ptr()


def test_lowering_is_done_for_any_size_with_one_mask() -> None:
    mask = masks.causal(1) & masks.padding([2])
    for queries, keys in ((1, 1), (2, 5), (5, 2), (0, 3), (3, 0)):
        keep = lower(mask, Size(4, 1, queries, keys, torch.device("cpu"))).keep
        assert keep is not None
        want = torch.tensor([[s <= query + 1 and s < 2 for s in range(keys)] for query in range(queries)]).bool()
        assert torch.equal(keep, want.view(1, 1, queries, keys))


def test_a_window_without_left_limit_is_causal() -> None:
    assert type(masks.window(None, 0)) is type(masks.causal())
    for right in (1, 3):
        window, causal = lower(masks.window(None, right), SIZE).keep, lower(masks.causal(right), SIZE).keep
        assert torch.equal(window, causal)


def test_offsets_and_prefixes_per_sample() -> None:
    offsets = ints(0, 2, -1)
    for build in (masks.causal, masks.prefix, lambda count: masks.padding(torch.as_tensor(count).view(-1))):
        keep = lower(build(offsets), SIZE).keep
        assert keep is not None
        for sample, offset in enumerate(offsets.tolist()):
            want = build(offset).keep(SIZE)
            assert want is not None
            assert torch.equal(keep[sample], want[0])
    one = masks.causal(ints(3)).keep(SIZE)
    assert torch.equal(one, masks.causal(3).keep(SIZE))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.int64])
def test_every_integer_dtype(dtype: torch.dtype) -> None:
    counts = ints(1, 2, 3).to(dtype)
    assert torch.equal(masks.padding(counts).keep(SIZE), LENGTHS.keep(SIZE))
    assert torch.equal(masks.causal(counts).keep(SIZE), masks.causal(counts.long()).keep(SIZE))
    assert torch.equal(masks.prefix(counts[0]).keep(SIZE), masks.prefix(1).keep(SIZE))
    ids = torch.arange(L).to(dtype)
    assert torch.equal(
        masks.documents(ids, torch.arange(S)).keep(SIZE),
        masks.documents(ids.long(), torch.arange(S)).keep(SIZE),
    )


def test_biases_add_and_only_minus_infinity_hides() -> None:
    low = torch.finfo(torch.float32).min
    left = torch.tensor([[low, 1.0, -INF, 0.5, -INF, low, 0.0]] * L)
    right = torch.tensor([[low, 2.0, 1e30, -INF, -INF, 3.0, low]] * L)
    for mask in (masks.bias(left) & masks.bias(right), masks.bias(right) & (masks.causal() & masks.bias(left))):
        lowered = lower(mask, SIZE, torch.float32)
        assert torch.equal(lowered.bias[0, 0, 0], torch.tensor([low, 3.0, -INF, -INF, -INF, low, low]))


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_casting(source: torch.dtype, target: torch.dtype) -> None:
    """Finite stays finite, -inf stays -inf, and what fits is cast as `.to` casts."""
    limit = torch.finfo(source)
    values = [limit.min, limit.max, -1.5, 0.0, 3.0, 1e-3, -INF]
    scores = torch.tensor([values], dtype=torch.float64).to(source)
    bias = lower(masks.bias(scores), Size(1, 1, 1, 7, torch.device("cpu")), target).bias
    assert bias is not None
    assert bias.dtype == target
    assert torch.equal(bias[0, 0, 0, 2:], scores[0, 2:].to(target))
    assert bias[..., :2].isfinite().all()
    smaller = min(limit.max, torch.finfo(target).max)
    assert bias[0, 0, 0, 1].item() == pytest.approx(smaller, rel=torch.finfo(source).eps + torch.finfo(target).eps)
    assert bias[0, 0, 0, 0] == -bias[0, 0, 0, 1]


# --- keys that no query sees ------------------------------------------------------------------------------------------


def test_visible_keys_reads_nothing_of_size_l_x_s() -> None:
    key_keep = torch.tensor([[True, False] * 3 + [True]] * B)
    four = key_keep[:, None, None]
    for mask, want in (
        (None, None),
        (masks.causal(), None),
        (masks.dense(torch.zeros(L, S, dtype=torch.bool)), None),
        (masks.causal() | masks.padding(key_keep), None),
        (masks.padding(key_keep), four),
        (masks.padding(key_keep) & masks.causal(), four),
        (masks.dense(four), four),
        (masks.bias(torch.zeros(B, 1, 1, S).masked_fill(~four, -INF)), four),
        (masks.from_torch(None, ~key_keep, True), four),
        (masks.from_torch(~four), four),
        (masks.padding(key_keep) & masks.prefix(5), four & (torch.arange(S) < 5)),
        (~masks.padding(~key_keep), four),
        (masks.padding(key_keep) | masks.prefix(2), four | (torch.arange(S) < 2)),
    ):
        found = visible_keys(mask, SIZE)
        assert (found is None) == (want is None), mask
        if found is not None and want is not None:
            assert torch.equal(found, want), mask
    padded = visible_keys(appended(masks.padding(key_keep[:, : S - 2]), 2), SIZE)
    assert padded is not None
    assert torch.equal(padded[:, 0, 0], torch.cat([key_keep[:, : S - 2], torch.ones(B, 2, dtype=torch.bool)], dim=1))


def test_masks_copy_and_pickle() -> None:
    mask = masks.causal(1) & (masks.padding([1, 2, 3]) | ~masks.dense(BOOL_2D)) & masks.bias(FLOAT_2D)
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert repr(twin) == repr(mask)
        found, want = lower(twin, SIZE), lower(mask, SIZE)
        assert (found.causal, found.tiling) == (want.causal, want.tiling) == (False, None)
        assert torch.equal(found.keep, want.keep)
        assert torch.equal(found.bias, want.bias)
