"""examine.py and the planted bugs: the record is in step, what is missed has its reason, and no right cache is called wrong."""

import json

import pytest

from tests.examine_planted import (
    FOLDER,
    RESULT,
    UNSEEN_RESULT,
    examined_bugs,
    found_by,
    found_in,
    labels,
    table,
    unseen,
)

FOUND = json.loads(RESULT.read_text("utf-8"))
UNSEEN = json.loads(UNSEEN_RESULT.read_text("utf-8"))


def test_the_record_is_in_step_with_the_bugs_and_the_page_with_the_record() -> None:
    assert [*FOUND] == [*examined_bugs()]
    assert [*UNSEEN] == [each.__name__ for each in unseen.caches()]
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert table() in readme
    assert {cause for cause in labels().values() if cause} <= {*causes_of(readme)}


def causes_of(readme: str) -> list[str]:
    """Return the first column of the table of causes."""
    rows = readme.partition("| cause |")[2].partition("\n\n")[0].splitlines()
    return [row.split("|")[1].strip() for row in rows[2:]]


def test_no_right_cache_is_called_wrong() -> None:
    rights = [each.__name__ for each in unseen.caches() if each.cause is None]
    assert [name for name in rights if UNSEEN[name]] == []


@pytest.mark.slow
def test_what_is_recorded_is_found_again() -> None:
    for name in ("compress_failed_pass_stays", "kv_truncate_forgets_the_positions"):
        assert found_by(name) == FOUND[name] != {}
    for name in ("Ring", "Pages", "SharesPagesOf7", "CountsPieces"):
        assert found_in(name) == UNSEEN[name]
