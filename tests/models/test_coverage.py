"""The table of families in the docs agrees with the models."""

from support.model_coverage import PAGE, coverage_page


def test_the_table_is_up_to_date():
    assert PAGE.read_text() == coverage_page()
