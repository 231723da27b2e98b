"""Two processes that compute together over gloo, and the jobs that they run; `Pair.run` gives each one's result.

A job is a function of this module; it takes its rank first. What it raises on either process is raised by `run`.
Nothing hangs: a job that takes too long ends both processes, and so does one that failed on one of them, for which the
other may wait for ever.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import multiprocessing
import multiprocessing.connection
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 2
STEPS = 3
GRACE = 10.0  # seconds for the other process to fail too
PRELOAD = [
    "headwise",
    "tests.tools.ranks",
    "tests.tools.subjects",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]


class RankError(RuntimeError):
    """What a job raised: the words of the first process that failed."""


class Pair:
    """Two processes, started at the first job and after each failure."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def run(self, job: str, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """The results of `job(rank, *arguments)`.

        Raises:
            RankError: it raised on one of them, one of them died, or time is up.
        """
        self._start()
        for pipe in self.pipes:
            pipe.send_bytes(_packed((job, arguments)))
        until, found, told = time.monotonic() + timeout, {}, None
        while len(found) < SIZE:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in found]
            ready = multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic()))
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    failed, found[rank] = _unpacked(pipe.recv_bytes())
                except EOFError:
                    failed, found[rank], until = True, f"process {rank} died", 0.0
                if failed:
                    told, until = told or found[rank], min(until, time.monotonic() + GRACE)
            if not ready:
                told = told or f"{job} took longer than {timeout} s; done: processes {sorted(found)}"
                break
        if told is None:
            return [found[rank] for rank in range(SIZE)]
        if len(found) < SIZE or job == "in_step" or not self._in_step():
            self.end()
        raise RankError(told)

    def _in_step(self) -> bool:
        """Whether both processes are ready for the same next thing: they failed alike."""
        try:
            return self.run("in_step", timeout=GRACE) == [1.0, 1.0]
        except RankError:
            return False

    def _start(self) -> None:
        if self.processes:
            return
        self.starts += 1
        store = self.folder / f"store{self.starts}"
        spawning = multiprocessing.get_context("forkserver")  # imports once, however often a process is started
        spawning.set_forkserver_preload(PRELOAD)
        for rank in range(SIZE):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_serve, args=(rank, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def end(self) -> None:
        """End both processes, whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(rank: int, store: str, pipe: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    patience = datetime.timedelta(seconds=50)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=patience)
    while True:
        try:
            job, arguments = _unpacked(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            result = (False, globals()[job](rank, *arguments))
        except BaseException as error:
            told = f"process {rank}: {type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            result = (True, told)
        pipe.send_bytes(_packed(result))


def in_step(rank: int) -> float:
    """1.0, if the other process is here too."""
    import torch.distributed as dist

    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    return number.item()


def one_process(name: str, side: str, steps: int = STEPS) -> dict[str, Any]:
    """What `train` gives in one process, on the whole batch."""
    subject, model, inputs, words, target = problem(name, side)
    return train(subject, model, inputs, words, target, steps)


def problem(name: str, side: str) -> tuple[Any, nn.Module, tuple[Tensor, ...], dict[str, Tensor], Tensor]:
    """A subject, its model and a padded batch of four, in float64."""
    from tests.tools.subjects import SUBJECTS

    subject = SUBJECTS[name]
    model = subject.build(side).double()
    inputs = tuple(x.double() for x in subject.inputs(batch=4))
    words = subject.hide(inputs)
    with torch.no_grad():
        target = torch.randn_like(subject.call(model, *inputs), generator=torch.Generator().manual_seed(3))
    return subject, model, inputs, words, target


def train(
    subject: Any,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    words: dict[str, Tensor],
    target: Tensor,
    steps: int = STEPS,
    clip: bool = True,
) -> dict[str, Any]:
    """Steps of AdamW: each output, the first gradients, the last parameters, and what eval gives then.

    eps is large: keys' biases have no gradient but what rounding leaves, which Adam would blow up.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)
    found: dict[str, Any] = {"outputs": []}
    for step in range(steps):
        out = subject.call(model, *inputs, **words)
        (out - target).square().mean().backward()
        if step == 0:
            found["grads"] = {name: whole(parameter.grad) for name, parameter in named(model)}
        if clip:
            clip_gradients(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found["outputs"].append(whole(out))
    found["parameters"] = {name: whole(parameter) for name, parameter in named(model)}
    model.eval()
    with torch.no_grad():
        found["eval"] = whole(subject.call(model, *inputs, **words))
    return found


def clip_gradients(model: nn.Module, most: float) -> None:
    """`clip_grad_norm_`, which takes sharded or whole tensors, not both: a tensor parallel model holds both."""
    kinds: dict[bool, list[Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(hasattr(parameter, "to_local"), []).append(parameter)
    if len(kinds) == 1:
        nn.utils.clip_grad_norm_(model.parameters(), most)
        return
    norms = [whole(nn.utils.get_total_norm([p.grad for p in held])) for held in kinds.values()]
    factor = min(1.0, most / (torch.stack(norms).norm().item() + 1e-6))
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by their names in one process."""
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, as a value."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def halved(rank: int, name: str, side: str) -> tuple[Any, nn.Module, tuple[Tensor, ...], dict[str, Tensor], Tensor]:
    """This process's half of the problem."""
    subject, model, inputs, words, target = problem(name, side)
    mine = slice(2 * rank, 2 * rank + 2)
    return subject, model, tuple(x[mine] for x in inputs), {w: x[mine] for w, x in words.items()}, target[mine]


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (SIZE,))


def ddp(rank: int, name: str, side: str, options: dict[str, bool]) -> dict[str, Any]:
    subject, model, *rest = halved(rank, name, side)
    return train(subject, nn.parallel.DistributedDataParallel(model, **options), *rest)


def fsdp(rank: int, name: str, side: str, where: str) -> dict[str, Any]:
    subject, model, *rest = halved(rank, name, side)
    return train(subject, shard(model, where), *rest)


def shard(model: nn.Module, where: str, **options: Any) -> nn.Module:
    """FSDP2 on the layers, the attentions, or each linear, and on the model."""
    from torch.distributed.fsdp import fully_shard

    import headwise

    ours = (headwise.TransformerEncoderLayer, headwise.TransformerDecoderLayer)
    kinds = {
        "layers": (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, *ours),
        "attention": (nn.MultiheadAttention, headwise.MultiheadAttention),
        "children": (nn.Linear,),
    }[where]
    over = mesh()
    for module in list(model.modules()):
        if isinstance(module, kinds) and module is not model:
            fully_shard(module, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def tensor_parallel(rank: int, name: str, side: str) -> dict[str, Any]:
    subject, model, *rest = problem(name, side)
    return train(subject, parallel(model, side), *rest)


def parallel(model: nn.Module, side: str) -> nn.Module:
    """The model sharded by `tp_plan`, or torch's by the plan that one would write."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from headwise.layers import tp_plan

    if side != "torch":
        return parallelize_module(model, mesh(), tp_plan(model))
    styles = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    plan = {name: styles.get(name.rpartition(".")[2]) for name, _ in model.named_modules()}
    attentions = {name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    plan = {name: style for name, style in plan.items() if style} | dict.fromkeys(attentions, ColwiseParallel())
    return parallelize_module(model, mesh(), plan)


# One attention, and a call of it. H = 6 heads, so that each process has three.
B, L, S, D, H, KDIM, VDIM = 2, 5, 7, 30, 6, 11, 13
CALLS = {
    "plain": ({}, ()),
    "no bias": ({"bias": False}, ()),
    "bias_kv": ({"add_bias_kv": True}, ("weights", "padding")),
    "bias_kv and zero": ({"add_bias_kv": True, "add_zero_attn": True}, ("each", "per head")),
    "zero": ({"add_zero_attn": True}, ("weights", "causal")),
    "kdim": ({"kdim": KDIM, "vdim": VDIM}, ("weights",)),
    "length first": ({"batch_first": False}, ("weights", "padding")),
    "unbatched": ({}, ("weights", "unbatched")),
    "average": ({}, ("weights",)),
    "each head": ({}, ("each",)),
    "causal": ({}, ("each", "causal")),
    "padding": ({}, ("each", "padding")),
    "padded queries": ({}, ("weights", "padding", "padded queries")),
    "torch's per head": ({}, ("each", "torch's per head")),
    "per sample": ({}, ("per sample",)),
    "per head": ({}, ("each", "per head", "causal")),
    "learned per head": ({}, ("each", "learned per head", "padding")),
    "learned": ({}, ("weights", "learned")),
    "ours per head": ({}, ("each", "ours per head")),
    "ours, either per head": ({}, ("weights", "ours, either per head", "causal")),
    "ours, a bias of each head and key": ({}, ("each", "ours per key")),
    "grouped, wide and gated": ({"num_kv_heads": 2, "head_dim": 5, "gate": True}, ("each", "padding")),
    "rotary with a softcap": ({"positions": "rotary", "softcap": 3.0, "head_dim": 4}, ("each", "causal")),
    "sinks": ({"sink": True, "num_kv_heads": 2}, ("each", "padding")),
    "slopes": ({"positions": "alibi", "sink": True}, ("weights", "causal")),
    "learned slopes": ({"positions": "learned", "add_bias_kv": True}, ("each", "padding")),
    "dead rows of some heads": ({}, ("each", "dead")),
}


def arguments(said: tuple[str, ...], options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Inputs, keywords, and what of these is learned, always the same numbers."""
    from headwise import masks

    draw = torch.Generator().manual_seed(5)

    def randn(*shape: int, learned: bool = False) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_(learned)

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw) < 0.3

    lengths, widths = (L, S, S), (D, options.get("kdim", D), options.get("vdim", D))
    inputs = [randn(B, length, width, learned=True) for length, width in zip(lengths, widths, strict=True)]
    words: dict[str, Any] = {"need_weights": "weights" in said or "each" in said}
    words["average_attn_weights"] = "each" not in said
    words["is_causal"] = "causal" in said
    if "unbatched" in said:
        inputs = [x.detach()[0].requires_grad_() for x in inputs]
    if not options.get("batch_first", True):
        inputs = [x.detach().transpose(0, 1).contiguous().requires_grad_() for x in inputs]
    if "padding" in said:
        words["key_padding_mask"] = torch.arange(S) >= torch.tensor([S, S - 2])[:, None]
    if "padded queries" in said:
        words["query_padding_mask"] = torch.arange(L) >= torch.tensor([L - 1, L])[:, None]
    learned = [x for x in inputs if x.requires_grad]
    drawn = {
        "torch's per head": ("attn_mask", lambda: some(B * H, L, S)),
        "per sample": ("attn_mask", lambda: some(B, L, S)),
        "per head": ("attn_mask", lambda: randn(1, H, L, S)),
        "learned per head": ("attn_mask", lambda: randn(1, H, L, S, learned=True)),
        "learned": ("attn_mask", lambda: randn(L, S, learned=True)),
        "ours per head": ("mask", lambda: masks.dense(some(B, H, L, S)) & masks.bias(randn(1, H, L, 1))),
        "ours, either per head": ("mask", lambda: masks.dense(some(1, H, 1, S)) | ~masks.dense(some(L, S))),
        "ours per key": ("mask", lambda: masks.bias(randn(B, H, 1, S, learned=True))),
        "dead": ("mask", lambda: masks.dense((torch.arange(H)[:, None] > torch.arange(L))[None, :, :, None])),
    }
    for name in said:
        if name in drawn:
            word, make = drawn[name]
            words[word] = make()
            tensors = [words[word]] if isinstance(words[word], Tensor) else words[word].tensors
            learned += [tensor for tensor in tensors if tensor.requires_grad]
    return inputs, words, learned


def attend(rank: int, name: str, mode: str) -> None:
    """Hold that sharded, an attention gives what it gives whole: outputs, weights, all gradients."""
    import headwise
    from headwise.core.positions import Alibi

    options, said = CALLS[name]
    if options.get("positions") == "learned":
        options = {**options, "positions": Alibi(H, learned=True, dtype=torch.float64)}
    torch.manual_seed(rank)  # parameters come from process 0
    model = headwise.MultiheadAttention(D, H, **{"batch_first": True} | options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    model.train(mode != "eval")
    want = results(model, said, options)
    found = results(parallel(model, "split"), said, options)
    assert list(found) == list(want)
    for what, tensor in want.items():
        torch.testing.assert_close(
            found[what], tensor, rtol=1e-9, atol=1e-10, msg=lambda text, at=what: f"{at}: {text}"
        )


def results(model: nn.Module, said: tuple[str, ...], options: dict[str, Any]) -> dict[str, Tensor | None]:
    """Output and weights, and the gradients of a loss on both."""
    inputs, words, learned = arguments(said, options)
    with torch.set_grad_enabled(model.training):
        out, weights = model(*inputs, **words)
    found = {"out": out.detach()} | ({} if weights is None else {"weights": weights.detach()})
    if model.training:
        loss = out.square().sum()
        if weights is not None:
            loss = loss + (weights.square() * torch.arange(weights.shape[-1])).sum()
        loss.backward()
        found |= {f"learned {place}": tensor.grad for place, tensor in enumerate(learned)}
        found |= {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        model.zero_grad()
    return found


def refused(rank: int, what: str) -> list[str]:
    """Hold that plans that do not fit raise before anything is sharded; what they say."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    import headwise
    from headwise.layers import tp_plan

    model: nn.Module
    if what == "heads":
        model = nn.Sequential(headwise.EncoderBlock(24, 4), headwise.EncoderBlock(24, 3))
    else:
        model = nn.Sequential(headwise.EncoderBlock(24, 4), headwise.EncoderBlock(24, 4, feedforward_dim=35))
    said = ""
    try:
        parallelize_module(model, mesh(), tp_plan(model))
    except ValueError as error:
        said = str(error)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return said


def by_hand(rank: int, sharded: tuple[str, ...]) -> list[str]:
    """What a call says, with and without weights, after a plan that a user wrote; "" where it is right."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import headwise

    said = []
    model = headwise.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = model(x, x, x)
    plan = {name: RowwiseParallel() if name == "out_proj" else ColwiseParallel() for name in sharded}
    parallelize_module(model, mesh(), plan)
    for need_weights in (False, True):
        try:
            got = model(x, x, x, need_weights=need_weights)
            torch.testing.assert_close(got, (want[0], want[1] if need_weights else None))
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def packed(rank: int, way: str, call: str) -> str:
    """What a fused attention says when it is sharded in this way; "right" where it gives what it should."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import headwise

    torch.manual_seed(0)
    width = 16
    model = headwise.MultiheadAttention(width, 4, batch_first=True, fused_qkv=True, dtype=torch.float64)
    x, y, z = torch.randn(3, 2, 5, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
    inputs = {"self": (x, x, x), "memory": (x, y, y), "apart": (x, y, z)}[call]
    want = model(*inputs, need_weights=False)[0]
    over = mesh()

    def to_shards(name: str, module: nn.Module, device_mesh: Any) -> None:
        for word in ("in_proj_weight", "in_proj_bias"):
            if word in module._parameters:
                cut = distribute_tensor(module._parameters[word].detach(), device_mesh, [Shard(0)])
                module.register_parameter(word, nn.Parameter(cut))

    def spread(module: nn.Module, given: tuple[Tensor, ...], device_mesh: Any) -> tuple[Any, ...]:
        made = {id(t): DTensor.from_local(t, device_mesh, [Replicate()]) for t in given}
        return tuple(made[id(t)] for t in given)

    def cut_by_hand(pieces: int) -> None:
        """As many rows as are this process's: of each of so many pieces."""
        own = model._parameters
        for word in ("in_proj_weight", "in_proj_bias"):
            kept = [part.chunk(SIZE)[rank] for part in own[word].detach().chunk(pieces)]
            own[word] = nn.Parameter(torch.cat(kept))
        model.out_proj = nn.Linear(width // SIZE, width, dtype=torch.float64)
        summed = want_proj.weight.detach().chunk(SIZE, dim=1)[rank]
        model.out_proj.weight = nn.Parameter(summed.clone())
        model.out_proj.bias = nn.Parameter(want_proj.bias.detach() / SIZE)

    want_proj = model.out_proj
    try:
        if way == "ColwiseParallel":
            parallelize_module(model, over, ColwiseParallel())
        elif way == "plan of a split one":
            plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()) | {"out_proj": RowwiseParallel()}
            parallelize_module(model, over, plan)
        elif way == "distribute_tensor":
            to_shards("", model, over)
        elif way == "distribute_module":
            distribute_module(model, over, to_shards, spread)
        else:
            cut_by_hand({"halves": 1, "thirds": 3}[way])
        got = model(*inputs, need_weights=False)[0]
        got = got.full_tensor() if isinstance(got, DTensor) else got
        if way in ("halves", "thirds"):
            torch.distributed.all_reduce(got)
    except (
        ValueError,
        RuntimeError,
        NotImplementedError,
        AttributeError,
    ) as error:  # torch's refusals have no one class
        return f"{type(error).__name__}: {error}"
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-9, atol=1e-10)
    return "right"


def blocks(rank: int, kind: str) -> None:
    """Hold that a block of ours gives the same sharded, in train and in eval."""
    import headwise
    from headwise.layers.packing import find_packing

    make, words = {
        "swiglu": (lambda: headwise.EncoderBlock(48, 4, activation="swiglu"), {}),
        "rmsnorm, post-norm": (lambda: headwise.EncoderBlock(48, 4, norm="rmsnorm", norm_first=False), {}),
        "an activation across the width": (lambda: headwise.EncoderBlock(48, 4, activation=nn.Softmax(-1)), {}),
        "packed": (lambda: headwise.EncoderBlock(48, 4), {"padded": True}),
        "packed, autocast": (lambda: headwise.EncoderBlock(48, 4), {"padded": True, "autocast": True}),
        "decoder": (lambda: headwise.DecoderBlock(48, 4, memory_dim=11), {}),
    }[kind]
    model = make().double()
    x = torch.randn(2, 600, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if "autocast" in words:
        model, x = model.float(), x.float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    inputs = [x, x[:, :7, :11]] if kind == "decoder" else [x]
    given: dict[str, Any] = {}
    if "padded" in words:
        hidden = torch.arange(600) >= torch.tensor([20, 600])[:, None]
        given = {"key_padding_mask": hidden, "query_padding_mask": hidden}
        with torch.no_grad():
            assert find_packing([model.eval()], x, hidden, {"key_padding_mask": hidden}) is not None

    def results() -> dict[str, Any]:
        found = {}
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in words):
            found["train"] = model.train()(*inputs, **given)
            with torch.no_grad():
                found["eval"] = model.eval()(*inputs, **given)
        found["train"].float().square().mean().backward()
        found |= {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        model.zero_grad()
        return {what: tensor.detach() for what, tensor in found.items()}

    want = results()
    parallel(model, "split")
    close = {"rtol": 3e-2, "atol": 3e-2} if "autocast" in words else {"rtol": 1e-6, "atol": 1e-8}
    found = results()
    assert list(found) == list(want)
    for what, tensor in want.items():
        torch.testing.assert_close(found[what], tensor, **close, msg=lambda text, at=what: f"{at}: {text}")


def dropped(rank: int, name: str) -> Tensor:
    """A training output with dropout, of processes that were seeded alike."""
    from tests.tools.subjects import SUBJECTS

    subject = SUBJECTS[name]
    model = parallel(subject.build("split", dropout=0.5), "split")
    torch.manual_seed(4)
    return whole(subject.call(model, *subject.inputs()))


def after(rank: int, name: str) -> dict[str, Any]:
    """A sharded model's own names, and a full checkpoint of one process in it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    from headwise.layers import own_names

    subject, model, inputs, words, _ = problem(name, "split")
    want = subject.call(model.eval(), *inputs, **words)
    own_names(model)
    full = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parallel(model, "split")
    assert list(model.state_dict()) == [key for key, _ in model.named_parameters()] == list(full)
    set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(subject.call(model, *inputs, **words), want, rtol=1e-9, atol=1e-10)
    whole_again = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert list(whole_again) == list(full)
    for key, tensor in full.items():
        torch.testing.assert_close(whole_again[key], tensor, rtol=0, atol=0)


def mixed(rank: int, name: str, side: str) -> dict[str, Any]:
    """As `fsdp`, computed in bfloat16, the gradients summed and the parameters kept in float64."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    subject, model, inputs, words, target = halved(rank, name, side)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    with no_fast_path():
        return train(subject, shard(model, "layers", mp_policy=policy), inputs, words, target, clip=False)


def mixed_by_hand(name: str, side: str) -> dict[str, Any]:
    """The same in one process: for each half of the batch a copy in bfloat16, and the mean of what these learn."""
    subject, model, inputs, words, target = problem(name, side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)
    found: dict[str, Any] = {"outputs": []}

    def forward(copied: nn.Module, mine: slice) -> Tensor:
        halves = [x[mine].bfloat16() for x in inputs]
        return subject.call(copied, *halves, **{word: x[mine] for word, x in words.items()})

    for step in range(STEPS):
        outputs = []
        for rank in range(SIZE):
            mine = slice(2 * rank, 2 * rank + 2)
            copied = copy.deepcopy(model).bfloat16()
            copied.zero_grad()
            out = forward(copied, mine)
            (out - target[mine]).square().mean().backward()
            outputs.append(out.detach())
            for parameter, learned in zip(model.parameters(), copied.parameters(), strict=True):
                grad = learned.grad.double() / SIZE
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        if step == 0:
            found["grads"] = {name: whole(parameter.grad) for name, parameter in named(model)}
        optimizer.step()
        optimizer.zero_grad()
        found["outputs"].append(torch.cat(outputs))
    found["parameters"] = {name: whole(parameter) for name, parameter in named(model)}
    model.eval().bfloat16()
    with torch.no_grad(), no_fast_path():
        found["eval"] = torch.cat([forward(model, slice(0, 2)), forward(model, slice(2, 4))])
    return found


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """torch's own in eval rounds elsewhere, and some of FSDP's hooks turn it off."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def trained(name: str, side: str, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step of AdamW, whole or sharded, and its optimizer."""
    from headwise.layers import own_names

    subject, model, inputs, words, target = problem(name, side)
    if side == "split":
        own_names(model)
    model = sharded(model, side, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    (subject.call(model, *inputs, **words) - target).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def untrained(name: str, side: str, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with other parameters, whole or sharded, and a new optimizer."""
    from tests.tools.subjects import SUBJECTS

    from headwise.layers import own_names

    model = SUBJECTS[name].build(side, seed=9).double()
    if side == "split":
        own_names(model)
    model = sharded(model, side, how)
    return model, torch.optim.AdamW(model.parameters(), lr=0.3)


def sharded(model: nn.Module, side: str, how: str) -> nn.Module:
    return {
        "whole": lambda: model,
        "FSDP2": lambda: shard(model, "layers"),
        "FSDP2 on attention": lambda: shard(model, "attention"),
        "tensor parallel": lambda: parallel(model, side),
    }[how]()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Any]:
    """A distributed checkpoint: by torch's helpers, and beside it the plain `state_dict()`; what is in it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states, learned = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": learned, "plain": model.state_dict()}, checkpoint_id=folder)
    return held(model, optimizer)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Any]:
    """What a model holds after it loaded what `save` saved, which has to be the same either way."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    states, learned = get_state_dict(model, optimizer)
    plain = {key: torch.empty_like(tensor) for key, tensor in model.state_dict().items()}
    dcp.load({"model": states, "optimizer": learned, "plain": plain}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=learned)
    by_helpers = held(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(plain)
    for key, tensor in held(model).items():
        torch.testing.assert_close(tensor, by_helpers[key], rtol=0, atol=0)
    return by_helpers


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All that a model and its optimizer hold, by name and whole."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: whole(parameter) for parameter, name in names.items()}
    if optimizer is not None:
        for parameter, name in names.items():
            for word, value in optimizer.state[parameter].items():
                found[f"optimizer {name} {word}"] = whole(value)
        found["optimizer lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return found


def saved(rank: int, name: str, side: str, how: str, folder: str) -> dict[str, Any]:
    return save(*trained(name, side, how), folder)


def loaded(rank: int, name: str, side: str, how: str, folder: str) -> dict[str, Any]:
    return load(*untrained(name, side, how), folder)


def broadcast(rank: int, name: str, side: str) -> dict[str, Any]:
    """A model built on the meta device and sharded, after process 0 gave it the full checkpoint of one process."""
    from tests.tools.subjects import SUBJECTS
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from headwise.layers import own_names

    full, model = {}, SUBJECTS[name].build(side).double()
    if side == "split":
        own_names(model)
    if rank == 0:
        full = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model = shard(model.to("meta"), "layers").to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    return held(model)
