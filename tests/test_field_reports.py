"""Every public failure we want to survive is named by a test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent

# Row: the kind of failure. The tests that cover a row carry its number in their name or docstring.
# fmt: off
ROWS = [
    1, 3, 6, 8, 10, 12, 13, 15, 16, 19, 20, 22, 25, 27, 28, 30, 33, 34,
    37, 40, 41, 43, 45, 48, 49, 51, 53, 54, 56, 58, 60, 63, 65, 67, 69, 70,
    72, 75, 76, 78, 80, 82, 83, 86, 87, 90, 92, 93, 95, 98, 100, 102, 103, 104,
    106, 108, 111, 112, 114, 115, 117, 120, 121, 123, 126, 128, 131, 133, 135, 138, 139, 140,
    143, 144, 146, 147, 149, 152, 154,
]
# fmt: on


def test_every_public_failure_is_named_by_a_test() -> None:
    pattern = re.compile(r"fr[-_]?(\d{3})", re.IGNORECASE)
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    named = {int(row) for text in texts for row in pattern.findall(text)}
    assert set(ROWS) <= named, sorted(set(ROWS) - named)
