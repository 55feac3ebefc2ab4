from __future__ import annotations

from typing import Any

import pytest
from answers import alone_decode_rate, first_s, joint_decode_rate, prompt_rate, whole_rate
from cases import _step_s


def answer(*pieces: float, **changes: Any) -> dict[str, Any]:
    times = {"submitted": 0.0, "began": 0.0, "first": pieces[0], "ended": pieces[-1]}
    return {**times, "pieces": pieces, "count": len(pieces), "prompt_tokens": 100, **changes}


def test_prompt_rate_leaves_out_what_was_before_the_work_began() -> None:
    late = answer(3.0, 4.0, submitted=1.0, began=2.0)
    assert prompt_rate(late) == 100
    assert first_s(late) == 2


def test_alone_decode_rate_counts_the_steps_after_the_first_token() -> None:
    assert alone_decode_rate(answer(1.0, 2.0, 3.0)) == 1
    # Two tokens without text before the first piece: five tokens, four steps.
    assert alone_decode_rate(answer(3.0, 4.0, 5.0, first=1.0, count=5)) == 1
    # An engine that claims an earlier end than the client saw gains nothing.
    assert alone_decode_rate(answer(1.0, 2.0, 3.0, first=2.5)) == 1


def test_whole_rate_is_from_the_first_sending_to_the_last_end() -> None:
    assert whole_rate([answer(2.0, 3.0, submitted=1.0), answer(2.0, 5.0, submitted=1.5)]) == 1


def test_joint_decode_rate_counts_only_while_all_are_under_way() -> None:
    early = answer(0.0, 1.0, 2.0, 3.0, 4.0)
    late = answer(2.0, 3.0, 4.0, 5.0, 6.0)
    assert joint_decode_rate([early, late]) == 2
    in_pairs = answer(2.0, 4.0, 6.0, count=6)  # two tokens a piece
    assert joint_decode_rate([early, in_pairs]) == 2


def test_step_time_is_that_of_all_running_before_the_newcomer() -> None:
    slow_later = [[0.0, 9.0, 10.0, 11.0, 21.0, 31.0], [8.5, 9.5, 10.5, 20.5]]
    assert _step_s(slow_later, sent=12.0) == pytest.approx(1)
