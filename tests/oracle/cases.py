"""What the oracle, property and semantics tests share: sizes, ways to call, and a float64 oracle for the module.

Letters: B batch, H heads, L query positions, S key positions, K head width, D model width. Sizes are different primes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from headwise import MultiheadAttention, attention
from headwise.core import reference

B, H, L, S, K = 3, 2, 5, 7, 11
D = H * K
INF = math.inf
TOLERANCE = {"rtol": 2e-5, "atol": 5e-6}


class Case(NamedTuple):
    """One mask, twice.

    Attributes:
        given: keyword arguments of the call; `mask` is `(builder, *tensors)`, built inside so that vmap sees them.
        means: what the oracle is told: `keep` and `bias` (broadcast to (B, H, L, S)), `query_padding` (B, L).
    """

    given: dict[str, Any]
    means: dict[str, Any]


class Way(NamedTuple):
    """How the module is called."""

    fused: bool
    batch_first: bool
    train: bool
    weights: str  # "off", "averaged" or "per head"
    path: str  # "eager", "compiled", "vmapped" or "aot": see `through`

    def __str__(self) -> str:
        layout = "fused" if self.fused else "split"
        first = "BLD" if self.batch_first else "LBD"
        return f"{layout}-{first}-{'train' if self.train else 'eval'}-{self.weights.replace(' ', '_')}-{self.path}"


_WEIGHTS = ("off", "averaged", "per head")
_MODES = list(itertools.product((True, False), _WEIGHTS))  # train, weights
# every pair of the four choices, not every product of them
EAGER_WAYS = [
    Way(fused, fused == (index % 2 == 0), train, weights, "eager")
    for index, (train, weights) in enumerate(_MODES)
    for fused in (False, True)
]
VMAPPED_WAYS = [
    Way(index % 2 == 1, index % 3 != 1, train, weights, "vmapped") for index, (train, weights) in enumerate(_MODES)
]
COMPILED_WAYS = [Way(False, True, True, "averaged", "compiled"), Way(True, False, False, "per head", "compiled")]
AOT_WAYS = [
    Way(False, False, True, "off", "aot"),
    Way(True, True, True, "averaged", "aot"),
    Way(False, True, False, "per head", "aot"),
]

# (backend, whether gradients are needed, path); function transforms leave only the plain backend, which None picks
Call = tuple[str | None, bool, str]
CALLS: list[Call] = [
    *itertools.product(("sdpa", "plain"), (True, False), ("eager",)),
    (None, True, "vmapped"),
    (None, False, "vmapped"),
    ("sdpa", True, "compiled"),
    ("plain", False, "compiled"),
]
AOT_CALLS: list[Call] = [*itertools.product(("sdpa", "plain"), (True, False), ("aot",))]

every_training_way = pytest.mark.parametrize(
    "way",
    [
        *(way for way in (*EAGER_WAYS, *VMAPPED_WAYS, *COMPILED_WAYS) if way.train),
        *(pytest.param(way, marks=pytest.mark.slow) for way in AOT_WAYS if way.train),
    ],
    ids=str,
)
every_eager_way = pytest.mark.parametrize("way", EAGER_WAYS, ids=str)
every_way = pytest.mark.parametrize(
    "way",
    [*EAGER_WAYS, *VMAPPED_WAYS, *COMPILED_WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in AOT_WAYS)],
    ids=str,
)


def call_name(call: Call) -> str:
    backend, grad, path = call
    return f"{backend or 'any'}-{'grad' if grad else 'nograd'}-{path}"


every_call = pytest.mark.parametrize(
    "call", [*CALLS, *(pytest.param(call, marks=pytest.mark.slow) for call in AOT_CALLS)], ids=call_name
)


def through(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` on a path.

    "eager"; "compiled": traced to one graph; "aot": lowered too, with its backward; "vmapped": over two equal lanes, of
    which the second is returned.

    Tensors anywhere in the arguments become inputs of the graph or lanes; the same tensor stays the same tensor.
    """
    if path == "eager":
        return function(*arguments)
    leaves, spec = tree_flatten(arguments)
    tensors: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not any(leaf is known for known in tensors):
            tensors.append(leaf)
    places = [
        next((i for i, tensor in enumerate(tensors) if tensor is leaf), None) if isinstance(leaf, Tensor) else None
        for leaf in leaves
    ]

    def flat(*given: Tensor) -> Any:
        filled = [leaf if place is None else given[place] for leaf, place in zip(leaves, places, strict=True)]
        return function(*tree_unflatten(filled, spec))

    if path in ("compiled", "aot"):
        torch._dynamo.reset()
        backend = "eager" if path == "compiled" else "aot_eager"
        return torch.compile(flat, backend=backend, fullgraph=True, dynamic=False)(*tensors)
    assert path == "vmapped"
    lanes = [torch.stack([tensor, tensor]) for tensor in tensors]
    return tree_map(lambda result: result[1], torch.func.vmap(flat, randomness="different")(*lanes))


def chosen(path: str, train: bool, cases: dict[str, Case]) -> dict[str, Case]:
    """All cases; for "compiled", which takes half a second a case, the first one in train and the last one in eval."""
    if path in ("eager", "vmapped"):
        return cases
    names = [name for name in cases if "~" not in name]  # Dynamo of torch 2.13 has no `~` for objects
    return {name: cases[name] for name in (names if path == "aot" else [names[0 if train else -1]])}


def make_module(way: Way, **options: Any) -> MultiheadAttention:
    """A module in the way's layout and mode, no bias and no parameter 0."""
    module = MultiheadAttention(D, H, batch_first=way.batch_first, fused_qkv=way.fused, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module.train(way.train)


def inputs(*lengths: int, grad: bool = True, width: int = D) -> list[Tensor]:
    """(B, length, width) each."""
    return [torch.randn(B, length, width, requires_grad=grad) for length in lengths]


def call_module(
    module: MultiheadAttention, way: Way, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]
) -> list[Tensor]:
    """Output (B, L, D), and the weights unless they are off, whatever layout the module reads."""
    given = dict(given)
    if "mask" in given:
        builder, *held = given["mask"]
        given["mask"] = builder(*held)

    def turn(tensor: Tensor) -> Tensor:
        return tensor if way.batch_first else tensor.transpose(0, 1)

    q = turn(query)
    k = q if key is query else turn(key)
    v = k if value is key else q if value is query else turn(value)
    average = None if way.weights == "off" else way.weights == "averaged"
    out, weights = module(q, k, v, need_weights=way.weights != "off", average_attn_weights=average, **given)
    assert (weights is None) == (way.weights == "off")
    return [turn(out)] if weights is None else [turn(out), weights]


def run_module(
    module: MultiheadAttention, way: Way, triple: Sequence[Tensor], cases: dict[str, Case]
) -> dict[str, list[Tensor]]:
    """The cases through the way's path, in one graph, or in one vmap."""
    cases = chosen(way.path, way.train, cases)

    def all_cases(triple: Sequence[Tensor], givens: Sequence[dict[str, Any]]) -> list[list[Tensor]]:
        return [call_module(module, way, *triple, given) for given in givens]

    with contextlib.nullcontext() if way.train else torch.no_grad():
        found = through(way.path, all_cases, list(triple), [case.given for case in cases.values()])
    return dict(zip(cases, found, strict=True))


def oracle(
    params: dict[str, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    zero_attn: bool = False,
    heads: int = H,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    query_padding: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The module from its formula in float64: output (B, L, D) and weights (B, H, L, S and the appended keys).

    `params` has torch's names, so that neither layout's code is used.
    """
    if "in_proj_weight" in params:
        in_weights = params["in_proj_weight"].chunk(3)
    else:
        in_weights = tuple(params[f"{name}_proj_weight"] for name in "qkv")
    in_biases = params["in_proj_bias"].chunk(3) if "in_proj_bias" in params else (torch.zeros(()),) * 3
    q, k, v = (
        (tensor.double() @ weight.T + shift).unflatten(-1, (heads, -1)).transpose(1, 2)
        for tensor, weight, shift in zip((query, key, value), in_weights, in_biases, strict=True)
    )
    appended = 0
    if "bias_k" in params:
        one_k, one_v = (params[name].view(heads, 1, -1).expand(k.shape[0], -1, -1, -1) for name in ("bias_k", "bias_v"))
        k, v, appended = torch.cat([k, one_k], dim=2), torch.cat([v, one_v], dim=2), 1
    if zero_attn:
        zero = torch.zeros_like(q[:, :, :1]) if q.shape[2] else q.new_zeros(*q.shape[:2], 1, q.shape[3])
        k, v, appended = torch.cat([k, zero], dim=2), torch.cat([v, zero], dim=2), appended + 1
    whole = (k.shape[0], heads, q.shape[2], k.shape[2] - appended)
    if keep is not None:
        keep = nn.functional.pad(keep.expand(whole), (0, appended), value=True)
    if bias is not None:
        bias = nn.functional.pad(bias.double().expand(whole), (0, appended), value=0.0)
    out, weights = reference.attention(q, k, v, keep=keep, bias=bias, factor=factor)
    out = out.transpose(1, 2).flatten(2) @ params["out_proj.weight"].T + params.get("out_proj.bias", 0.0)
    if query_padding is not None:
        out = torch.where(query_padding[..., None], 0.0, out)
        weights = torch.where(query_padding[:, None, :, None], 0.0, weights)
    return out, weights


def torch_named(module: MultiheadAttention, part: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """What `part` picks of every parameter, under torch's names."""
    found = {name: part(parameter) for name, parameter in module.named_parameters()}
    for kind in ("weight", "bias"):
        names = [f"{child}_proj.{kind}" for child in "qkv"]
        if names[0] in found:
            picked = [found.pop(name) for name in names]
            if kind == "bias" or module.kdim == module.embed_dim == module.vdim:
                found[f"in_proj_{kind}"] = torch.cat(picked)
            else:
                found |= {f"{child}_proj_weight": one for child, one in zip("qkv", picked, strict=True)}
    return found


def compare_module(
    module: MultiheadAttention,
    way: Way,
    triple: Sequence[Tensor],
    cases: dict[str, Case],
    *,
    finite: Sequence[Tensor] | None = None,
    tolerance: dict[str, float] = TOLERANCE,
) -> dict[str, list[Tensor]]:
    """Run the cases, and hold outputs, weights and (in train) all gradients against the oracle.

    Args:
        triple: query, key and value; leaves.
        finite: what the oracle reads instead, where `triple` holds NaN or Inf that must have no influence.
    """
    params = {
        name: value.detach().double().requires_grad_(way.train)
        for name, value in torch_named(module, lambda parameter: parameter).items()
    }
    clean = triple if finite is None else finite
    doubles: list[Tensor] = []
    for index, tensor in enumerate(clean):
        same = next((i for i in range(index) if triple[i] is triple[index]), None)
        doubles.append(doubles[same] if same is not None else tensor.detach().double().requires_grad_(way.train))

    found = run_module(module, way, triple, cases)
    loss, wanted_loss = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for name in found:
        case = cases[name]
        out, weights = oracle(params, *doubles, zero_attn=module.add_zero_attn, **case.means)
        wanted = [out] if way.weights == "off" else [out, weights if way.weights == "per head" else weights.mean(dim=1)]
        for what, got, want in zip(("output", "weights"), found[name], wanted, strict=False):
            assert_close(got.double(), want, **tolerance, msg=lambda m, n=f"{what} of {name}": f"{n}: {m}")
            cotangent = torch.randn_like(got)
            loss = loss + (got * cotangent).sum()
            wanted_loss = wanted_loss + (want * cotangent.double()).sum()
        assert len(found[name]) == len(wanted)
    if way.train:
        module.zero_grad()
        leaves = [tensor for index, tensor in enumerate(triple) if not any(tensor is t for t in triple[:index])]
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        wanted_loss.backward()
        for index, name in enumerate(("query", "key", "value")):
            _same_gradient(name, triple[index].grad, doubles[index].grad, tolerance)
        grads = torch_named(module, lambda parameter: parameter.grad)
        assert set(grads) == set(params)
        for name, got in grads.items():
            _same_gradient(name, got, params[name].grad, tolerance)
    return found


def _same_gradient(name: str, got: Tensor | None, want: Tensor | None, tolerance: dict[str, float]) -> None:
    assert got is not None
    want = torch.zeros(got.shape, dtype=torch.float64) if want is None else want
    scale = max(1.0, want.abs().max().item() if want.numel() else 1.0)
    close = {"rtol": tolerance["rtol"], "atol": 4 * tolerance["atol"] * scale}
    assert_close(got.double(), want, **close, msg=lambda message: f"gradient of {name}: {message}")


def heads(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def run_attention(call: Call, triple: Sequence[Tensor], cases: dict[str, Case]) -> dict[str, Tensor]:
    """`attention` on the cases, through one path; `given` holds its keyword arguments."""
    backend, grad, path = call
    cases = chosen(path, grad, cases)

    def all_cases(triple: Sequence[Tensor], givens: Sequence[dict[str, Any]]) -> list[Tensor]:
        outs = []
        for given in givens:
            options = dict(given)
            if "mask" in options:
                builder, *held = options["mask"]
                options["mask"] = builder(*held)
            outs.append(attention(*triple, backend=backend, **options))
        return outs

    with contextlib.nullcontext() if grad else torch.no_grad():
        found = through(path, all_cases, list(triple), [case.given for case in cases.values()])
    return dict(zip(cases, found, strict=True))


def compare_attention(
    call: Call,
    triple: Sequence[Tensor],
    cases: dict[str, Case],
    *,
    finite: Sequence[Tensor] | None = None,
    tolerance: dict[str, float] = TOLERANCE,
) -> dict[str, Tensor]:
    """Run the cases and hold outputs and gradients against the reference; `finite` as in `compare_module`."""
    found = run_attention(call, triple, cases)
    doubles = [tensor.detach().double().requires_grad_(call[1]) for tensor in (triple if finite is None else finite)]
    loss, wanted_loss = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for name in found:
        case = cases[name]
        extra = {key: value for key, value in case.given.items() if key in ("scale", "softcap", "sink")}
        want, _ = reference.attention(*doubles, **case.means, **extra)
        assert_close(found[name].double(), want, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        cotangent = torch.randn_like(found[name])
        loss = loss + (found[name] * cotangent).sum()
        wanted_loss = wanted_loss + (want * cotangent.double()).sum()
    if call[1]:
        for tensor in triple:
            tensor.grad = None
        loss.backward()
        wanted_loss.backward()
        for name, got, want in zip(("query", "key", "value"), triple, doubles, strict=True):
            _same_gradient(name, got.grad, want.grad, tolerance)
    return found


def lower_left(queries: int, keys: int) -> Tensor:
    """(queries, keys) bool, query l sees the keys 0 .. l; written without torch's tril."""
    return torch.tensor([[s <= query for s in range(keys)] for query in range(queries)], dtype=torch.bool).view(
        queries, keys
    )


def minus_inf(block: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A float mask from a bool one, True blocks."""
    return torch.zeros(block.shape, dtype=dtype).masked_fill(block, -INF)
