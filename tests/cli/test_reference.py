"""The reference of the job file says what the code says."""

from pathlib import Path

from rlhfd.cli.reference import reference
from rlhfd.config import job_keys

PAGE = Path(__file__).parents[2] / "docs/job.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == reference(), "run: python -m rlhfd.cli.reference > docs/job.md"


def test_every_key_that_a_user_may_set_stands_in_it():
    page = reference()
    shown = {key for key in job_keys() if f"| `{key.partition('.')[2]}` |" in page}
    assert set(job_keys()) - shown == {"reward.type"}
