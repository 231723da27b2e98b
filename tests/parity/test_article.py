"""The samples of an introduction to `nn.MultiheadAttention`, with nothing but the import changed.

Each sample is run as text, once with torch's class and once with ours under the same name, and must hold in both.
"""

from __future__ import annotations

import textwrap

import pytest
import torch

IMPORTS = {
    "torch": "from torch.nn import MultiheadAttention",
    "headwise": "from headwise import MultiheadAttention",
}


def run(sample, import_line):
    names = {}
    exec(f"import torch\n{import_line}\ntorch.manual_seed(0)\n{textwrap.dedent(sample)}", names)
    return names


def in_both(sample, *compared):
    """The names that the sample made with ours; those in `compared` are torch's numbers too."""
    theirs, ours = (run(sample, import_line) for import_line in IMPORTS.values())
    assert type(ours["mha"]).__module__.startswith("headwise")
    for name in compared:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    return ours


BASIC = """
    embed_dim, num_heads, batch_size, seq_len = 64, 4, 10, 20
    mha = MultiheadAttention(embed_dim, num_heads, batch_first=True)
    x = torch.randn(batch_size, seq_len, embed_dim)
"""


def test_self_attention():
    ours = in_both(BASIC + "    output, weights = mha(x, x, x)", "output", "weights")
    assert ours["output"].shape == (10, 20, 64)
    assert ours["weights"].shape == (10, 20, 20)
    torch.testing.assert_close(ours["weights"].sum(dim=-1), torch.ones(10, 20))


def test_weights_of_each_head():
    """[10, 4, 20, 20] needs average_attn_weights=False; the default averages over the heads."""
    ours = in_both(BASIC + "    output, weights = mha(x, x, x, average_attn_weights=False)", "output", "weights")
    assert ours["weights"].shape == (10, 4, 20, 20)
    torch.testing.assert_close(ours["weights"].mean(dim=1), ours["mha"](*[ours["x"]] * 3)[1])


def test_weights_of_each_head_from_the_constructor():
    """Ours can be told once."""
    told = (
        BASIC.replace("batch_first=True", "batch_first=True, average_attn_weights=False")
        + "    _, weights = mha(x, x, x)"
    )
    asked = BASIC + "    _, weights = mha(x, x, x, average_attn_weights=False)"
    with pytest.raises(TypeError, match="average_attn_weights"):
        run(told, IMPORTS["torch"])
    want = run(asked, IMPORTS["torch"])["weights"]
    torch.testing.assert_close(run(told, IMPORTS["headwise"])["weights"], want, rtol=1e-5, atol=1e-6)


def test_sequence_first():
    sample = """
        mha = MultiheadAttention(64, 4)
        x = torch.randn(20, 10, 64)
        output, weights = mha(x, x, x)
    """
    ours = in_both(sample, "output", "weights")
    assert (ours["output"].shape, ours["weights"].shape) == ((20, 10, 64), (10, 20, 20))


def test_cross_attention():
    sample = """
        mha = MultiheadAttention(64, 4, kdim=48, vdim=32, batch_first=True)
        query, key, value = torch.randn(10, 20, 64), torch.randn(10, 30, 48), torch.randn(10, 30, 32)
        output, weights = mha(query, key, value)
    """
    ours = in_both(sample, "output", "weights")
    assert (ours["output"].shape, ours["weights"].shape) == ((10, 20, 64), (10, 20, 30))


def test_padded_batch():
    """Lengths 15 and 10 of 20: padded keys get weight exactly 0, and what they hold does not matter."""
    sample = """
        mha = MultiheadAttention(64, 4, batch_first=True)
        x = torch.randn(2, 20, 64)
        lengths = torch.tensor([15, 10])
        key_padding_mask = torch.arange(20) >= lengths[:, None]
        output, weights = mha(x, x, x, key_padding_mask=key_padding_mask)
        other = torch.where(key_padding_mask[..., None], 100.0, x)
        again, _ = mha(x, other, other, key_padding_mask=key_padding_mask)
    """
    ours = in_both(sample, "output", "weights", "again")
    weights = ours["weights"]
    assert torch.equal(weights[0, :, 15:], torch.zeros(20, 5))
    assert torch.equal(weights[1, :, 10:], torch.zeros(20, 10))
    assert (weights[0, :, :15] > 0).all()
    assert (weights[1, :, :10] > 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 20))
    torch.testing.assert_close(ours["again"], ours["output"])


def test_causal_float_mask():
    """`triu` sets what is below to 0 and multiplies nothing: the mask holds 0 and -inf, and no NaN."""
    sample = """
        L = 20
        mha = MultiheadAttention(64, 4, batch_first=True)
        x = torch.randn(10, L, 64)
        attn_mask = torch.triu(torch.ones(L, L) * float('-inf'), diagonal=1)
        output, weights = mha(x, x, x, attn_mask=attn_mask)
        without, none = mha(x, x, x, attn_mask=attn_mask, need_weights=False)
    """
    ours = in_both(sample, "attn_mask", "output", "weights", "without")
    assert torch.equal(
        ours["attn_mask"], torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    )
    assert ours["weights"].triu(1).count_nonzero() == 0
    assert (ours["weights"] > 0).sum() == 10 * 20 * 21 // 2
    torch.testing.assert_close(ours["without"], ours["output"])
    # ours needs no mask for it
    alone, _ = ours["mha"](*[ours["x"]] * 3, is_causal=True)
    torch.testing.assert_close(alone, ours["output"])


def test_need_weights_false_gives_none():
    ours = in_both(BASIC + "    output, weights = mha(x, x, x, need_weights=False)", "output")
    assert ours["weights"] is None
    torch.testing.assert_close(ours["output"], ours["mha"](*[ours["x"]] * 3)[0])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("flags", ["add_bias_kv=True", "add_zero_attn=True", "add_bias_kv=True, add_zero_attn=True"])
@pytest.mark.parametrize("keys", [0, 30])
def test_extra_keys(flags, keys, need_weights):
    """One more column for each, also where there is no key at all."""
    sample = f"""
        mha = MultiheadAttention(64, 4, {flags}, batch_first=True)
        query, memory = torch.randn(10, 20, 64), torch.randn(10, {keys}, 64)
        output, weights = mha(query, memory, memory, need_weights={need_weights})
    """
    ours = in_both(sample, "output", *(["weights"] if need_weights else []))
    assert ours["output"].isfinite().all()
    if need_weights:
        assert ours["weights"].shape == (10, 20, keys + flags.count("True"))
        torch.testing.assert_close(ours["weights"].sum(dim=-1), torch.ones(10, 20))
    else:
        assert ours["weights"] is None


@pytest.mark.parametrize("need_weights", [True, False])
def test_no_key_at_all(need_weights):
    """Nothing to attend to, and nothing in its place: the output is the output projection's bias."""
    sample = f"""
        mha = MultiheadAttention(64, 4, batch_first=True)
        torch.nn.init.normal_(mha.out_proj.bias)
        query, memory = torch.randn(10, 20, 64), torch.randn(10, 0, 64)
        output, weights = mha(query, memory, memory, need_weights={need_weights})
    """
    ours = in_both(sample, "output")
    assert torch.equal(ours["output"], ours["mha"].out_proj.bias.expand(10, 20, 64))
    assert ours["weights"] is None if not need_weights else ours["weights"].shape == (10, 20, 0)


def test_width_that_the_heads_do_not_divide():
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        run("MultiheadAttention(embed_dim=100, num_heads=3)", IMPORTS["torch"])
    with pytest.raises(
        ValueError,
        match="embed_dim must be a multiple of num_heads 3, such as 99 or 102",
    ):
        run("MultiheadAttention(embed_dim=100, num_heads=3)", IMPORTS["headwise"])


def test_training_step():
    """The loop that follows in every introduction: same loss after three steps."""
    sample = """
        mha = MultiheadAttention(64, 4, batch_first=True)
        head = torch.nn.Linear(64, 2)
        optimizer = torch.optim.SGD([*mha.parameters(), *head.parameters()], lr=0.1)
        x, y = torch.randn(10, 20, 64), torch.randint(2, (10,))
        losses = []
        for _ in range(3):
            output, _ = mha(x, x, x)
            loss = torch.nn.functional.cross_entropy(head(output).mean(dim=1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        losses = torch.stack(losses)
    """
    ours = in_both(sample, "losses")
    assert ours["losses"][2] < ours["losses"][0]
