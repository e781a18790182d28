"""Build the report page, one HTML file that shows what a store holds, from its records alone.

    python -m kvbench results report      # writes results/report.html and results/report/*.js

    style.py          colour and shape of a method, the same everywhere
    labels.py         names of runs, settings and methods
    panels.py         groups runs into panels and computes their numbers with the modules of the tables
    samples.py        answers next to the full cache's, in files that the page loads when needed
    charts.py         Vega-Lite specifications for the page and for figures
    page.py           writes the page, with page.css and page.js
    method_pages.py   describes methods from their docstrings and configs
    excerpts.py       writes the text of prompts beside the page
    print_charts.py   adds title, key and width to a chart, for figures.py
    figures.py        writes charts for print
    study_charts.py   draws figures of studies
    dashboard.py      serves the page while sweeps run

Text from records reaches the page as ASCII JSON and is shown as text only. The page's policy forbids all requests.
"""
