"""The report page: one HTML file that says what a store holds, from its records alone (`make report`).

    python -m kvbench report results      # results/report.html, and results/report/*.js beside it

    looks.py     a method's colour and shape, the same everywhere
    gather.py    runs -> panels: what is shown, computed by the modules that make the tables
    samples.py   answers beside the full cache's, in files that the page loads when they are asked for
    charts.py    Vega-Lite specifications, of the page and of kvbench.report.figures, which give them these numbers
    printed.py   a chart with title, key and width, for kvbench.report.figures
    page.py      all of it as one file, with page.css and page.js

Text from records reaches the page as ASCII JSON and is shown as text only; the page's policy allows no request.
"""
