"""What the tests share that open a page."""

import pytest

from kvbench.report.charts import build_charts
from kvbench.report.page import load_scripts
from tests.support.browser import CHROMIUM


@pytest.fixture(scope="session", autouse=True)
def charts() -> None:
    """Charts and scripts are the same for every page; the first test that makes one does not build them."""
    build_charts()
    load_scripts()


@pytest.fixture(scope="module")
def chromium():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()
