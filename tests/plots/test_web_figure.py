"""Figures of web pages are small, and have real text and no background."""

from __future__ import annotations

from xml.etree import ElementTree

from helmscope.plots.style import new_figure, styled, svg
from helmscope.plots.web import SVG, web_svg


def example():
    with styled():
        figure, (panel,) = new_figure(1, 1, width=4.0, height=3.0)
        panel.plot([1e-3, 1.0 / 3.0], [0.123456789, 1.0], marker="o", label="a curve")
        panel.set(xscale="log", title='0.123456789 < 1 & "more"')
        panel.legend()
    return figure


def texts(data: bytes) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(data).iter(f"{{{SVG}}}text")]


def test_text_is_text_with_a_generic_font_and_its_digits_are_kept():
    data = web_svg(example())
    assert {'0.123456789 < 1 & "more"', "a curve"} <= set(texts(data))
    assert data.count(b"font-family") == 1
    assert b"sans-serif" in data


def test_it_is_small_and_equal_figures_give_equal_bytes():
    figure = example()
    assert web_svg(figure) == web_svg(figure) == web_svg(example())
    assert len(web_svg(figure)) < 0.4 * len(svg(figure))


def test_every_reference_has_its_target_and_the_rest_has_no_id():
    root = ElementTree.fromstring(web_svg(example()))
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    values = " ".join(value for element in root.iter() for value in element.attrib.values())
    assert len(ids) == len(set(ids)) > 0
    assert all(f"#{name}" in values for name in ids)
    assert values.count("#") == sum(values.count(f"#{name}") for name in ids)


def test_the_background_is_transparent_and_the_figure_stays_as_it_was():
    figure = example()
    colors = figure.get_facecolor(), figure.axes[0].get_facecolor()
    assert b"#ffffff" not in web_svg(figure)
    assert (figure.get_facecolor(), figure.axes[0].get_facecolor()) == colors
