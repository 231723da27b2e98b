"""peft: LoRA on the projections and the feed-forward, against torch's stock model in train mode with W + s*B@A."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from tests.parity.pair import same
from tests.tools.subjects import arguments, each_mode, each_subject, loss_of, run, split_side
from torch import nn
from torch.func import functional_call

ALL, SOME = ("q_proj", "v_proj", "out_proj", "linear1"), ("out_proj", "linear1")
RANK, ALPHA, RATE = 3, 7, 1e-3
SCALE = ALPHA / RANK


def cases(holds):
    """Both layouts where all they have is adapted; q_proj and v_proj are there only split."""

    def row(targets, why):
        return pytest.mark.tool(
            order=2, tool=f"peft LoRA on {', '.join(targets)}", holds=holds, package="peft", torch=why
        )

    never = "`out_proj`'s is never called (peft#761)"
    split = row(ALL, f"`q_proj` and `v_proj` are not there, {never}")
    fused = row(SOME, never)
    return pytest.mark.parametrize(
        ("side", "targets"),
        [pytest.param(side, ALL, marks=split, id=f"{side}-all") for side in ("torch", "split")]
        + [pytest.param(side, SOME, marks=fused, id=f"{side}-some") for side in ("torch", "fused")],
    )


def places(subject, targets):
    """Where an adapter belongs: those of each attention, and each `linear1`."""
    modules = list(subject.build("torch").named_modules())
    attentions = [name for name, module in modules if isinstance(module, nn.MultiheadAttention)]
    own = [f"{name}.{target}".lstrip(".") for name in attentions for target in targets if target.endswith("_proj")]
    return sorted(own + [name for name, _ in modules if name.endswith("linear1")])


def base_of(subject, side, seed=1):
    return subject.build(side, seed=seed).double()


def adapted(subject, side, targets, seed=3):
    """A PeftModel with adapters that do something."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), init_lora_weights=False)
    model = peft.get_peft_model(base_of(subject, side), config)
    assert sorted(adapters(model)) == places(subject, targets)
    return model


def adapters(model, adapter="default"):
    """(A, B) of each place."""
    own = dict(model.named_parameters())
    start, end = "base_model.model.", f".lora_A.{adapter}.weight"
    return {
        name.removeprefix(start).removesuffix(end): (own[name], own[name.replace("lora_A", "lora_B")])
        for name in own
        if name.endswith(end)
    }


def merged_by_hand(stock, pairs):
    """The parameters of torch's stock model with s*B@A added."""
    found = {name: value.detach() for name, value in stock.named_parameters()}
    for place, (down, up) in pairs.items():
        before, _, child = place.rpartition(".")
        start = f"{before}." if before else ""
        delta = SCALE * up @ down
        if child in ("q_proj", "v_proj"):
            nothing = torch.zeros_like(delta)
            parts = (delta, nothing, nothing) if child == "q_proj" else (nothing, nothing, delta)
            found[f"{start}in_proj_weight"] = found[f"{start}in_proj_weight"] + torch.cat(parts)
        else:
            found[f"{place}.weight"] = found[f"{place}.weight"] + delta
    return found


def reference(subject, pairs, inputs, words):
    """torch's stock model in train mode, merged by hand."""
    stock = base_of(subject, "torch")
    merged = merged_by_hand(stock, pairs)
    return run(subject, lambda *given, **named: functional_call(stock, merged, given, named), inputs, words)


@cases("train with right gradients, the base stays to the bit")
@each_subject
def test_train(subject, side, targets):
    model = adapted(subject, side, targets).train()
    inputs, words = arguments(subject)
    pairs = {
        place: [part.detach().clone().requires_grad_() for part in pair] for place, pair in adapters(model).items()
    }
    start = {place: [part.detach().clone() for part in pair] for place, pair in pairs.items()}
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(run(subject, model, inputs, words)).backward()
        optimizer.step()
        flat = [part for pair in pairs.values() for part in pair]
        loss = loss_of(reference(subject, pairs, inputs, words))
        for part, grad in zip(flat, torch.autograd.grad(loss, flat), strict=True):
            part.data -= RATE * grad
    for place, pair in adapters(model).items():
        for got, want, before in zip(pair, pairs[place], start[place], strict=True):
            moved, wanted = (got - before).detach(), (want - before).detach()
            largest = wanted.abs().max().item()
            assert largest > 1e-8
            torch.testing.assert_close(moved, wanted, rtol=1e-6, atol=1e-6 * largest)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())


@cases("active in train and eval, off under `disable_adapter`")
@each_subject
@each_mode
def test_active(subject, side, targets, training):
    model = adapted(subject, side, targets).train(training)
    inputs, words = arguments(subject)
    with torch.no_grad():
        want = reference(subject, adapters(model), inputs, words)
        without = reference(subject, {}, inputs, words)
        assert (want - without).abs().max() > 0.01
        same(run(subject, model, inputs, words), want, 1e-9)
        with model.disable_adapter():
            same(run(subject, model, inputs, words), without, 1e-9)
        same(run(subject, model, inputs, words), want, 1e-9)


@cases("saved, and loaded onto a fresh base: adapters equal to the bit, outputs equal")
@each_subject
def test_save_and_load(subject, side, targets, tmp_path):
    model = adapted(subject, side, targets)
    inputs, words = arguments(subject)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base_of(subject, side), tmp_path)
    for place, pair in adapters(loaded).items():
        assert all(torch.equal(got, want) for got, want in zip(pair, adapters(model)[place], strict=True))
    assert sorted(adapters(loaded)) == places(subject, targets)
    with torch.no_grad():
        want = reference(subject, adapters(model), inputs, words)
        for training in (True, False):
            got = run(subject, loaded.train(training), inputs, words)
            # Not to the bit: torch's product of an expanded tensor depends on where in memory the matrix is
            same(got, run(subject, model.train(training), inputs, words), 1e-13)
            same(got, want, 1e-9)


@cases("merged exactly, and loaded into torch's stock model; `unload` gives the base back")
@each_subject
@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
def test_merge(subject, side, targets, safe):
    model = adapted(subject, side, targets).eval()
    inputs, words = arguments(subject)
    pairs = adapters(model)
    with torch.no_grad():
        by_hand = merged_by_hand(base_of(subject, "torch"), pairs)
        want = run(subject, model, inputs, words)
        unloaded = copy.deepcopy(model).unload()
        merged = model.merge_and_unload(safe_merge=safe)
        for training in (True, False):
            same(run(subject, merged.train(training), inputs, words), want, 1e-9)
        stock = base_of(subject, "torch", seed=5)
        stock.load_state_dict(merged.state_dict())
        for name, parameter in stock.named_parameters():
            same(parameter.detach(), by_hand[name].detach(), 1e-12, name)
        same(run(subject, stock, inputs, words), want, 1e-9)
        same(run(subject, merged, inputs, words), want, 1e-9)
        base = base_of(subject, side)
        assert [type(module) for module in unloaded.modules()] == [type(module) for module in base.modules()]
        state = unloaded.state_dict()
        assert list(state) == list(base.state_dict())
        assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())


@pytest.mark.tool(
    order=2,
    tool="peft, two LoRA adapters",
    holds="switched, both at once, added up, and one per sample of a batch",
    package="peft",
    torch="`q_proj` and `v_proj` are not there, `out_proj`'s are never called (peft#761)",
)
@each_subject
@split_side
@each_mode
def test_two_adapters(subject, side, training):
    model = adapted(subject, side, ALL)
    torch.manual_seed(4)
    model.add_adapter("second", model.peft_config["default"])
    first, second = adapters(model), adapters(model, "second")
    assert sorted(second) == places(subject, ALL)
    model.train(training)
    inputs, words = arguments(subject)
    # A @ x then B, of both: the ranks side by side
    both = {
        place: (torch.cat([first[place][0], second[place][0]]), torch.cat([first[place][1], second[place][1]], dim=1))
        for place in first
    }
    wanted = {
        name: reference(subject, pairs, inputs, words)
        for name, pairs in {"default": first, "second": second, "both": both, "__base__": {}}.items()
    }
    for name in ("second", "default"):
        model.set_adapter(name)
        same(run(subject, model, inputs, words), wanted[name], 1e-9)
    model.base_model.set_adapter(["default", "second"])
    same(run(subject, model, inputs, words), wanted["both"], 1e-9)
    model.add_weighted_adapter(["default", "second"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    same(run(subject, model, inputs, words), wanted["both"], 1e-9)
    model.set_adapter("default")
    model.delete_adapter("sum")
    names = ["second", "__base__", "default"]
    if not training:  # peft: in inference only
        got = run(subject, model, inputs, words | {"adapter_names": names})
        same(got, torch.stack([wanted[name][place] for place, name in enumerate(names)]), 1e-9)


KINDS = {
    "DoRA": lambda: peft.LoraConfig(r=RANK, use_dora=True, target_modules=list(ALL), init_lora_weights=False),
    "LoHa": lambda: peft.LoHaConfig(r=RANK, target_modules=list(ALL), init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=RANK, target_modules=list(ALL), init_weights=False),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "out_proj", "linear2"],
        feedforward_modules=["linear2"],
        init_ia3_weights=False,
    ),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=list(ALL), init_weights=False),
    "VeRA": lambda: peft.VeraConfig(r=RANK, target_modules=["q_proj", "v_proj", "out_proj"], init_weights=False),
}


@pytest.mark.tool(
    order=2,
    tool=f"peft {', '.join(KINDS)}",
    holds="every adapter has a gradient; active alike in train and eval; merged exactly",
    package="peft",
    torch="`q_proj`, `k_proj` and `v_proj` are not there, `out_proj`'s are never called (peft#761)",
)
@each_subject
@split_side
@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters(subject, side, kind):
    torch.manual_seed(5)
    model = peft.get_peft_model(base_of(subject, side), KINDS[kind]())
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # some start where they do nothing
        for parameter in learning.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    inputs, words = arguments(subject)
    base = run(subject, base_of(subject, side), inputs, words)
    out = run(subject, model.train(), inputs, words)
    loss_of(out).backward()
    assert [name for name, parameter in learning.items() if not parameter.grad.any()] == []
    with torch.no_grad():
        want = out.detach()
        assert (want - base).abs().max() > 0.001
        same(run(subject, model.eval(), inputs, words), want, 1e-9)
        merged = model.merge_and_unload(safe_merge=True)
        stock = base_of(subject, "torch", seed=5)
        stock.load_state_dict(merged.state_dict())
        same(run(subject, merged, inputs, words), want, 1e-5)  # some merge in float32
        same(run(subject, stock, inputs, words), want, 1e-5)
