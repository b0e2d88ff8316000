"""The sampling knobs."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlstab.rollout.sampler import SamplingSettings


def test_the_defaults_are_trls() -> None:
    settings = SamplingSettings()
    assert (settings.max_completion_length, settings.temperature, settings.top_p, settings.top_k) == (512, 1.0, 1.0, 0)
    assert (settings.min_p, settings.repetition_penalty, settings.generation_kwargs) == (None, 1.0, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_completion_length", 0),
        ("max_completion_length", 1.5),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("temperature", "1.0"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", -1.0),
        ("generation_kwargs", ["max_time"]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must"):
        SamplingSettings(**{name: value})
