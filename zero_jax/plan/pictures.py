"""The empty figure that pictures of plans are drawn on, where matplotlib is installed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> "Figure":
    """A figure of so many inches. No pyplot: neither a display nor a global state is needed.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "a picture needs matplotlib, which is not installed: pip install 'zero_jax[train]'"
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")
