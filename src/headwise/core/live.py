"""Three Parameters seen as one: `in_proj_weight` while the projections are split, and its value in `state_dict()`.

torch's are Parameters, and code writes into them: initialisers, moving averages, federated averaging, checkpoint
loaders. A copy would lose that without a word; here a write reaches the projections.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import swap_tensors

_LOCK = threading.RLock()  # from reading to writing: threads would lose each other's updates
_NEW_MEMORY = frozenset(("set_", "resize_", "resize_as_", "set_data"))


class Home(NamedTuple):
    """Memory that repeats tensors, one after the other.

    Attributes:
        memory: (rows, ...), the parts stacked.
        parts: Parameters, or what `state_dict()` hands out of them, detached.
        computed: the parts are computed afresh at each reading, so that there is nothing to write to.
    """

    memory: Tensor
    parts: tuple[Tensor, ...]
    computed: bool = False

    def read(self) -> None:
        """Fetch what the parts hold now. Always: fused optimizers change numbers without counting a version."""
        pairs = zip(self.parts, self.pieces(self.memory), strict=True)
        if not self.memory.is_meta and all(torch.equal(part, piece) for part, piece in pairs):
            return
        torch.cat(self.parts, out=self.memory)
        if not self.memory.is_inference():
            increment_version(self.memory)  # a graph that saved it must not go on with other numbers

    def write(self) -> None:
        """Hand what was written here to the parts."""
        for part, piece in zip(self.parts, self.pieces(self.memory), strict=True):
            part.copy_(piece)
            if not part.is_inference():
                increment_version(part)  # below autograd, where this runs, nobody counts

    def pieces(self, whole: Tensor) -> tuple[Tensor, ...]:
        """A tensor of the whole's shape, cut as the parts lie."""
        return cast("tuple[Tensor, ...]", whole.split([len(part) for part in self.parts]))

    def are_parameters(self) -> bool:
        return all(isinstance(part, nn.Parameter) for part in self.parts)


class Live(torch.Tensor):
    """Tensors stacked along their first dimension: reads see what they hold now, writes reach them.

    Made of Parameters it can be differentiated, and then it reads what they held when it was made. Its `grad`,
    `requires_grad` and `data` are theirs too. Views of it are alive; copies, and what is saved or pickled, are ordinary
    tensors. As an `nn.Parameter` it is an ordinary one with memory of its own. What writes past torch, through
    `untyped_storage()` or `data_ptr()`, is not seen. Compiled code that names `in_proj_weight` itself reads a copy.
    """

    home: Home
    whole = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # It does nothing, but torch's encoder, in eval, sees that it is there and does not make nested tensors then.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # torch's annotations know this one as an ordinary method
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {id(value): value for value in _flatten((*args, *kwargs.values())) if isinstance(value, Live)}
        written = _written(func, args, kwargs)
        if written:
            _check_write(func, written.values(), (*args, *kwargs.values()))
        homes = {_storage(value): value.home for value in given.values()}
        with _LOCK:
            for key, value in given.items():
                if key in written or not value.requires_grad:
                    value.home.read()
            plain = {key: value._plain() for key, value in given.items()}
            result = func(*_replace(args, plain), **_replace(kwargs, plain))
            if func.namespace == "c10d":
                _wait(result)
            for key, value in written.items():
                if plain[key].shape != value.shape:
                    raise RuntimeError(f"out= must have the shape {tuple(plain[key].shape)}; got {tuple(value.shape)}")
            for home in {_storage(value): value.home for value in written.values()}.values():
                home.write()
        alive = {id(plain[key]): value for key, value in given.items()}
        return _enliven(result, alive, homes)

    def _plain(self) -> Tensor:
        """The same numbers in the same memory, as an ordinary tensor."""
        with torch._C._DisableTorchDispatch():
            return self.detach()

    def _current(self) -> Tensor:
        if not self.requires_grad:
            with torch.no_grad():
                self.home.read()
        return self._plain()

    @property
    def data(self) -> Tensor:
        """The same, without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            have, want = f"{tuple(value.shape)} {value.dtype}", f"{tuple(self.shape)} {self.dtype}"
            raise ValueError(f"data of stacked projections must keep {want}; got {have}: change the projections' own")
        with torch.no_grad():
            self.copy_(value)

    @property
    def grad(self) -> Tensor | None:
        """The projections' gradients stacked, alive too, 0 for one that has none; None while none has any."""
        if not self._is_whole():
            return super().grad
        parts = self.home.parts
        if all(part.grad is None for part in parts):
            return None
        return stack([torch.zeros_like(part) if part.grad is None else part.grad for part in parts])

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not self._is_whole():
            vars(torch._C.TensorBase)["grad"].__set__(self, value)  # what super() cannot assign to
            return
        if value is not None and value.shape != self.shape:
            raise ValueError(f"grad must have the shape {tuple(self.shape)}; got {tuple(value.shape)}")
        pieces = [None] * len(self.home.parts) if value is None else self.home.pieces(value)
        for part, piece in zip(self.home.parts, pieces, strict=True):
            part.grad = None if piece is None else piece.clone()

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows from here."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Freeze or thaw the projections."""
        if not self._is_whole():
            return super().requires_grad_(requires_grad)
        for part in self.home.parts:
            part.requires_grad_(requires_grad)
        return self

    def detach_(self) -> Tensor:
        """Freeze the projections, which is what it does to a Parameter."""
        return self.requires_grad_(False) if self._is_whole() else super().detach_()

    def register_hook(self, hook: Any) -> Any:
        """Raises TypeError where no gradient would arrive."""
        self._check_hook()
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Raises TypeError where no gradient would arrive."""
        self._check_hook()
        return super().register_post_accumulate_grad_hook(hook)

    def _check_hook(self) -> None:
        if self._is_whole():
            raise TypeError(
                "in_proj_weight and in_proj_bias are stacked afresh at each reading while the projections are split, "
                "so a hook would see no gradient: hook q_proj.weight and its like, or call fuse_projections()"
            )

    def _is_whole(self) -> bool:
        """Whether it stands for Parameters, and is no part or view of them."""
        return self.whole and self.home.are_parameters()

    def share_memory_(self) -> Tensor:
        """Move the parts' memory to where other processes see it."""
        for part in self.home.parts:
            part.share_memory_()
        return cast(Tensor, super().share_memory_())

    def apply_(self, function: Any) -> Any:
        """Raises RuntimeError: torch does not show this one to a subclass."""
        raise RuntimeError(
            "apply_ on stacked projections would reach none of them: use those of q_proj, k_proj, v_proj"
        )

    def data_ptr(self) -> int:
        """Of memory that holds what the projections hold now."""
        self._current()
        return super().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array: a write to it would not be seen."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() on a tensor that requires grad; call detach() first")
        array = self._current().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The numbers."""
        return self._current().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._current().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = copy.deepcopy(self._current(), memo)
        return copied

    # mypy compares it with torch's decorated one, and finds the same signature different
    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self._current())

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError("stacked projections lie in memory that nobody else should write: take a .clone()")

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # the last thing that nn.Parameter(...) does
        swap_tensors(self, nn.Parameter(self._current().clone(), requires_grad=self.requires_grad))


def stack(parts: Sequence[Tensor], computed: bool = False) -> Tensor:
    """`Live` tensors of one width, dtype and device; differentiable where gradients are recorded for them."""
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):  # the first alone would switch it on
        whole = torch.cat(list(parts))
        made: Live = whole.as_subclass(Live)
        made.home, made.whole = Home(whole.detach(), tuple(parts), computed), True
    return made


def _share(live: Live) -> Any:
    """For another process: what torch's Parameters are there, memory of both."""
    memory = live.home.memory
    is_all = live.shape == memory.shape and live.stride() == memory.stride()
    return (stack, (live.home.parts,)) if is_all else live.__reduce_ex__(2)


ForkingPickler.register(Live, _share)


def _view(home: Home, plain: Tensor) -> Live:
    made: Live = torch.Tensor._make_subclass(Live, plain)
    made.home = home
    return made


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Live]:
    """What an operator writes to; of collectives, which do not say, all."""
    if func.namespace == "c10d":
        found = [*args, *kwargs.values()]
    elif func._schema.is_mutable:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        aliases = {argument.name for argument in func._schema.arguments if argument.is_write}
        found = [value for name, value in named.items() if name in aliases]
    else:
        return {}
    return {id(value): value for value in _flatten(found) if isinstance(value, Live)}


def _check_write(func: Any, written: Any, given: tuple[Any, ...]) -> None:
    """Hold that a write is one that can reach the projections.

    Raises:
        RuntimeError: it is recorded by autograd, as torch has it for Parameters, or would change the memory.
    """
    name = func._schema.name.partition("::")[2]
    if name in _NEW_MEMORY or (torch.Tag.inplace_view in func.tags and name != "detach_"):
        raise RuntimeError(f"{name} on stacked projections would reach none of them: change q_proj, k_proj and v_proj")
    if any(value.home.computed for value in written):
        raise RuntimeError(
            "in_proj_weight and in_proj_bias are computed from parametrized or pruned projections: write to what those "
            "compute from, such as q_proj.parametrizations or q_proj.weight_orig"
        )
    if torch.is_grad_enabled():
        recorded = any(value.requires_grad and not value.is_leaf for value in written)
        sources = [v for v in _flatten(given) if isinstance(v, Tensor) and not isinstance(v, Live) and v.requires_grad]
        if recorded or (sources and any(value.home.are_parameters() for value in written)):
            raise RuntimeError("in_proj_weight and in_proj_bias require grad: write to them under torch.no_grad()")
    homes = {_storage(value): value.home for value in written}.values()
    parts = [id(part) for home in homes for part in {id(part): part for part in home.parts}.values()]
    if len(set(parts)) < len(parts):
        raise RuntimeError("one operation writes to the same projections twice: stack them once")


def _storage(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _wait(result: Any) -> None:
    """End a collective, which works on in the background."""
    for value in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(value, torch.ScriptObject):
            cast(Any, value).wait()


def _flatten(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(change, one) for one in value)
    if isinstance(value, dict):
        return {key: _map(change, one) for key, one in value.items()}
    return change(value)


def _replace(values: Any, plain: dict[int, Tensor]) -> Any:
    return _map(lambda value: plain.get(id(value), value), values)


def _enliven(result: Any, alive: dict[int, Live], homes: dict[int, Home]) -> Any:
    """What was changed in place is itself again, and a view of it is alive."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in alive:
            return alive[id(value)]
        home = homes.get(_storage(value)) if value.layout == torch.strided else None
        return value if home is None else _view(home, value)

    return _map(one, result)
