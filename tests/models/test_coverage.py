"""The table in the docs says what the models say."""

from support.model_coverage import PAGE, coverage_page


def test_the_table_is_up_to_date():
    assert PAGE.read_text() == coverage_page()
