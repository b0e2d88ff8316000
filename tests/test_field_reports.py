"""Every public failure we want to survive is named by a test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent

# Row: the kind of failure. The tests that cover a row carry its number in their name or docstring.
ROWS = [
    "001",
    "003",
    "006",
    "008",
    "010",
    "012",
    "013",
    "015",
    "016",
    "019",
    "020",
    "022",
    "025",
    "027",
    "028",
    "030",
    "033",
    "034",
    "037",
    "040",
    "041",
    "043",
    "045",
    "048",
    "049",
    "051",
    "053",
    "054",
    "056",
    "058",
    "060",
    "063",
    "065",
    "067",
    "069",
    "070",
    "072",
    "075",
    "076",
    "078",
    "080",
    "082",
    "083",
    "086",
    "087",
    "090",
    "092",
    "093",
    "095",
    "098",
    "100",
    "102",
    "103",
    "104",
    "106",
    "108",
    "111",
    "112",
    "114",
    "115",
    "117",
    "120",
    "121",
    "123",
    "126",
    "128",
    "131",
    "133",
    "135",
    "138",
    "139",
    "140",
    "143",
    "144",
    "146",
    "147",
    "149",
    "152",
    "154",
]


def test_every_public_failure_is_named_by_a_test() -> None:
    pattern = re.compile(r"fr[-_]?(\d{3})", re.IGNORECASE)
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    named = {row for text in texts for row in pattern.findall(text)}
    assert set(ROWS) <= named, sorted(set(ROWS) - named)
