"""Finds products with parameters in a traced loss, and puts products in fp8 in their place.

A parameter is replaced by three inputs: a stand-in of its shape, with respect to which the gradient
is taken, its codes, and their scales. Slices of a stack of parameters are slices of all three.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import DTypeLike

from zero_jax.fp8.formats import E4M3
from zero_jax.fp8.product import Contraction, product
from zero_jax.tracing import jaxpr as jaxprs
from zero_jax.tracing.evaluator import Evaluator
from zero_jax.tracing.products import ProductDims

# cuBLAS needs multiples of 16 bytes; XLA would pad other operands in every product.
ALIGNED = 16
# A smaller matrix takes longer in fp8: to quantise the activations costs more than it saves. So do
# the adapters of LoRA.
LEAST = 128
# Traces a function of arrays of these shapes as a device of the mesh runs it.
Stage = Callable[..., jex.ClosedJaxpr]


def shared(dims: ProductDims, *, by_row: bool) -> tuple[int, ...]:
    """Returns the dims of a matrix along which numbers share a scale."""
    return dims.inputs if by_row else (*dims.inputs, *dims.outputs)


def multiplied(
    closed: jex.ClosedJaxpr, leaves: int, dtype: DTypeLike, stage: Stage
) -> dict[int, ProductDims]:
    """Returns the parameters, by position, that all products in a dtype read along the same dims.

    Args:
      closed: The loss, with inlined calls. Its first inputs are the parameters.
      leaves: The number of parameters.
      dtype: The compute dtype; products in another dtype stay as they are.
      stage: Traces a function.
    """
    reads: dict[int, set[ProductDims | None]] = {}
    types = _types(closed)

    def loss(*args: jax.Array) -> list[_Value]:
        values: list[_Value] = [
            _Weight(x, None, None, at, tuple(range(-x.ndim, 0)))
            if at < leaves and jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for at, x in enumerate(args)
        ]
        evaluator = _Products(dtype, lambda at, dims: reads.setdefault(at, set()).add(dims))
        return evaluator.opened(evaluator.evaluate(closed, values))

    stage(loss, *types)
    return {at: dims for at, (dims, *others) in reads.items() if not others and dims is not None}


def is_large(shape: Sequence[int], dims: ProductDims) -> bool:
    """Returns whether fp8 pays for a matrix."""
    sides = [math.prod(shape[d] for d in own) for own in (dims.inputs, dims.outputs)]
    return min(sides) >= LEAST and not any(side % ALIGNED for side in sides)


def in_fp8(
    closed: jex.ClosedJaxpr,
    leaves: int,
    chosen: Mapping[int, ProductDims],
    stage: Stage,
    *,
    dtype: DTypeLike,
    by_row: bool,
) -> jex.ClosedJaxpr:
    """Returns the loss with products in fp8.

    Args:
      closed: The loss, with inlined calls.
      leaves: The number of parameters.
      chosen: The parameters to multiply in fp8, by position, see `multiplied`.
      stage: Traces a function.
      dtype: The compute dtype.
      by_row: True for a scale per row, False for one per matrix.

    Returns:
      The loss. After the parameters it has further inputs: the codes of the chosen ones, and their
      scales, whose shared dims have size 1.
    """
    types = _types(closed)
    codes = [jax.ShapeDtypeStruct(types[at].shape, E4M3) for at in chosen]
    scales = [
        jax.ShapeDtypeStruct(scale_shape(types[at].shape, shared(dims, by_row=by_row)), jnp.float32)
        for at, dims in chosen.items()
    ]

    def loss(*args: jax.Array) -> list[_Value]:
        params, rest = args[:leaves], args[leaves:]
        own = dict(zip(chosen, zip(rest, rest[len(chosen) :], strict=False), strict=False))
        values: list[_Value] = [
            _Weight(x, *own[at], at, tuple(range(-x.ndim, 0))) if at in own else x
            for at, x in enumerate(params)
        ]
        evaluator = _Products(dtype, lambda *_: None, by_row)
        return evaluator.opened(evaluator.evaluate(closed, [*values, *rest[2 * len(chosen) :]]))

    return stage(loss, *types[:leaves], *codes, *scales, *types[leaves:])


def scale_shape(shape: Sequence[int], alike: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a leaf's scales.

    >>> scale_shape((48, 1024, 4096), [-2, -1]), scale_shape((1024, 4096), [-2])
    ((48, 1, 1), (1, 4096))
    """
    return tuple(1 if d in alike else n for d, n in enumerate(shape, -len(shape)))


def _types(closed: jex.ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    variables = closed.jaxpr.invars
    return [jax.ShapeDtypeStruct(jaxprs.shape_of(v), jaxprs.dtype_of(v)) for v in variables]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Weight:
    """A parameter in a program, or a part of it.

    Attributes:
      array: Its value, or the stand-in.
      codes, scale: None while products are looked for.
      leaf: Its position among the parameters.
      dims: For each dim of the parameter's last ones, the dim that it was, counted from the end.
      sliced: True if a slice along dim 0 was taken that kept the dim.
    """

    array: jax.Array
    codes: jax.Array | None
    scale: jax.Array | None
    leaf: int = dataclasses.field(metadata={"static": True})
    dims: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    sliced: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def places(self) -> tuple[int, ...]:
        """The dims of the parameter that are left; a loop takes the first."""
        return self.dims[len(self.dims) - self.array.ndim :]


_Value = jax.Array | _Weight
_Seen = Callable[[int, ProductDims | None], object]


class _Products(Evaluator[_Value]):
    """Evaluates a loss; calls `seen` with each read of a parameter: dims of a product, or None."""

    def __init__(self, dtype: DTypeLike, seen: _Seen, by_row: bool = False):
        super().__init__()
        self._dtype, self._seen, self._by_row = dtype, seen, by_row
        # Activations are quantised once for several products; an array is held with its identity.
        self._quantised: dict[tuple[int, str], tuple[jax.Array, tuple[jax.Array, jax.Array]]] = {}

    def evaluate(self, closed: jex.ClosedJaxpr, values: Sequence[_Value]) -> list[_Value]:
        # What is made in the body of a loop does not exist outside of it.
        outside, self._quantised = self._quantised, {}
        made = super().evaluate(closed, values)
        self._quantised = outside
        return made

    def is_replaced(self, value: _Value) -> bool:
        return isinstance(value, _Weight)

    def opened(self, values: Sequence[_Value]) -> list[_Value]:
        """Returns the values, with arrays in place of parameters."""
        for value in values:
            if isinstance(value, _Weight):
                self._seen(value.leaf, None)
        return [v.array if isinstance(v, _Weight) else v for v in values]

    def agreed(self, values: list[_Value], like: Sequence[_Value | bool]) -> list[_Value]:
        return self.opened(values)

    def default(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        at = next(i for i, value in enumerate(values) if self.is_replaced(value))
        weight = values[at]
        assert isinstance(weight, _Weight)
        if len(values) == 1 and (made := _through(eqn, weight)) is not None:
            return made
        if eqn.primitive.name == "dot_general" and self._able(eqn) and len(values) == 2:
            other = values[1 - at]
            if not isinstance(other, _Weight):
                return [self._product(eqn, at, weight, other)]
        return jaxprs.function(eqn)(*self.opened(values))

    def while_loop(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        return jaxprs.function(eqn)(*self.opened(values))

    # A function with its own gradient and a branch decide by themselves how they multiply.
    cond = custom_derivative = while_loop

    def scan(self, eqn: jex.JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        start, carried = jaxprs.state_of(eqn)
        values[start : start + carried] = self.opened(values[start : start + carried])
        made = super().scan(eqn, values)
        return self.opened(list(made))

    def _able(self, eqn: jex.JaxprEqn) -> bool:
        """Returns whether a product and its result are in the compute dtype, no more precise.

        A model asks for results in fp32 where their precision matters, as of a router.
        """
        precise = eqn.params["precision"]
        usual = precise is None or set(precise) <= {None, jax.lax.Precision.DEFAULT}
        usual |= jnp.dtype(self._dtype).itemsize < 4  # there it changes nothing
        atoms = (*eqn.invars, *eqn.outvars)
        return usual and all(jaxprs.dtype_of(a) == self._dtype for a in atoms)

    def _product(self, eqn: jex.JaxprEqn, at: int, weight: _Weight, other: jax.Array) -> jax.Array:
        dims = ProductDims.of(eqn, at, weight.places)
        plain = dims.inputs and dims.outputs
        parted = weight.sliced and -len(weight.dims) in (*dims.inputs, *dims.outputs)
        self._seen(weight.leaf, dims if plain and not parted else None)
        if weight.codes is None or weight.scale is None:
            out: jax.Array = jaxprs.function(eqn)(
                *((other, weight.array) if at else (weight.array, other))
            )[0]
            return out
        form = _form(eqn, at, self._by_row)
        codes, scale = weight.codes, weight.scale

        def run(x: jax.Array, x_codes: jax.Array, x_scale: jax.Array, *own: jax.Array) -> jax.Array:
            w, *pair = own
            return product(form, x, (x_codes, x_scale), w, (pair[0], pair[1]))

        args = [other, *self._of_activations(form, other), weight.array, codes, scale]
        closed = jaxprs.as_if_from(jax.make_jaxpr(run)(*args), eqn)
        out = jaxprs.as_function(closed)(*args)[0]
        return out

    def _of_activations(self, form: Contraction, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = id(x), str(form.scaled(form.x, form.w))
        if key not in self._quantised:
            self._quantised[key] = x, form.quantised(x)
        return self._quantised[key][1]


def _through(eqn: jex.JaxprEqn, weight: _Weight) -> list[_Value] | None:
    """Returns the results of an operation if they are parts of the parameter, else None."""
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return [weight] if params["new_dtype"] == weight.array.dtype else None
    if name in ("copy", "name", "stop_gradient"):
        array = jaxprs.function(eqn)(weight.array)[0]
        return [dataclasses.replace(weight, array=array)]
    if name == "transpose":
        order = params["permutation"]
        moved = jax.tree.map(lambda x: jnp.transpose(x, order), weight)
        places = tuple(weight.places[d] for d in order)
        gone = weight.dims[: len(weight.dims) - len(places)]
        return [dataclasses.replace(moved, dims=(*gone, *places))]
    return _parts(eqn, weight)


def _parts(eqn: jex.JaxprEqn, weight: _Weight) -> list[_Value] | None:
    """Returns the elements that an operation takes along dim 0, else None."""
    name, params = eqn.primitive.name, eqn.params
    if weight.array.ndim < 2 or weight.places != tuple(range(-weight.array.ndim, 0)):
        return None
    if name == "unstack" and params["axis"] == 0:
        return [_element(weight, i) for i in range(weight.array.shape[0])]
    if name == "squeeze" and tuple(params["dimensions"]) == (0,):
        return [_element(weight, 0)]
    if name == "slice" and jaxprs.takes_elements(eqn):
        stride = params["strides"][0] if params["strides"] else 1
        which = params["start_indices"][0], params["limit_indices"][0], stride
        part = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, *which), weight)
        return [dataclasses.replace(part, sliced=True)]
    return None


def _element(weight: _Weight, at: int) -> _Weight:
    element: _Weight = jax.tree.map(lambda x: jax.lax.index_in_dim(x, at, keepdims=False), weight)
    return element


def _form(eqn: jex.JaxprEqn, at: int, by_row: bool) -> Contraction:
    """Returns the form of a product whose input `at` is the weight."""
    (summed, batch), letters = eqn.params["dimension_numbers"], iter("abcdefghijklmnopqrstuvwxyz")
    named = [[""] * len(jaxprs.shape_of(a)) for a in eqn.invars]
    for pairs in (batch, summed):
        for i, j in zip(*pairs, strict=True):
            named[0][i] = named[1][j] = next(letters)
    for own in named:
        own[:] = [c or next(letters) for c in own]
    shared = [named[0][i] for i in batch[0]]
    free = [c for i, own in enumerate(named) for c in own if c not in named[1 - i]]
    operands = ["".join(own) for own in named]
    out, dtype = "".join([*shared, *free]), jaxprs.dtype_of(eqn.outvars[0])
    return Contraction(operands[1 - at], operands[at], out, at == 1, by_row, dtype)
