"""Which layer a parameter belongs to."""

from __future__ import annotations

__all__ = ["layer_name"]


def layer_name(parameter_name: str) -> str:
    """The outermost numbered block of a parameter, or else the module that holds it.

    Args:
        parameter_name: Qualified name.

    Example:
        >>> layer_name("model.layers.3.mlp.experts.7.weight")
        'model.layers.3'
        >>> layer_name("model.embed_tokens.weight")
        'model.embed_tokens'
    """
    parts = parameter_name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit() and index > 0:
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or parameter_name
