"""examine.py and the planted bugs: the record is in step, what is missed has its reason, and no right cache is called wrong."""

import json

import pytest

from tests.examine_planted import (
    FOLDER,
    PLANTED,
    RESULT,
    UNSEEN,
    UNSEEN_RESULT,
    forked,
    show_planted,
    show_unseen,
    table,
)
from tests.mutants import unseen

FOUND = json.loads(RESULT.read_text("utf-8"))
FOUND_UNSEEN = json.loads(UNSEEN_RESULT.read_text("utf-8"))


def test_the_record_is_in_step_with_the_bugs_and_the_page_with_the_record() -> None:
    assert [*FOUND] == [*PLANTED]
    assert [*FOUND_UNSEEN] == [*unseen.RIGHT, *UNSEEN]
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert table() in readme
    rows = readme.partition("| cause |")[2].partition("\n\n")[0].splitlines()[2:]
    causes = {row.split("|")[1].strip() for row in rows}
    assert {bug.cause for bug in (PLANTED | UNSEEN).values()} <= {"", *causes}


def test_no_right_cache_is_called_wrong() -> None:
    assert [name for name in unseen.RIGHT if FOUND_UNSEEN[name]] == []


@pytest.mark.slow
def test_what_is_recorded_is_found_again() -> None:
    for name in ("compress_failed_pass_stays", "kv_truncate_forgets_the_positions"):
        assert forked(show_planted, name) == FOUND[name] != {}
    for name in ("ring of 6, 2 sinks", "blocks_last_block_has_one_user"):
        assert forked(show_unseen, name) == FOUND_UNSEEN[name]
