"""A leaf that is not gathered yet: it will be together with what uses it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Later:
    """Shards, and what makes the leaf of them."""

    shards: Sequence[Any]
    gather: Callable[..., Any]

    def then(self, fun: Callable[[Any], Any]) -> "Later":
        return Later(self.shards, lambda *shards: fun(self.gather(*shards)))

    def now(self) -> Any:
        return self.gather(*self.shards)


def now(value: Any) -> Any:
    return value.now() if isinstance(value, Later) else value


def opened(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Values flat, with shards in place of leaves to gather, and what makes values of them."""
    counts = [len(v.shards) if isinstance(v, Later) else 1 for v in values]

    def gather(flat: Sequence[Any]) -> list[Any]:
        it = iter(flat)
        given = [[next(it) for _ in range(count)] for count in counts]
        pairs = zip(values, given, strict=True)
        return [v.gather(*g) if isinstance(v, Later) else g[0] for v, g in pairs]

    return [x for v in values for x in (v.shards if isinstance(v, Later) else [v])], gather
