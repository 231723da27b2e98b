"""Training over two processes (gloo): each way of sharing the work gives what one process gives."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.tools import ranks
from tests.tools.subjects import SUBJECTS, each_side, each_subject, split_side


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two processes, for all tests here."""
    pair = ranks.Pair(tmp_path_factory.mktemp("stores"))
    yield pair
    pair.end()


one_process = functools.lru_cache(ranks.one_process)


def same(got, want, what, rtol=1e-9, atol=1e-10):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def same_training(found, want, *, shared):
    """Each process's result is that of one process; with `shared`, of its half of the batch."""
    loose = {"rtol": 1e-6, "atol": 1e-7}  # steps blow up what rounding leaves
    for rank, one in enumerate(found):
        for what, close in (("grads", {}), ("parameters", loose)):
            assert list(one[what]) == list(want[what])
            for name, tensor in want[what].items():
                same(one[what][name], tensor, f"{what} {name} of process {rank}", **close)
        mine = slice(2 * rank, 2 * rank + 2) if shared else slice(None)
        for step, out in enumerate(want["outputs"]):
            same(one["outputs"][step], out[mine], f"output {step} of process {rank}", **({} if step == 0 else loose))
        same(one["eval"], want["eval"][mine], f"eval of process {rank}", **loose)


ddp = pytest.mark.tool(
    order=14,
    tool="DDP",
    holds="outputs, gradients and trained parameters are those of one process, with its options too",
)


@ddp
@each_subject
@each_side
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["plain", "static", "unused"],
)
def test_ddp(pair, subject, side, options):
    found = pair.run("ddp", subject.name, side, options)
    same_training(found, one_process(subject.name, side), shared=True)


fsdp = pytest.mark.tool(
    order=14, tool="FSDP2", holds="`fully_shard` on layers and attentions: outputs, gradients, clipping, AdamW, eval"
)


@fsdp
@each_subject
@each_side
@pytest.mark.parametrize("where", ["layers", "attention"])
def test_fsdp(pair, subject, side, where):
    found = pair.run("fsdp", subject.name, side, where)
    same_training(found, one_process(subject.name, side), shared=True)


fsdp_children = pytest.mark.tool(
    order=14,
    tool="FSDP2",
    holds="`fully_shard` on each `nn.Linear`, `out_proj` among them",
    torch="it raises: `out_proj` is never called, so its shards are never gathered (pytorch#99432)",
)


@fsdp_children
@each_subject
@each_side
def test_fsdp_on_children(pair, subject, side):
    found = pair.run("fsdp", subject.name, side, "children")
    same_training(found, one_process(subject.name, side), shared=True)


@pytest.mark.tool(
    order=14, tool="FSDP2", holds="`MixedPrecisionPolicy`: computed in bfloat16, trained in the parameters' own dtype"
)
@each_subject
@each_side
def test_fsdp_in_mixed_precision(pair, subject, side):
    """The reference is a copy in bfloat16 for each half, in one process; the numbers are those of the same kernels."""
    same_training(pair.run("mixed", subject.name, side), ranks.mixed_by_hand(subject.name, side), shared=True)


tensor_parallel = pytest.mark.tool(
    order=14,
    tool="tensor parallel",
    holds="`tp_plan`: outputs, gradients, trained parameters and eval are those of one process",
    torch="`ColwiseParallel` refuses the attention (pytorch#99432)",
)


@tensor_parallel
@each_subject
@split_side
def test_tensor_parallel(pair, subject, side):
    found = pair.run("tensor_parallel", subject.name, side)
    same_training(found, one_process(subject.name, side), shared=False)


@tensor_parallel
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("call", ranks.CALLS)
def test_calls_of_a_sharded_attention(pair, call, mode):
    """Masks that speak of heads, returned weights, appended keys: on each process what one process gives."""
    pair.run("attend", call, mode)


@tensor_parallel
@pytest.mark.parametrize(
    "kind",
    [
        "swiglu",
        "rmsnorm, post-norm",
        "an activation across the width",
        "packed",
        "packed, autocast",
        "decoder",
    ],
)
def test_blocks_of_ours(pair, kind):
    pair.run("blocks", kind)


@tensor_parallel
@each_subject
def test_a_full_checkpoint_loads_into_a_sharded_model(pair, subject):
    pair.run("after", subject.name)


@tensor_parallel
@each_subject
def test_processes_that_are_seeded_alike_drop_alike(pair, subject):
    """Else the copies of what is not sharded would drift apart."""
    first, second = pair.run("dropped", subject.name)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first, subject.call(subject.build("split").train(), *subject.inputs()))


refusals = pytest.mark.tool(
    order=14,
    tool="tensor parallel",
    holds="what cannot be sharded, a packed projection above all, raises on each process or is right; never wrong",
)


@refusals
@pytest.mark.parametrize(
    ("what", "words"),
    [("heads", "got 2, and 1.self_attn has num_heads 3"), ("width", "got 2, and 1.linear1 has feedforward_dim 35")],
)
def test_a_mesh_that_does_not_fit(pair, what, words):
    for said in pair.run("refused", what):
        assert said.startswith("tp_plan: the size of the mesh must divide")
        assert words in said


@refusals
@pytest.mark.parametrize(
    ("sharded", "without", "with_weights"),
    [
        (("q_proj", "k_proj", "v_proj", "out_proj"), "", "ValueError: MultiheadAttention: need_weights must be False"),
        (("k_proj", "v_proj"), *2 * ("ValueError: MultiheadAttention: projections must be sharded alike",)),
        (("q_proj",), *2 * ("ValueError: MultiheadAttention: projections must be sharded alike",)),
    ],
    ids=["all", "keys and values", "queries"],
)
def test_plans_by_hand(pair, sharded, without, with_weights):
    """An average over the heads of one process is not the average; fewer keys than queries are not shared heads."""
    for said in pair.run("by_hand", sharded):
        for found, wanted in zip(said, (without, with_weights), strict=True):
            assert found.startswith(wanted) if wanted else found == ""


@refusals
@pytest.mark.parametrize("call", ["self", "memory", "apart"])
@pytest.mark.parametrize(
    ("way", "may_be_right"),
    [
        ("ColwiseParallel", False),
        ("plan of a split one", False),
        ("distribute_tensor", False),
        ("distribute_module", True),
        ("halves", False),
        ("thirds", True),
    ],
)
def test_a_packed_projection_is_never_sharded_wrongly(pair, way, may_be_right, call):
    for said in pair.run("packed", way, call):
        assert "Error: " in said or (may_be_right and said == "right")


checkpoints = pytest.mark.tool(
    order=14,
    tool="distributed checkpoints",
    holds="saved sharded, loaded whole, and the other way: model and optimizer, the names match",
)
quiet = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:TypedStorage is deprecated",
)


some = ("MultiheadAttention", "Transformer", "upgraded model")  # these jobs take seconds
some_subjects = pytest.mark.parametrize("subject", [SUBJECTS[name] for name in some], ids=some)


def same_held(found, want):
    for one in found:
        assert list(one) == list(want)
        for name, tensor in want.items():
            same(one[name], tensor, name, 0, 0)


@checkpoints
@quiet
@each_subject
@each_side
def test_checkpoints_of_fsdp(pair, subject, side, tmp_path):
    """There and back: saved by two processes, loaded by one, saved by it, loaded by two."""
    want = pair.run("saved", subject.name, side, "FSDP2", f"{tmp_path}/two")[0]
    model, optimizer = ranks.untrained(subject.name, side, "whole")
    same_held([ranks.load(model, optimizer, f"{tmp_path}/two")], want)
    ranks.save(model, optimizer, f"{tmp_path}/one")
    same_held(pair.run("loaded", subject.name, side, "FSDP2 on attention", f"{tmp_path}/one"), want)


@checkpoints
@each_subject
@each_side
def test_a_full_checkpoint_is_broadcast_to_a_sharded_model(pair, subject, side):
    """Built on the meta device, so that no process but the first ever holds it whole."""
    want = ranks.held(subject.build(side).double())
    same_held(pair.run("broadcast", subject.name, side), want)


@checkpoints
@quiet
@some_subjects
def test_torchs_checkpoint_loads_into_the_fused_layout(pair, subject, tmp_path):
    """Every name is torch's, the optimizer's too."""
    want = pair.run("saved", subject.name, "torch", "FSDP2", f"{tmp_path}/two")[0]
    same_held([ranks.load(*ranks.untrained(subject.name, "fused", "whole"), f"{tmp_path}/two")], want)
    same_held(pair.run("loaded", subject.name, "fused", "FSDP2", f"{tmp_path}/two"), want)


@pytest.mark.tool(
    order=14,
    tool="distributed checkpoints",
    holds="saved tensor parallel, loaded whole or by FSDP2, and the other way: model and optimizer",
)
@quiet
@some_subjects
def test_checkpoints_of_tensor_parallel_models(pair, subject, tmp_path):
    want = pair.run("saved", subject.name, "split", "tensor parallel", f"{tmp_path}/two")[0]
    model, optimizer = ranks.untrained(subject.name, "split", "whole")
    same_held([ranks.load(model, optimizer, f"{tmp_path}/two")], want)
    same_held(pair.run("loaded", subject.name, "split", "FSDP2", f"{tmp_path}/two"), want)
    ranks.save(model, optimizer, f"{tmp_path}/one")
    same_held(pair.run("loaded", subject.name, "split", "tensor parallel", f"{tmp_path}/one"), want)
