"""Chromium, in which the tests open pages that kvbench writes."""

import shutil

CHROMIUM = shutil.which("chromium")
SIZES = {1440: 900, 390: 844}  # width and height of a window


def draw_charts(page) -> int:
    """Scrolls until every chart is there; how many."""
    for _ in range(200):
        left = page.locator(".chart:not([data-drawn]), .unloaded")
        if not left.count():
            break
        left.first.evaluate("node => node.scrollIntoView({block: 'center'})")
        page.wait_for_timeout(50)
    page.evaluate("scrollTo(0, 0)")
    return page.locator(".chart[data-drawn] svg.marks").count()
