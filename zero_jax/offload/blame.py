"""Which part of a transformation is to blame for what the whole of it cannot do, by name."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optax


def blame(tx: optax.GradientTransformation, fails: Callable[..., bool]) -> str:
    """The name of the part of a chain at which it begins to fail."""
    parts = parts_of(tx)
    for count in range(1, len(parts) + 1):
        if _fails(optax.chain(*parts[:count]), fails):
            part = parts[count - 1]
            return blame(part, fails) if _fails(part, fails) else name_of(part)
    return name_of(tx)


def _fails(tx: optax.GradientTransformation, fails: Callable[..., bool]) -> bool:
    try:
        return fails(tx)
    except Exception:  # a part that cannot be tried alone is not the one to blame
        return False


def parts_of(tx: optax.GradientTransformation) -> list[optax.GradientTransformation]:
    """The transformations that `tx` was made of, as far as its closures tell."""
    # Names of optax's own variables: where they change, an error names less, and nothing else.
    init, update = _held(tx.init), _held(tx.update)
    if "init_fns" in init and "update_fns" in update:  # optax.chain
        pairs = zip(init["init_fns"], update["update_fns"], strict=True)
        return [_unwrapped(optax.GradientTransformationExtraArgs(*pair)) for pair in pairs]
    found = [part for value in (*update.values(), *init.values()) for part in _transforms_in(value)]
    return list({id(p.update): p for p in found if p.update != tx.update}.values())


def _held(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a function refers to: its closure, or the object that it is a method of."""
    if inspect.ismethod(fn):
        return dict(getattr(fn.__self__, "__dict__", {}))
    return dict(inspect.getclosurevars(fn).nonlocals) if inspect.isfunction(fn) else {}


def _transforms_in(value: object) -> Iterator[optax.GradientTransformation]:
    if isinstance(value, optax.GradientTransformation):
        yield _unwrapped(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _transforms_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _transforms_in(item)


def _unwrapped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    wraps = name_of(tx) == "with_extra_args_support"
    inner: optax.GradientTransformation = _held(tx.update).get("tx", tx) if wraps else tx
    return inner


def name_of(tx: optax.GradientTransformation) -> str:
    """The function that made `tx`, as 'clip_by_global_norm'."""
    name = getattr(tx.update, "__qualname__", type(tx).__name__).split(".<locals>")[0]
    held = _held(tx.update)
    inner = held.get("inner_factory") or held.get("f")  # inject_hyperparams, stateless
    return f"{name}({inner.__name__})" if inspect.isfunction(inner) else name
