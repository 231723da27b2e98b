"""Stacks and decoders on real positions only: packed once, and the padded form's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.packed import filled, hidden, set_price, without_packing
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwise import (
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    masks,
)
from headwise.core import packing as core_packing
from headwise.layers import packing

B, L, S, D, M_DIM, H, M = 3, 7, 5, 10, 6, 2, 11
TOL = {"rtol": 1e-10, "atol": 1e-11}  # float64
F64 = {"dtype": torch.float64}


ROWS = {
    "right": hidden("#######", "###....", "#......"),
    "left": hidden("..#####", "......#", "#######"),
    "holes": hidden("#.#.#.#", ".##..#.", "..#####"),
    "an empty sample": hidden("###....", ".......", "####..."),
}
MEMORY = {
    "right": hidden("##...", "#####", "###.."),
    "left": hidden("...##", "#####", "..###"),
    "holes": hidden("#.#.#", ".#.##", "####."),
    "an empty memory": hidden("##...", ".....", "#####"),
    "nothing hidden": hidden("#####", "#####", "#####"),
}
SOME, SOME_MEMORY = ROWS["holes"], MEMORY["holes"]


def block(**options: Any) -> EncoderBlock:
    return EncoderBlock(D, H, feedforward_dim=M, **options, **F64)


def decoder_block(**options: Any) -> DecoderBlock:
    return DecoderBlock(D, H, feedforward_dim=M, memory_dim=M_DIM, **options, **F64)


def layer(**options: Any) -> TransformerEncoderLayer:
    return TransformerEncoderLayer(D, H, M, 0.0, **options, **F64)


def decoder_layer(**options: Any) -> TransformerDecoderLayer:
    return TransformerDecoderLayer(D, H, M, 0.0, **options, **F64)


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(D, **F64)


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "Encoder": lambda: Encoder([block(), block(norm_first=False)], norm=norm()),
    "Encoder of one block twice": lambda: Encoder([shared := block(), shared, block()]),
    "TransformerEncoder": lambda: TransformerEncoder(layer(batch_first=True, norm_first=True), 2, norm()),
    "TransformerEncoder, (L, B, D)": lambda: TransformerEncoder(layer(fused_qkv=True), 3),
}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "Decoder": lambda: Decoder([decoder_block(), decoder_block(norm_first=False)], norm=norm()),
    "Decoder of one block twice": lambda: Decoder([shared := decoder_block(), shared]),
    "TransformerDecoder": lambda: TransformerDecoder(decoder_layer(batch_first=True, norm_first=True), 2, norm()),
    "TransformerDecoder, (L, B, D)": lambda: TransformerDecoder(decoder_layer(fused_qkv=True), 2),
}
STACKS = ENCODERS | DECODERS
every_stack = pytest.mark.parametrize("kind", STACKS)
every_decoder = pytest.mark.parametrize("kind", DECODERS)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take the paths of large ones."""
    set_price(monkeypatch, 0)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return without_packing(monkeypatch)


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What was packed and unpacked as a whole, and what each block was called with."""
    events: list[tuple[str, tuple[int, ...]]] = []

    def watch(owner: Any, name: str, word: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, x: Tensor, *rest: Any, **words: Any) -> Any:
            events.append((word, tuple(getattr(x, "shape", ()))))
            return original(self, x, *rest, **words)

        monkeypatch.setattr(owner, name, call)

    watch(packing.BlockPacking, "pack", "pack")
    watch(packing.BlockPacking, "unpack", "unpack")
    watch(EncoderBlock, "_encode", "block")
    watch(DecoderBlock, "_decode", "block")
    watch(TransformerEncoderLayer, "_encode", "block")
    watch(TransformerDecoderLayer, "_decode", "block")
    return events


def batch_first(module: nn.Module) -> bool:
    return all(child.batch_first for child in module.modules() if isinstance(child, MultiheadAttention))


def leaf(module: nn.Module, padding: Tensor, width: int, poison: float) -> Tensor:
    """Laid out as the module reads it, with poison at padding."""
    x = torch.randn(*padding.shape, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    x[padding] = poison
    return (x if batch_first(module) else x.transpose(0, 1).contiguous()).requires_grad_()


def memory_width(module: nn.Module) -> int:
    return module.layers[0].multihead_attn.kdim


class Run:
    """A stack and its inputs; `rows` hidden as queries and as keys, and of a decoder's memory `memory_padding`."""

    def __init__(
        self, module: nn.Module, rows: Tensor, memory_padding: Tensor = SOME_MEMORY, poison: float = math.nan
    ) -> None:
        self.module, self.rows = module, rows
        self.inputs = [leaf(module, rows, D, poison)]
        self.decodes = isinstance(module, (Decoder, TransformerDecoder))
        self.words: dict[str, Any] = {"query_padding_mask": rows}
        if self.decodes:
            self.inputs.append(leaf(module, memory_padding, memory_width(module), poison))
            self.words["memory_key_padding_mask"] = memory_padding
        keys = {TransformerEncoder: "src_key_padding_mask", TransformerDecoder: "tgt_key_padding_mask"}
        self.words[keys.get(type(module), "key_padding_mask")] = rows

    def __call__(self, **more: Any) -> Tensor:
        out: Tensor = self.module(*self.inputs, **{**self.words, **more})
        return out

    def everything(self, **more: Any) -> list[Tensor]:
        """Output, and the gradients of inputs and parameters."""
        out = self(**more)
        cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(8))
        return [out, *torch.autograd.grad((out.sin() * cotangent).sum(), [*self.inputs, *self.module.parameters()])]

    def real(self) -> int:
        return int((~self.rows).sum())

    def row(self) -> tuple[int, int, int]:
        return (1, self.real(), D) if batch_first(self.module) else (self.real(), 1, D)

    def is_0_at_padding(self, out: Tensor) -> bool:
        return not out[self.rows if batch_first(self.module) else self.rows.T].any()


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert other.isfinite().all()
        assert_close(one, other, **TOL)


def causal_words(module: nn.Module, how: str) -> dict[str, Any]:
    """What says that the future of x is hidden."""
    if how == "":
        return {}
    flag = "tgt_is_causal" if isinstance(module, TransformerDecoder) else "is_causal"
    named = {Encoder: "attn_mask", Decoder: "attn_mask", TransformerEncoder: "mask", TransformerDecoder: "tgt_mask"}
    if how == "flag":
        return {flag: True}
    if how == "tensor":
        return {named[type(module)]: torch.ones(L, L).triu(1).bool()}
    return {named[type(module)].replace("attn_", ""): masks.causal()}


# --- packed once ------------------------------------------------------------------------------------------------------


@pytest.mark.thin(4)
@every_stack
@pytest.mark.parametrize("pattern", ROWS)
def test_packed_once(kind: str, pattern: str, padded: Callable[..., Any], log: list[Any]) -> None:
    """One row from the first block to the last, in training with gradients and in eval without."""
    for training in (True, False):
        run = Run(filled(STACKS[kind]()).train(training), ROWS[pattern])
        with torch.set_grad_enabled(training):
            call = run.everything if training else lambda run=run: [run()]
            want = padded(call)
            assert {word for word, _ in log} == {"block"}
            log.clear()
            got = call()
        same(got, want)
        assert run.is_0_at_padding(got[0])
        if training:
            assert run.is_0_at_padding(got[1])
        depth = len(run.module.layers)
        shape = tuple(run.inputs[0].shape)
        assert log == [("pack", shape), *[("block", run.row())] * depth, ("unpack", run.row())]
        log.clear()


@pytest.mark.thin(3)
@every_stack
@pytest.mark.parametrize("how", ["flag", "tensor", "Mask"])
def test_causal(kind: str, how: str, padded: Callable[..., Any], log: list[Any]) -> None:
    for pattern in ("right", "holes", "an empty sample"):
        run = Run(filled(STACKS[kind]()), ROWS[pattern])
        words = causal_words(run.module, how)
        want = padded(lambda run=run, words=words: run.everything(**words))
        log.clear()
        same(run.everything(**words), want)
        assert [word for word, _ in log].count("pack") == 1
        plain = run()
        assert (plain - want[0]).abs().max() > 1e-3, "the future made no difference"


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["Decoder", "TransformerDecoder, (L, B, D)"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("pattern", ["right", "left", "an empty sample"])
def test_padding_of_memories(kind: str, memory: str, pattern: str, padded: Callable[..., Any], log: list[Any]) -> None:
    run = Run(filled(DECODERS[kind]()), ROWS[pattern], MEMORY[memory])
    want = padded(run.everything)
    log.clear()
    got = run.everything()
    same(got, want)
    assert [word for word, _ in log].count("pack") == 1
    where = MEMORY[memory] if batch_first(run.module) else MEMORY[memory].T
    assert not got[2][where].any(), "padding of the memory has a gradient"


@every_decoder
def test_memories_without_padding_and_of_the_same_length(kind: str, padded: Callable[..., Any], log: list[Any]) -> None:
    for padding in (hidden("#" * L, "#" * L, "#" * L), SOME, ROWS["right"]):
        run = Run(filled(DECODERS[kind]()), ROWS["right"], padding)
        if not padding.any():
            del run.words["memory_key_padding_mask"]
        want = padded(run.everything)
        log.clear()
        same(run.everything(), want)
        assert [word for word, _ in log].count("pack") == 1


def test_a_causal_memory(padded: Callable[..., Any], log: list[Any]) -> None:
    """Positions of x and of the memory are counted alike where both begin at 0, else it is not packed."""
    for rows, memory, packs in (("right", "right", 1), ("left", "right", 0), ("right", "holes", 0)):
        run = Run(filled(DECODERS["TransformerDecoder"]()), ROWS[rows], MEMORY[memory])
        want = padded(lambda run=run: run.everything(memory_is_causal=True))
        log.clear()
        same(run.everything(memory_is_causal=True), want)
        assert [word for word, _ in log].count("pack") == packs


@pytest.mark.parametrize("kind", ["Decoder", "TransformerDecoder, (L, B, D)"])
def test_a_single_decoder_block(kind: str, padded: Callable[..., Any], log: list[Any]) -> None:
    stack = filled(DECODERS[kind]())
    run = Run(stack, SOME)
    run.module = stack.layers[0]
    want = padded(run.everything)
    log.clear()
    same(run.everything(), want)
    assert [word for word, _ in log] == ["block", "pack", "unpack"]


def test_the_rule_of_torchs_nested_tensor(padded: Callable[..., Any], log: list[Any]) -> None:
    """0 at padding before the last norm, which puts its bias there; behind it too with `query_padding_mask`."""
    module = filled(TransformerEncoder(layer(batch_first=True), 2, norm()))
    assert module.use_nested_tensor
    x = leaf(module, SOME, D, math.nan)
    want = padded(lambda: module(x, src_key_padding_mask=SOME))
    log.clear()
    got = module(x, src_key_padding_mask=SOME)
    assert_close(got, want, **TOL)
    assert_close(got[SOME], module.norm.bias.expand(int(SOME.sum()), D), **TOL)
    assert [word for word, _ in log] == ["pack", "block", "block", "unpack"]
    assert not module(x, src_key_padding_mask=SOME, query_padding_mask=SOME)[SOME].any()
    module.use_nested_tensor = False
    log.clear()
    assert module(x.nan_to_num(0.5), src_key_padding_mask=SOME)[SOME].any()
    assert {word for word, _ in log} == {"block"}


def test_the_whole_transformer(padded: Callable[..., Any], log: list[Any]) -> None:
    """Its encoder packs by the rule above; its decoder computes padding, as torch does."""
    model = filled(Transformer(D, H, 2, 2, M, 0.0, batch_first=True, **F64))
    source, target = leaf(model, SOME_MEMORY, D, math.nan), leaf(model, SOME, D, 0.5)
    words = {"src_key_padding_mask": SOME_MEMORY, "memory_key_padding_mask": SOME_MEMORY, "tgt_key_padding_mask": SOME}

    def everything() -> list[Tensor]:
        out = model(source, target, tgt_is_causal=True, **words)
        return [out, *torch.autograd.grad(out.sin().sum(), [source, target, *model.parameters()])]

    want = padded(everything)
    log.clear()
    same(everything(), want)
    assert [word for word, _ in log] == ["pack", "block", "block", "unpack", "block", "block"]


def test_what_padding_holds_has_no_influence() -> None:
    for kind in ("Encoder", "Decoder", "TransformerDecoder, (L, B, D)"):
        module = filled(STACKS[kind]())
        clean = Run(module, SOME, poison=0.0).everything()
        for poison in (math.nan, math.inf, 1e300):
            same(Run(module, SOME, poison=poison).everything(), clean)


def test_nan_in_one_sample_stays_there() -> None:
    for kind in ("Encoder", "Decoder"):
        for place in (0, -1):
            run = Run(filled(STACKS[kind]()), ROWS["right"])
            if place == -1 and not run.decodes:
                continue
            with torch.no_grad():
                run.inputs[place][1, 1] = math.nan
                out = run()
            assert [bool(sample.isnan().any()) for sample in out] == [False, True, False]


def test_checkpointing_and_dropout(log: list[Any]) -> None:
    for kind, make in (
        ("Encoder", lambda: Encoder([block(dropout=0.5), block(dropout=0.5)])),
        ("Decoder", lambda: Decoder([decoder_block(dropout=0.5), decoder_block(dropout=0.5)])),
    ):
        run = Run(filled(make()).train(), SOME)
        found = []
        for reentrant in (None, False, True, None):
            torch.manual_seed(5 if len(found) < 3 else 6)
            log.clear()
            leaves = [*run.inputs, *run.module.parameters()]
            for one in leaves:
                one.grad = None
            call = lambda *inputs, run=run: run.module(*inputs, **run.words)  # noqa: E731
            out = call(*run.inputs) if reentrant is None else checkpoint(call, *run.inputs, use_reentrant=reentrant)
            out.sin().sum().backward()
            found.append([out, *(one.grad for one in leaves)])
            assert ("pack", (B, L, D)) in log, kind
        same(found[1], found[0])
        same(found[2], found[0])
        assert not torch.equal(found[3][0], found[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes_and_autocast(dtype: torch.dtype, padded: Callable[..., Any], log: list[Any]) -> None:
    for kind in ("Encoder", "Decoder"):
        run = Run(filled(STACKS[kind]()).float(), SOME, poison=0.0)
        run.inputs = [x.detach().float().requires_grad_() for x in run.inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            want = padded(run)
            log.clear()
            got = run()
        assert [word for word, _ in log].count("pack") == 1
        assert got.dtype == want.dtype
        assert_close(got, want, rtol=64 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


# --- not packed as a whole --------------------------------------------------------------------------------------------


class OwnBlock(EncoderBlock):
    """A subclass may do anything."""


class OwnDecoderBlock(DecoderBlock):
    """Likewise."""


def hooked(stack: nn.Module) -> nn.Module:
    stack.layers[1].register_forward_hook(lambda *_: None)
    return stack


def patched(stack: nn.Module) -> nn.Module:
    original = stack.layers[0].forward
    stack.layers[0].forward = lambda *given, **words: original(*given, **words)
    return stack


SEPARATE: dict[str, Callable[[], nn.Module]] = {
    "a hook on a block": lambda: hooked(ENCODERS["Encoder"]()),
    "a hook on a layer": lambda: hooked(ENCODERS["TransformerEncoder"]()),
    "a hook on a decoder block": lambda: hooked(DECODERS["Decoder"]()),
    "a hook on a decoder layer": lambda: hooked(DECODERS["TransformerDecoder, (L, B, D)"]()),
    "a forward of its own": lambda: patched(ENCODERS["Encoder"]()),
    "a subclass": lambda: Encoder([block(), OwnBlock(D, H, feedforward_dim=M, **F64)]),
    "a subclass of the decoder block": lambda: Decoder(
        [decoder_block(), OwnDecoderBlock(D, H, feedforward_dim=M, memory_dim=M_DIM, **F64)]
    ),
    "other numbers of heads": lambda: Encoder([block(), EncoderBlock(D, 5, feedforward_dim=M, **F64)]),
    "other numbers of heads in decoders": lambda: Decoder(
        [decoder_block(), DecoderBlock(D, 5, feedforward_dim=M, memory_dim=M_DIM, **F64)]
    ),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_each_block_packs_for_itself(name: str, padded: Callable[..., Any], log: list[Any]) -> None:
    """Who watches or replaces a block sees what the user would."""
    run = Run(filled(SEPARATE[name]()), SOME, poison=0.5)
    want = padded(run.everything)
    log.clear()
    same(run.everything(), want)
    shape = tuple(run.inputs[0].shape)
    assert log == [("block", shape), ("pack", shape), ("unpack", run.row())] * 2


UNKNOWN: dict[str, Callable[[nn.Module], Any]] = {
    "a hook inside": lambda stack: stack.layers[1].linear1.register_forward_hook(lambda *_: None),
    "a hook on attention": lambda stack: stack.layers[1].self_attn.register_forward_pre_hook(lambda *_: None),
    "a module of the user's": lambda stack: setattr(stack.layers[1], "norm2", nn.Sequential(norm())),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("kind", ["Encoder", "Decoder", "TransformerEncoder", "TransformerDecoder"])
def test_one_unknown_block_among_others(name: str, kind: str, padded: Callable[..., Any], log: list[Any]) -> None:
    """That one sees padded shapes; the other packs for itself."""
    stack = filled(STACKS[kind]())
    UNKNOWN[name](stack)
    run = Run(stack, SOME, poison=0.5)
    want = padded(run.everything)
    log.clear()
    same(run.everything(), want)
    shape = tuple(run.inputs[0].shape)
    assert log == [("block", shape), ("pack", shape), ("unpack", run.row()), ("block", shape)]


def test_a_hook_on_the_memorys_attention(padded: Callable[..., Any], log: list[Any]) -> None:
    run = Run(filled(DECODERS["Decoder"]()), SOME, poison=0.5)
    seen = []
    for one in run.module.layers:
        one.multihead_attn.register_forward_pre_hook(lambda _, given: seen.extend(x.shape for x in given))
    want = padded(run.everything)
    log.clear()
    seen.clear()
    same(run.everything(), want)
    assert log == [("block", (B, L, D))] * 2
    assert set(seen) == {(B, L, D), (B, S, M_DIM)}


def test_mixed_layouts_in_one_block(padded: Callable[..., Any], log: list[Any]) -> None:
    """The attention to the memory reads (L, B, D), so each is told apart: the caller sees the same error or numbers."""
    stack = filled(DECODERS["TransformerDecoder"]())
    run = Run(stack, SOME, poison=0.5)
    stack.layers[1].multihead_attn.batch_first = False
    for call in (padded, lambda function: function()):
        with pytest.raises(ValueError, match=r"^MultiheadAttention: key must have the query's batch size 7"):
            call(run)
    assert {word for word, _ in log if word != "block"} <= {"pack", "unpack"}


@pytest.mark.parametrize("kind", STACKS)
def test_weights_and_single_samples_are_computed_as_they_are(
    kind: str, padded: Callable[..., Any], log: list[Any]
) -> None:
    run = Run(filled(STACKS[kind]()), SOME, poison=0.5)
    want, want_weights = padded(lambda: run(need_weights=True))
    out, weights = run(need_weights=True)
    assert_close((out, weights), (want, want_weights), **TOL)
    assert_close(run(), out, **TOL)
    batch = 0 if batch_first(run.module) else 1
    run.inputs = [x.select(batch, 2) for x in run.inputs]
    run.words = {name: padding[2] for name, padding in run.words.items()}
    log.clear()
    assert_close(run(), out.select(batch, 2), **TOL)
    assert {word for word, _ in log} == {"block"}


@every_decoder
def test_rows_alone_or_keys_alone_are_not_packed(kind: str, padded: Callable[..., Any], log: list[Any]) -> None:
    for dropped in ("query_padding_mask", "key"):
        run = Run(filled(DECODERS[kind]()), SOME, poison=0.5)
        run.words = {
            name: padding
            for name, padding in run.words.items()
            if (name != dropped if dropped != "key" else name in ("query_padding_mask", "memory_key_padding_mask"))
        }
        want = padded(run.everything)
        log.clear()
        same(run.everything(), want)
        assert {word for word, _ in log} == {"block"}


# --- refusals ---------------------------------------------------------------------------------------------------------

BAD_ROWS: dict[str, Any] = {
    "floating": SOME.double(),
    "of integers": SOME.int(),
    "of one sample": SOME[0],
    "3-D": SOME[..., None],
    "transposed": SOME.T,
    "longer": torch.cat([SOME, SOME[:, :1]], dim=1),
    "a list": SOME.tolist(),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", BAD_ROWS)
@every_stack
def test_padding_that_does_not_fit(kind: str, name: str, padded: Callable[..., Any]) -> None:
    """The same words as in the padded form, from the block that was given it."""
    run = Run(filled(STACKS[kind]()), SOME, poison=0.5)
    part = type(run.module.layers[0]).__name__
    for call in (padded, lambda function: function()):
        with pytest.raises(ValueError, match=rf"^{part}: query_padding_mask must be bool \(3, 7\), True = padding; "):
            call(lambda: run(query_padding_mask=BAD_ROWS[name]))


def test_masks_and_inputs_that_do_not_fit(padded: Callable[..., Any]) -> None:
    decoder = filled(DECODERS["Decoder"]())
    encoder = filled(ENCODERS["Encoder"]())
    decode, encode = Run(decoder, SOME, poison=0.5), Run(encoder, SOME, poison=0.5)
    x, memory = decode.inputs
    rows = {"query_padding_mask": SOME, "key_padding_mask": SOME}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: encode(mask=~SOME), r"MultiheadAttention: mask must be a Mask of headwise\.masks; .* got Tensor"),
        (lambda: decode(mask="causal"), r"MultiheadAttention: mask must be a Mask of headwise\.masks; .* got str"),
        (lambda: decode(memory_mask=~SOME), r"MultiheadAttention: mask must be a Mask .* got Tensor"),
        (lambda: decode(mask=masks.padding([3, 4])), r"padding: lengths must have one entry per sample, B = 3"),
        (lambda: decode(memory_key_padding_mask=SOME), r"MultiheadAttention: key_padding_mask must be \(B, S\)"),
        (lambda: encoder(None, **rows), r"EncoderBlock: x must be a tensor, 3-D"),
        (lambda: decoder(x, memory.tolist(), **rows), r"MultiheadAttention: query, key and value must be tensors"),
        (lambda: decoder(x, memory[:2], **rows), r"MultiheadAttention: key must have the query's batch size 3; "),
        (lambda: decoder(x, memory[..., 1:], **rows), rf"MultiheadAttention: key must be {M_DIM} wide; got 5"),
        (lambda: decoder(x.float(), memory, **rows), r"DecoderBlock: x must have the parameters' dtype"),
        (lambda: encoder(x[..., 1:], **rows), rf"EncoderBlock: x must be {D} wide; got 9 \(x \(3, 7, 9\)\)"),
    ]
    for function, message in cases:
        for call in (padded, lambda function: function()):
            with pytest.raises(ValueError, match=f"^{message}"):
                call(function)


# --- where numbers must not be read -----------------------------------------------------------------------------------


@pytest.mark.slow  # loads torch's compiler
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_vmap_and_compiled_calls_are_padded(kind: str, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Dynamo would trace the log
    set_price(monkeypatch, 0)
    packs: list[int] = []
    original = core_packing.sequences
    monkeypatch.setattr(core_packing, "sequences", lambda *given: (packs.append(1), original(*given))[1])
    run = Run(filled(STACKS[kind]()).requires_grad_(False), SOME, poison=0.5)
    inputs = [x.detach() for x in run.inputs]
    want = run.module(*inputs, **run.words)
    assert packs
    packs.clear()

    def call(*given: Tensor) -> Tensor:
        return run.module(*given, **run.words)

    assert_close(torch.func.vmap(call)(*[torch.stack([x, x]) for x in inputs])[1], want, **TOL)
    assert_close(torch.compile(call, backend="eager", fullgraph=True)(*inputs), want, **TOL)
    assert not packs


def test_as_much_is_saved_as_it_costs(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    """A stack pays what each of its blocks would."""
    run = Run(filled(ENCODERS["Encoder"]()), SOME, poison=0.5)
    price = packing._PER_POSITION * D**2 * int(SOME.sum()) / B
    for offset, packed in ((0, True), (1, False)):
        for name in ("TURN", "TURN_GRAD"):
            monkeypatch.setattr(packing, name, price + offset)
        log.clear()
        run()
        assert ("pack" in [word for word, _ in log]) == packed
