"""The tree as text shows every segment once, under its parent, with its size and names."""

from __future__ import annotations

import pytest

from sidequest_langchain.engine.drawing import draw, readable_bytes
from sidequest_langchain.kv.receipts import SegmentInfo
from sidequest_langchain.labels import StepLabel


def segment(number: int, parent: int | None, *labels: StepLabel) -> SegmentInfo:
    return SegmentInfo(
        segment_id=number,
        parent_id=parent,
        scope="",
        start=0,
        n_tokens=10 * number,
        n_bytes=1024 * number,
        n_readers=0,
        labels=labels,
    )


def test_each_segment_stands_under_its_parent() -> None:
    drawn = draw(
        [
            segment(1, None),
            segment(2, 1, StepLabel(call_id="sq-1", node="propose", branch="rome")),
            segment(4, 2, StepLabel(call_id="sq-123456789abcdef")),
            segment(3, 1, StepLabel(call_id="sq-3", node="propose")),
        ]
    )
    assert drawn.splitlines() == [
        "100 tokens, 10.0 KiB resident",
        "└─ #1  10 tokens  1.0 KiB",
        "   ├─ #2  20 tokens  2.0 KiB  propose:rome",
        "   │  └─ #4  40 tokens  4.0 KiB  sq-12345678",
        "   └─ #3  30 tokens  3.0 KiB  propose",
    ]


def test_a_segment_whose_parent_is_not_shown_stands_at_the_root() -> None:
    assert draw([segment(2, 1)]).splitlines()[1] == "└─ #2  20 tokens  2.0 KiB"


def test_many_names_are_cut_short() -> None:
    labels = [StepLabel(call_id=f"sq-{i}", branch=f"b{i}") for i in range(5)]
    assert draw([segment(1, None, *labels)]).endswith("b0, b1, b2 and 2 more")


def test_nothing_resident() -> None:
    assert draw([]) == "0 tokens, 0 B resident"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (2**31, "2.0 GiB")],
)
def test_bytes_get_a_unit(n_bytes: int, text: str) -> None:
    assert readable_bytes(n_bytes) == text
