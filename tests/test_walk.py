"""The tool that shows the way of a row: it begins in the log and ends with the rules, and nothing is met twice."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.walk import stays, walk

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def test_the_way_of_a_row_leads_from_the_log_through_the_rooms_to_the_rules() -> None:
    stops = walk(FIXTURES / "formats" / "slime.jsonl", 1)
    rooms = stays(stops)
    assert sys.getprofile() is None
    assert rooms[:2] == ["run", "storage"]
    firsts = [rooms.index(room) for room in ("storage", "formats", "evidence", "rules")]
    assert firsts == sorted(firsts)
    assert ("rules/tok101_merged_tokens.py", "merged_tokens") in stops
    assert len(stays(stops, files=True)) >= len(rooms) > len(set(rooms))


def test_a_run_of_functions_in_one_room_or_file_is_one_stay() -> None:
    stops = [("run/a.py", "f"), ("run/b.py", "g"), ("rules/c.py", "h"), ("run/b.py", "k")]
    assert stays(stops) == ["run", "rules", "run"]
    assert stays(stops, files=True) == ["run/a.py", "run/b.py", "rules/c.py", "run/b.py"]
