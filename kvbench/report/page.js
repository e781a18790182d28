"use strict";
(() => {
  const FIRST = JSON.parse(document.getElementById("data").textContent);
  const ALL = "";
  const FULL = { colour: FIRST.ink, shape: "diamond" };
  const FILTERS = { model: "Model", task: "Task", question: "Question", block: "Block size", class: "Budget class (scores)" };
  const state = { off: new Set() }; // and a value of each filter
  let DATA = FIRST;
  const rowsOf = ({ names, rows }) => rows.map((row) => Object.fromEntries(names.map((name, at) => [name, row[at]])));

  // ---- colours, which change with the reader's scheme

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const DARK = Object.fromEntries(Object.entries(FIRST.dark).map(([light, own]) => [light.toLowerCase(), own]));
  const hue = (colour) => (dark.matches && DARK[colour.toLowerCase()]) || colour;
  const hues = (value) => (dark.matches ? JSON.parse(JSON.stringify(value).replace(/#[0-9a-fA-F]{6}\b/g, hue)) : value);

  // ---- small things

  function el(tag, own = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(own)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined)); // text stays text
    return node;
  }
  function svg(tag, own, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(own)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  const PATHS = { circle: "M6 1.5a4.5 4.5 0 1 0 .01 0z", square: "M2 2h8v8H2z", "triangle-up": "M6 1.5L11 10.5H1z", "triangle-down": "M6 10.5L1 1.5H11z", "triangle-right": "M10.5 6L1.5 11V1z", "triangle-left": "M1.5 6L10.5 1V11z", cross: "M4.3 1h3.4v3.3H11v3.4H7.7V11H4.3V7.7H1V4.3h3.3z", diamond: "M6 .5L11 6L6 11.5L1 6z" };
  const mark = (own) => svg("svg", { class: "mark", width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: PATHS[own.shape], fill: hue(own.colour) }));
  function toTenths(value) { // like Python: a tie goes to the even digit, and -0 becomes 0
    const tie = Number.isInteger(4 * value) && !Number.isInteger(2 * value);
    return ((tie ? (2 * Math.round(5 * value)) / 10 : Number(value.toFixed(1))) + 0).toFixed(1);
  }
  const points = (value, sign) => (value === null || value === undefined ? "–" : (sign && value > 0 ? "+" : "") + toTenths(value).replace("-", "−"));
  const rounded = (value) => (value >= 1e6 ? "1,000,000 or more" : Number(value.toPrecision(2)).toLocaleString("en"));
  function neededSamples({ value, low, high }, samples) { // as kvbench.analysis.score_matrix estimates it, for one pair
    const size = Math.abs(value), reach = value > 0 ? value - low : high - value;
    if (low === null) return "";
    if (size < SAME) return " A and B do not differ, so no number of samples would tell them apart.";
    if (reach < size) return " These samples tell A from B.";
    const needed = Math.ceil(samples * ((1 + 0.8416 / 1.96) * reach / size) ** 2);
    return ` These ${samples} samples cannot tell A from B. If the difference stays as it is, about ${rounded(needed)} are enough, with a chance of 80\u202f% or more.`;
  }
  const count = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
  const byName = (one, other) => one.localeCompare(other, "en", { numeric: true });
  const percent = (share) => `${(100 * share).toFixed(1)}\u202f%`;
  const title = (panel) => `${panel.task} · question ${panel.question}`;
  const heading = (panel) => el("header", {}, el("h3", {}, title(panel)), el("small", {}, [panel.model, ...panel.also].join(" · ")));

  // ---- the selection

  const blockOf = (block) => (block === null ? "one block" : String(block));
  const passes = (own) => !state.off.has(own.method) && (state.block === ALL || blockOf(own.block) === state.block);
  const shows = (panel) => ["model", "task", "question"].every((key) => state[key] === ALL || panel[key] === state[key]);
  const chosen = () => DATA.panels.map((panel, index) => ({ panel, index })).filter(({ panel }) => shows(panel));

  // ---- files next to the page, which call these two functions

  const loaded = new Map(), asked = new Map();
  window.kvbenchSamples = (run, part, samples) => loaded.set(`${run} ${part}`, samples);
  window.kvbenchPrompts = (name, prompts) => loaded.set(name, prompts);
  window.kvbenchPart = (name, value) => loaded.set(name, value);
  function load(name, key) {
    if (!asked.has(key)) asked.set(key, new Promise((done, failed) => {
      const script = el("script", { src: `${FIRST.folder}/${name}` });
      script.onload = () => (loaded.has(key) ? done() : failed(new Error(`${FIRST.folder}/${name} is incomplete`)));
      script.onerror = () => failed(new Error(`${FIRST.folder}/${name} is missing next to this page`));
      document.body.append(script);
    }));
    asked.get(key).catch(() => asked.delete(key)); // the file may exist the next time
    return asked.get(key);
  }

  // ---- charts and panels, made when they come near the screen

  const waiting = new Map();
  const heights = new Map(); // heights of charts that were drawn before the page was rebuilt
  const watcher = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) if (isIntersecting) near(target);
  }, { rootMargin: "600px" });
  function later(node, make) {
    waiting.set(node, make);
    watcher.observe(node);
  }
  function near(node) {
    const make = waiting.get(node);
    waiting.delete(node);
    watcher.unobserve(node);
    if (make) make();
  }
  function draw(node, spec) {
    // the library takes as long as all the rest of the page, so it starts with the first chart
    if (!window.vegaEmbed) document.body.append(el("script", {}, document.getElementById("library").textContent));
    vegaEmbed(node, hues(spec), { mode: "vega-lite", renderer: "svg", actions: false }).then(
      () => { node.dataset.drawn = "yes"; },
      (error) => { node.textContent = "This chart cannot be drawn."; console.error(error); },
    );
  }
  const tables = (panel, series) => ({ series, ...Object.fromEntries(Object.entries(panel).filter(([, own]) => own?.names).map(([name, own]) => [name, rowsOf(own)])) });
  function faint(spec, series) { // many bands on top of each other would cover the lines
    for (const { mark: own } of spec.layer) if (own.type === "area") own.opacity = Math.min(own.opacity, 0.5 / series);
    return spec;
  }
  function ticked(spec, ticks) {
    for (const { encoding } of ticks ? spec.layer : []) if (encoding.x?.axis?.values) encoding.x.axis.values = ticks;
    return spec;
  }
  function chart(name, datasets, label, more, ticks) {
    const node = el("div", { class: "chart", "data-chart": name, role: "img", "aria-label": label });
    if (heights.has(label)) node.style.minHeight = `${heights.get(label)}px`;
    later(node, () => draw(node, { ...ticked(faint(structuredClone(FIRST.charts[name]), datasets.series?.length || 1), ticks), datasets, ...more }));
    return node;
  }

  // ---- tables that are wider than the screen say so

  const fitted = new ResizeObserver((seen) => seen.forEach(({ target }) => fit(target.closest(".scroll"))));
  function fit(box) {
    if (!box) return;
    const hidden = box.scrollWidth - box.clientWidth;
    const hint = box.previousElementSibling;
    hint.hidden = hidden < 2;
    box.classList.toggle("cut", box.scrollLeft < hidden - 2);
    if (hidden < 2) box.removeAttribute("tabindex"); else box.tabIndex = 0; // so that the arrow keys scroll it
  }
  function scrolled(...content) {
    const box = el("div", { class: "scroll", onscroll: () => fit(box) }, content);
    fitted.observe(box);
    if (box.firstElementChild) fitted.observe(box.firstElementChild);
    return el("div", {}, el("small", { class: "hint", hidden: "" }, "Wider than the screen: scroll it sideways →"), box);
  }

  const unfinished = (one) => (one.unfinished?.length ? el("small", { class: "under" }, `not finished: ${one.unfinished.map((text) => text.replace(/, left out: .*\)$/, ", left out)")).join(", ")}`) : null);

  const cacheHead = () => el("th", { class: "name marked", scope: "row" }, mark(FULL), "full cache"); // of the last row of a table of scores

  const methodLink = (one) => el("a", { class: "method", href: address(one.method) }, one.label);
  const rowHead = (one, under = null) => el("th", { class: "name marked", scope: "row" }, mark(one), methodLink(one), under, unfinished(one));

  // ---- large panels: long tables are folded, and charts draw some of the rows, which a sentence says

  const MOST_ROWS = 100, MOST_DRAWN = 40;
  const many = (number) => number.toLocaleString("en");
  function fold(length, unfold) {
    if (length <= MOST_ROWS) return null;
    const node = el("p", { class: "note fold" }, `The first ${MOST_ROWS} of ${many(length)} rows. `, el("button", { onclick: () => { node.remove(); unfold(); } }, "Show all"));
    return node;
  }
  function strongest(panel, all) { // the series with the highest score at any budget, in the order of all
    if (all.length <= MOST_DRAWN) return all;
    const best = new Map();
    for (const { s, score } of rowsOf(panel.points)) best.set(s, Math.max(score, best.get(s) ?? -Infinity));
    const value = ({ s }) => best.get(s) ?? -Infinity;
    const drawn = new Set([...all].sort((one, other) => value(other) - value(one)).slice(0, MOST_DRAWN));
    return all.filter((one) => drawn.has(one));
  }
  const drawnOf = (own, all) => (own.length < all.length ? el("p", { class: "note drawn" }, `${own.length} of the ${many(all.length)} rows of scores are drawn: those with the highest score at any budget. Choose fewer methods above to see others.`) : null);

  // ---- sections: each returns nodes, or null if there is nothing to show

  function matrix(panel) {
    if (!panel.matrix) return null;
    const { about, budgets, classes, methods, by_bytes: packed, cache } = panel.matrix;
    const columns = budgets.map((_, at) => at).filter((at) => state.class === ALL || classes[at] === state.class);
    const own = methods.filter(({ s, scores }) => passes(panel.series[s]) && columns.some((at) => scores[at]));
    const apart = packed.filter((one) => passes(panel.series[one.s]) && (state.class === ALL || one.class === state.class));
    if (!own.length && !apart.length && (panel.series.length || !columns.length)) return null; // without a method, the full cache's score is shown
    const rank = (one, at) => { // in its class; all that cannot be told from the best share the first place
      if (!one || !one.alike) return ["–"];
      const scored = own.map(({ scores }) => scores[at]).filter(Boolean), alike = scored.filter((other) => other.alike === one.alike);
      const first = alike.filter(({ tied }) => tied).length;
      const place = one.tied ? (first > 1 ? "1=" : "1") : String(1 + alike.filter((other) => other.score > one.score || other.tied).length);
      return [place, alike.length < scored.length ? el("small", { class: "under" }, `of ${alike.length} at ${one.alike.replaceAll("%", "\u202f%").replace(" of the bytes", "")}`) : null];
    };
    const value = ({ scores }, at) => (scores[at] ? scores[at].score : -Infinity);
    const orders = { name: (one, other) => panel.series[one.s].label.localeCompare(panel.series[other.s].label) };
    budgets.forEach((_, at) => { orders[at] = (one, other) => value(other, at) - value(one, at) || orders.name(one, other); });
    const cell = (one) => {
      if (!one) return el("td", { class: "num muted" }, "–");
      const change = one.diff === undefined ? "" : `${points(one.diff, true)} [${points(one.low, true)}, ${points(one.high, true)}]`;
      const rows = one.attended !== null && one.held !== null && Math.abs(one.attended - one.held) > 0.05 ? one.attended : null; // otherwise bytes say it
      const cost = [["bytes", one.held], ["rows", rows], ["limit", one.limit || null]].filter(([, share]) => share !== null).map(([name, share]) => `${name} ${percent(share)}`).join(" · ");
      const sign = one.best ? "*" : one.tied ? "†" : "";
      return el("td", { class: one.tied ? "num tied" : "num" }, one.best ? el("b", {}, points(one.score)) : points(one.score), el("sup", {}, sign), cost ? el("small", { class: "under" }, cost) : null, change ? el("small", { class: "under" }, change) : null);
    };
    const table = el("table", { class: "matrix" });
    const filled = (at) => own.filter(({ scores }) => scores[at]).length;
    let shown = String(columns.reduce((best, at) => (filled(at) > filled(best) ? at : best), columns[0])), most = MOST_ROWS; // the fullest column
    const fill = (order) => {
      shown = order;
      const head = (name, key, kind) => el("th", { class: kind, scope: "col", "aria-sort": order === key ? (key === "name" ? "ascending" : "descending") : "none" },
        el("button", { class: "plain", onclick: () => { fill(key); table.querySelector(`[data-order="${key}"]`).focus(); }, "data-order": key }, name));
      const body = [...own].sort(orders[order]).slice(0, most).map((row) => el("tr", {},
        rowHead(panel.series[row.s]), order === "name" ? null : el("td", { class: "num muted rank" }, ...rank(row.scores[order], order), row.scores[order]?.needed ? el("small", { class: "under" }, `n ≈ ${rounded(row.scores[order].needed)}`) : null), columns.map((at) => cell(row.scores[at]))));
      body.push(el("tr", { class: "full" }, cacheHead(), order === "name" ? null : el("td", { class: "num" }), columns.map(() => cell(cache))));
      const place = order === "name" ? null : el("th", { class: "num", scope: "col" }, el("abbr", { title: `rank at ${budgets[order]}` }, "#"));
      table.replaceChildren(el("thead", {}, el("tr", {}, head("method", "name", "name"), place, columns.map((at) => head(budgets[at], String(at), "num")))), el("tbody", {}, body));
    };
    const tables = [];
    if (own.length || !apart.length) {
      fill(shown);
      tables.push(scrolled(table), fold(own.length, () => { most = Infinity; fill(shown); }));
    }
    if (apart.length) tables.push(pointsTable(panel, apart, cell));
    return [...tables, el("small", {}, about)];
  }
  function pointsTable(panel, apart, cell) { // cells that are compared by their bytes, the fewest first
    const row = (one) => el("tr", {}, rowHead(panel.series[one.s], one.budget === "100\u202f%" ? null : el("small", { class: "under" }, `budget ${one.budget}`)), cell(one));
    const last = el("tr", { class: "full" }, cacheHead(), cell(panel.matrix.cache));
    const body = el("tbody"), fill = (most) => body.replaceChildren(...ordered.slice(0, most).map(row), last);
    const ordered = [...apart].sort((one, other) => (one.held ?? Infinity) - (other.held ?? Infinity) || other.score - one.score);
    fill(MOST_ROWS);
    return el("div", { class: "points" }, el("small", {}, "A codec, or the method itself, decides how many bytes these hold. They are sorted by bytes, the fewest first. Marks compare those of the same budget that hold similar bytes."),
      scrolled(el("table", { class: "matrix" }, el("thead", {}, el("tr", {}, ["method:", "score:num"].map((text) => el("th", { scope: "col", class: text.split(":")[1] }, text.split(":")[0])))), body)), fold(apart.length, () => fill(Infinity)));
  }

  function leaderboard(panel) {
    const own = panel.series.filter((one) => passes(one) && one.smallest);
    if (!own.length) return null;
    const place = (one) => (one.smallest.order === null ? Infinity : one.smallest.order);
    // a row ranks behind those that are certain to need less
    const rank = (one) => 1 + own.filter((other) => other.smallest.bounds && one.smallest.bounds && other.smallest.bounds[1] < one.smallest.bounds[0]).length;
    const ranks = new Map(own.map((one) => [one, place(one) === Infinity ? Infinity : rank(one)]));
    const ranked = (one) => (ranks.get(one) === Infinity ? "–" : `${ranks.get(one)}${own.some((other) => other !== one && ranks.get(other) === ranks.get(one)) ? "=" : ""}`);
    own.sort((one, other) => (ranks.get(one) === ranks.get(other) ? 0 : ranks.get(one) - ranks.get(other)) || (place(one) === place(other) ? 0 : place(one) - place(other)) || other.smallest.most - one.smallest.most || one.label.localeCompare(other.label));
    const least = Math.min(...own.map((one) => one.smallest.measured[0]));
    const most = Math.max(...own.map((one) => one.smallest.measured[1]));
    const along = (share) => (most > least ? (100 * Math.log(share / least)) / Math.log(most / least) : 50);
    const row = (one) => {
      const { text, interval, ends, measured, why } = one.smallest;
      const strip = svg("svg", { viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": "true" });
      const line = (from, to, width, colour) => svg("line", { x1: from, x2: to, y1: 7, y2: 7, stroke: colour.length > 7 ? hue(colour.slice(0, 7)) + colour.slice(7) : hue(colour), "stroke-width": width, "vector-effect": "non-scaling-stroke", "stroke-linecap": "round" });
      strip.append(line(along(measured[0]), along(measured[1]), 1, "#dadce0"));
      if (ends && ends[0] !== null) strip.append(line(along(ends[0]), along(ends[2]), 3, one.colour + "66"));
      if (ends && place(one) !== Infinity) strip.append(line(along(ends[1]), along(ends[1]), 9, one.colour));
      return el("tr", {},
        el("td", { class: "num" }, ranked(one)),
        el("td", { class: "name marked" }, mark(one), methodLink(one), unfinished(one)),
        el("td", { class: "num" }, text), el("td", { class: "num muted" }, interval || why || "–"),
        el("td", { class: "strip" }, strip), el("td", { class: "num wider" }, one.smallest.most === null ? "–" : percent(one.smallest.most)), el("td", { class: "num wider" }, String(one.samples)));
    };
    const body = el("tbody", {}, own.slice(0, MOST_ROWS).map(row));
    const head = ["#:num", "method:", "smallest:num", "95\u202f% interval:num", "measured range:strip", "at most:num wider", "samples:num wider"].map((text) => el("th", { scope: "col", class: text.split(":")[1] }, text.split(":")[0]));
    return [scrolled(el("table", {}, el("thead", {}, el("tr", {}, head)), body)), fold(own.length, () => body.append(...own.slice(MOST_ROWS).map(row)))];
  }

  function scores(data, own, about) { // a curve, or if there is only one budget, a row for each method
    const datasets = tables(data, own);
    datasets.points = datasets.points.filter(({ s }) => own.some((one) => one.s === s));
    const shares = datasets.points.map(({ share }) => share), budgets = [...new Set(datasets.points.map(({ budget }) => budget))];
    if (!shares.length) return null;
    const least = Math.min(...shares), most = Math.max(...shares);
    if (budgets.length === 1 || least === most) return { at: budgets.join(", "), node: chart("dots", datasets, `Score at ${budgets.join(", ")}, ${about}`, { height: 24 * own.length }) };
    const inside = FIRST.ticks.filter((share) => share >= 0.99 * least && share <= 1.01 * most); // cells hold nearly their budget
    return { node: chart("curve", datasets, `Score against measured share, ${about}`, {}, inside.length > 1 ? inside : [least, most]) };
  }
  function curves(panel, only = passes) {
    const all = panel.series.filter((one) => only(one) && one.smallest), own = strongest(panel, all);
    if (!own.length) return null;
    const dash = (one) => svg("svg", { class: "mark", width: 38, height: 12, viewBox: "0 0 38 12", "aria-hidden": "true" },
      svg("line", { x1: 0, x2: 38, y1: 6, y2: 6, stroke: hue(one.colour), "stroke-width": 2, "stroke-dasharray": one.dash.join(" ") || "none" }), svg("path", { d: PATHS[one.shape], fill: hue(one.colour), transform: "translate(13 0)" }));
    const first = scores(panel, own, title(panel));
    const key = first.at ? [] : own.map((one) => el("span", {}, dash(one), one.label)); // rows of dots have their names beside them
    key.push(el("span", {}, dash({ ...FULL, shape: "diamond", dash: [4, 3] }), "full cache"));
    const nested = first.at ? [] : panel.nested.map((labels) => labels.filter((label) => own.some((one) => one.label === label))).filter((labels) => labels.length > 1);
    const left = Math.max(...own.map((one) => one.left_out));
    const { average, ...solvable } = panel.solvable;
    const second = average && [scores({ ...panel, ...solvable }, own, `${average}, ${title(panel)}`)?.node, el("small", {}, average)];
    const short = own.filter((one) => one.unfinished.length).map((one) => `${one.label} ${one.unfinished.join(", ")}`);
    return [first.node, drawnOf(own, all), el("div", { class: "key" }, key),
      el("small", {}, (first.at ? `budget ${first.at}; ` : "") + (panel.matrix ? panel.matrix.count : own[0].average + (left ? `; up to ${left} samples that some run did not answer are left out` : ""))),
      nested.length ? el("p", { class: "note nested" }, `These curves coincide at neighbouring points, so the one named first is drawn around the next: ${nested.map((labels) => labels.join(", ")).join("; ")}.`) : null,
      short.length ? el("p", { class: "note unfinished" }, `Not finished: ${short.join("; ")}. All numbers come from the samples that all runs answered.`) : null, ...(second || [])];
  }

  function tasks(panel) {
    const all = panel.series.filter(passes), own = strongest(panel, all);
    if (!own.length) return null;
    const rows = rowsOf(panel.rows).filter(({ s }) => own.includes(panel.series[s])).length;
    const node = chart("tasks", tables(panel, own), `Difference from the full cache by task, ${title(panel)}`, { height: rows * FIRST.charts.tasks.height });
    node.style.minWidth = `${190 + 52 * panel.tasks.rows.length}px`;
    node.style.maxWidth = `${230 + 110 * panel.tasks.rows.length}px`;
    return [scrolled(node), drawnOf(own, all)];
  }

  function grids(panel) {
    const all = panel.series.filter(passes), drawn = new Set(strongest(panel, all));
    const own = panel.grids.filter(({ s }) => s === null || drawn.has(panel.series[s]));
    if (!own.some(({ s }) => s !== null || !panel.series.length)) return null;
    return [drawnOf([...drawn], all), el("div", { class: "grids" }, own.map(({ s, row, cells }) => el("div", {},
      el("h4", {}, mark(s === null ? FULL : panel.series[s]), row),
      chart("grid", { cells: rowsOf(cells) }, `Score by length and depth, ${row}`))))];
  }

  function costs(panel) {
    const all = panel.series.filter(passes), own = strongest(panel, all);
    if (!own.length || !panel.costs.rows.length) return null;
    return [drawnOf(own, all) || [], el("div", { class: "trio" }, ["held", "ttft", "tpot"].map((name) => chart(name, tables(panel, own), `Score difference against ${name}, ${title(panel)}`))),
      el("div", { class: "key" }, own.map((one) => el("span", {}, mark(one), one.label)), el("span", {}, mark(FULL), "full cache"))];
  }

  const SECTIONS = () => [
    ["matrix", "Scores", "Mean score at every budget. Below it: the bytes that the cache holds, as a share of the full cache's; the share of rows that a decoded token attends to, if it differs by more than 5 points; and the share of answers that ended at the length limit, if there are any. Then the difference from the full cache in points, on the same samples, with its 95\u202f% interval. If the interval contains 0, chance alone can explain the difference. Marks and ranks compare the methods of a column that hold similar bytes, or read similar shares of the rows: * is the best score of them; † cannot be told from it (simultaneous paired comparisons, 95\u202f%), so it shares rank 1=. Below the rank, n ≈ says how many samples are enough to tell it from the best with a chance of 80\u202f% or more, if the difference stays as it is. A click on a budget sorts by it.", matrix, "wide"],
    ["leaderboard", `Smallest budget that keeps ${100 * DATA.keep}\u202f%`, `The measured share of the full cache's bytes from which on a method keeps ${100 * DATA.keep}\u202f% of the full cache's score. Between measured points it is interpolated linearly; ≤ and > mark values outside the measured range. A method ranks behind those that need less for certain (intervals that hold at once, 95\u202f%, do not overlap); = marks ranks that several share, and – a method that does not keep it at any measured budget. At most: the share of the score that the largest measured budget keeps.`, leaderboard],
    ["curves", "Score against memory", "Means with 95\u202f% bands, clustered by context, against the measured share of memory, not the requested budget. The dashed line is the full cache on the same samples. If there is only one budget, each method has a row with its score and interval.", curves],
    ["tasks", "Difference by task", "Points gained or lost against the full cache on the same samples; Ø is an average. Point at a cell for its interval.", tasks, "wide"],
    ["grids", "Length × depth", "Mean score by the length of the context and the depth of the answer in it.", grids, "wide"],
    ["costs", "What a score costs", "Filled and connected points are on the Pareto front: no other run of the panel, and not the full cache (the diamond), costs as little and scores as much. Vertical whiskers are 95\u202f% intervals of the difference. Times are medians. Horizontal whiskers are 95\u202f% intervals of the cost; bytes have none if all samples hold the same share. If whiskers overlap, the order may be due to chance.", costs, "wide"],
  ];

  // ---- the page of a method, which replaces the sections

  function methodSection() {
    const node = document.getElementById("method"), name = state.method;
    document.getElementById("page").classList.toggle("one-method", Boolean(name));
    node.hidden = !name;
    node.replaceChildren();
    if (!name) return;
    const about = DATA.about[name];
    const line = (text) => (text ? el("p", {}, text) : null);
    node.append(el("p", {}, el("a", { href: address(null), class: "back" }, "← all methods")), el("h2", { tabindex: -1 }, mark(DATA.methods[name]), " ", name));
    if (about) {
      node.append(...[line(about.definition), about.equation ? el("pre", { class: "equation", tabindex: 0, "aria-label": "equation" }, about.equation) : null, line(about.source), ...about.more.map(line)].filter(Boolean));
      if (about.presets.length) node.append(el("h3", {}, "Presets"), scrolled(el("table", { class: "presets" },
        el("thead", {}, el("tr", {}, ["preset", "settings", "source"].map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, about.presets.map(([preset, settings, source]) => el("tr", {}, el("th", { scope: "row" }, preset, preset === about.preset ? " (default)" : ""), el("td", {}, el("code", {}, settings)), el("td", {}, source)))))));
    } else node.append(el("p", {}, "This kvbench has no method of this name, so there is no description."));
    const mine = (one) => one.method === name;
    const box = el("div", { class: "panels" });
    for (const { panel } of chosen()) {
      if (panel.part) { box.append(unloaded(panel)); continue; }
      const own = panel.series.filter(mine);
      if (own.length) box.append(el("div", { class: "panel" }, heading(panel), curves(panel, mine) || [], el("h3", {}, "Where it fails first"), el("ul", { class: "fails" }, own.map((one) => el("li", {}, failure(one))))));
    }
    node.append(el("h3", {}, "Its curve"), box);
    if (!box.children.length) box.append(el("p", { class: "empty" }, "No run passes the filters."));
  }
  const failure = ({ label, fails }) => (fails
    ? [el("b", {}, fails.task), ` at ${fails.row}: ${points(fails.diff, true)} [${points(fails.low, true)}, ${points(fails.high, true)}] points, the largest loss at the largest budget where an interval excludes 0`]
    : `${label}: no subtask loses at any budget so that its interval excludes 0`);

  // ---- two runs side by side, from the scores in the files of samples

  const pair = { a: null, b: null, failed: null };
  const LISTED = 20, SAME = 1e-9; // scores that differ by less are equal up to rounding
  const scoresOf = (hash) => { // uid -> subtask, context and score, from the files of a run, or of any run of the panel for the full cache
    const own = DATA.runs.find((run) => run.hash === hash);
    const file = DATA.files.find(({ run }) => run === hash) || (own && own.series === "full cache" && DATA.files.find(({ panel, names }) => panel === own.panel && names.length));
    if (!file) return null;
    const at = file.run === hash ? 4 : 3, side = ([, score, error]) => (error ? null : score);
    return { file, read: () => new Map(file.names.flatMap((_, part) => loaded.get(`${file.run} ${part}`) || []).map((entry) => [entry[0], { subtask: entry[1], group: entry[7], score: side(entry[at]) }])) };
  };
  function compare() {
    const node = document.getElementById("compare"), body = node.querySelector(".body");
    node.hidden = DATA.runs.length < 2;
    body.replaceChildren();
    const name = (run) => `${run.series}${run.budget ? ` · ${run.budget}` : ""}`;
    const first = DATA.runs.find(({ hash }) => hash === pair.a);
    const options = (some) => [["", "choose a run"], ...some.map((run) => [run.hash, `${title(DATA.panels[run.panel])} · ${name(run)} · ${run.hash.slice(0, 6)}`])];
    const pick = (key, label, some) => el("label", {}, label, el("select", { "data-compare": key, onchange: (event) => { pair[key] = event.target.value || null; if (key === "a") pair.b = null; pair.failed = null; compare(); remember(); } },
      options(some).map(([value, text]) => el("option", { value, selected: (pair[key] || "") === value ? "" : null }, text))));
    body.append(el("div", { class: "pick two" }, pick("a", "Run A", DATA.runs), pick("b", "Run B", first ? DATA.runs.filter((run) => run.panel === first.panel && run !== first) : [])));
    const second = DATA.runs.find(({ hash }) => hash === pair.b);
    if (!first || !second) return;
    const keys = [...new Set([first, second].flatMap((run) => Object.keys(run.settings)))].filter((key) => first.settings[key] !== second.settings[key]).sort();
    const head = (texts) => el("thead", {}, el("tr", {}, texts.map((text, at) => el("th", { scope: "col", class: at ? "num" : "" }, text))));
    body.append(el("h3", {}, "Settings that differ"), keys.length ? scrolled(el("table", { class: "settings" }, head(["setting", "A", "B"]),
      el("tbody", {}, keys.map((key) => el("tr", {}, el("th", { scope: "row" }, key), [first, second].map((run) => el("td", { class: "num" }, el("code", {}, run.settings[key] ?? "–")))))))) : el("p", {}, "All settings are equal."));
    const sides = [first, second].map(({ hash }) => scoresOf(hash));
    const command = `kvbench results compare ${first.hash} ${second.hash}`;
    if (sides.includes(null)) { body.append(el("p", { class: "note" }, "The page has no samples of one of these runs: ", el("code", {}, command))); return; }
    if (pair.failed) { body.append(el("p", { class: "note bad" }, pair.failed)); return; }
    const missing = sides.flatMap(({ file }) => file.names.map((own, part) => [own, `${file.run} ${part}`])).filter(([, key]) => !loaded.has(key));
    if (missing.length) {
      Promise.all(missing.map(([own, key]) => load(own, key))).then(compare, (error) => { pair.failed = error.message; compare(); });
      body.append(el("p", { class: "empty" }, "…"));
      return;
    }
    const [one, other] = sides.map(({ read }) => read());
    const common = [...one.keys()].filter((uid) => other.has(uid));
    const both = common.filter((uid) => one.get(uid).score !== null && other.get(uid).score !== null).map((uid) => ({ uid, ...other.get(uid), from: one.get(uid).score, to: other.get(uid).score }));
    if (!both.length) { body.append(el("p", { class: "empty" }, "The runs have no answered sample in common.")); return; }
    const lost = ({ from, to }) => to < from - SAME, gained = ({ from, to }) => to > from + SAME;
    const subtasks = [...new Set(both.map(({ subtask }) => subtask))].sort(byName).map((name) => [name, both.filter(({ subtask }) => subtask === name)]);
    const row = (label, some) => {
      const own = some.flat(), { value, low, high } = kvbenchIntervals.mean(some.map((each) => ({ values: each.map(({ from, to }) => to - from), groups: each.map(({ group }) => group) })));
      const means = ["from", "to"].map((side) => kvbenchIntervals.average(some.map((each) => each.map((one) => one[side]))));
      const texts = [...means.map((own) => points(own)), points(value, true), low === null ? "–" : `[${points(low, true)}, ${points(high, true)}]`, `${own.filter(lost).length} / ${own.filter(gained).length} / ${own.filter((each) => !lost(each) && !gained(each)).length}`, String(own.length)];
      return el("tr", {}, el("th", { scope: "row" }, label), texts.map((text) => el("td", { class: "num" }, text)));
    };
    const overall = kvbenchIntervals.mean(subtasks.map(([, own]) => ({ values: own.map(({ from, to }) => to - from), groups: own.map(({ group }) => group) })));
    const left = [...[one.size, other.size].map((size, at) => [size - common.length, `only ${"AB"[at]} has`]), [common.length - both.length, "failed in A or B"]].filter(([count]) => count).map(([count, text]) => ` Left out: ${count} samples that ${text}.`);
    body.append(el("h3", {}, "Difference by subtask"), scrolled(el("table", { class: "paired" }, head(["subtask", "A", "B", "B − A", "95\u202f% interval", "lost / gained / same", "n"]), el("tbody", {}, subtasks.map(([name, own]) => row(name, [own])), row("average", subtasks.map(([, own]) => own))))),
      el("small", {}, "Points, paired by sample; the average weighs each subtask the same. If an interval contains 0, chance alone can explain the difference.", neededSamples(overall, both.length), left, " In a terminal: ", el("code", {}, command)));
    for (const [label, own] of [["Lost", both.filter(lost)], ["Gained", both.filter(gained)]])
      body.append(el("h3", {}, `${label} (${own.length})`), el("p", { class: "uids" }, own.slice(0, LISTED).map(({ uid, from, to }) => `${uid} ${from} → ${to}`).join("; ") || "none", own.length > LISTED ? ` and ${own.length - LISTED} more` : ""));
  }

  // ---- samples: files next to the page, loaded when needed

  const browser = { run: null, show: "all", subtask: ALL, limit: 20 };
  const WORDS = 1200;
  function diff(one, other) {
    const [a, b] = [one, other].map((text) => text.match(/\s+|[^\s]+/g) || []);
    if (a.length > WORDS || b.length > WORDS) return null;
    const wide = b.length + 1, best = new Uint16Array((a.length + 1) * wide);
    for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
      best[i * wide + j] = a[i] === b[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
    const left = [], right = [];
    const put = (list, word, tag) => {
      const last = list[list.length - 1];
      if (last && last.tag === tag) last.text += word; else list.push({ tag, text: word });
    };
    let i = 0, j = 0;
    while (i < a.length || j < b.length) {
      if (i < a.length && j < b.length && a[i] === b[j]) { put(left, a[i++], null); put(right, b[j++], null); }
      else if (j >= b.length || (i < a.length && best[(i + 1) * wide + j] >= best[i * wide + j + 1])) put(left, a[i++], "del");
      else put(right, b[j++], "ins");
    }
    return [left, right].map((list) => list.map(({ tag, text }) => (tag ? el(tag, {}, text) : text)));
  }
  function side(name, [output, score, error], shown) {
    return el("div", { class: "side" }, el("h4", {}, el("span", {}, name), el("b", {}, error || points(score))), el("pre", { tabindex: 0 }, shown || (output === "" ? "" : output)));
  }
  const SVG = { preserveAspectRatio: "none", role: "img" };
  function shade(percent) {
    const at = Math.sqrt(percent / 100) * (FIRST.shades.length - 1), below = Math.min(Math.floor(at), FIRST.shades.length - 2);
    const part = (index, from) => parseInt(FIRST.shades[index].slice(from, from + 2), 16);
    return [1, 3, 5].map((from) => Math.round(part(below, from) + (at - below) * (part(below + 1, from) - part(below, from))));
  }
  const tint = (percent) => `rgb(${shade(percent)})`;
  function ink(colour) { // black or white, whichever has the higher contrast
    const [red, green, blue] = colour.map((own) => own / 255).map((own) => (own <= 0.04045 ? own / 12.92 : ((own + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
  }
  function legend() {
    const steps = [...Array(51).keys()].map((step) => svg("rect", { x: step, width: 1.05, height: 1, fill: tint(step * step / 25) }));
    const ticks = [0, 5, 25, 100].map((own) => el("span", { style: `left: ${10 * Math.sqrt(own)}%` }, String(own)));
    return el("p", { class: "shades" }, "Rows held at the beginning of the answer, mean over layers and KV heads,", el("span", { class: "scale" },
      svg("svg", { ...SVG, viewBox: "0 0 51 1", "aria-label": "0 to 100\u202f%, darker is more" }, ...steps), ticks), "%");
  }
  function strip(own) {
    if (!own) return el("p", { class: "target" }, el("small", {}, "which rows survived: not recorded"));
    const [digits, tokens, places] = own;
    const percents = digits.match(/../g).map((two) => parseInt(two, 16)), bins = percents.length;
    const said = (percent) => (percent < 0.5 ? "<1\u202f%" : `${Math.round(percent)}\u202f%`);
    const mean = (values) => said(values.reduce((sum, one) => sum + one, 0) / values.length);
    const edge = (bin) => Math.ceil((bin * tokens) / bins);
    const box = svg("svg", { ...SVG, viewBox: `0 0 ${bins} 18` });
    percents.forEach((percent, bin) => box.append(svg("rect", { x: bin, width: bin + 1 < bins ? 1.05 : 1, height: 12, fill: tint(percent) },
      svg("title", {}, `tokens ${edge(bin)} to ${edge(bin + 1) - 1}: ${said(percent)}`))));
    box.append(svg("rect", { class: "frame", width: bins, height: 12 }));
    for (const bin of places) box.append(svg("rect", { class: "place", x: bin, y: 14, width: 1, height: 4 }));
    const survived = `${mean(percents)} survived` + (places.length ? `, ${mean(places.map((bin) => percents[bin]))} where a target stands (▬)` : "");
    box.setAttribute("aria-label", `Rows over the prompt of ${tokens} tokens: ${survived}`);
    return el("div", { class: "rows" }, box, el("small", {}, el("span", {}, "0"), el("span", {}, survived), el("span", {}, `${tokens.toLocaleString("en")} tokens`)));
  }
  const right = (output, score, target) => score === 100 || (score !== 0 && (output || "").toLowerCase().includes(target.trim().toLowerCase()));
  function prompt(excerpt, survived, [output, score]) { // the rows that survived, on the words themselves
    if (!excerpt) return null;
    const [tokens, ...windows] = excerpt;
    const percents = survived && survived[1] === tokens ? survived[0].match(/../g).map((two) => parseInt(two, 16)) : null;
    const text = windows.map((pieces) => el("p", {}, "… ", pieces.map(([words, bin, target]) => {
      const own = percents ? { class: "held", style: `background: ${tint(percents[bin])}; color: ${ink(shade(percents[bin]))}`, title: `${percents[bin]}\u202f% of the rows held` } : {};
      if (!target || score === null) return el("span", own, words);
      return el("mark", { class: right(output, score, words) ? "right" : "wrong" }, words);
    }), " …"));
    return el("div", { class: "prompt", tabindex: 0, role: "region", "aria-label": "the prompt around the targets" }, text);
  }
  function sample([uid, subtask, targets, full, method, asked, survived], name, excerpts) {
    const words = diff(full[0], method[0]);
    const change = full[1] === null || method[1] === null ? "" : points(method[1] - full[1], true);
    return el("article", { class: "sample" },
      el("header", {}, el("b", {}, uid), el("small", {}, `${subtask} · ${change === "" ? "no score" : `difference ${change}`}${words ? "" : " · too long to compare word by word"}`)),
      el("p", { class: "target asked", tabindex: 0 }, el("small", {}, asked === null ? "question: not recorded" : "question "), asked && asked.trim()),
      el("p", { class: "target" }, el("small", {}, "target "), targets.join("  ·  ")), strip(survived), prompt(excerpts[uid], survived, method),
      el("div", { class: "sides" }, side("full cache", full, words && words[0]), side(name, method, words && words[1])));
  }
  const KINDS = {
    all: ["all samples", () => true],
    lost: ["lost", ([, , , full, method]) => method[1] < full[1]],
    gained: ["gained", ([, , , full, method]) => method[1] > full[1]],
    differ: ["answers differ", ([, , , full, method]) => method[0] !== full[0]],
  };
  function samples() {
    const node = document.getElementById("samples");
    const files = DATA.files.filter((file) => shows(DATA.panels[file.panel]) && passes(file) && file.names.length);
    node.hidden = !DATA.files.length;
    const body = node.querySelector(".body");
    body.replaceChildren();
    if (!files.length) { body.append(el("p", { class: "empty" }, "No run passes the filters.")); return; }
    if (!files.some((file) => file.run === browser.run)) Object.assign(browser, { run: null, subtask: ALL, limit: 20 });
    const file = files.find((own) => own.run === browser.run);
    const parts = file ? file.names.map((_, part) => loaded.get(`${file.run} ${part}`)).filter(Boolean) : [];
    const entries = parts.flat();
    const options = [["", "choose a run"], ...files.map((own) => [own.run, `${title(DATA.panels[own.panel])} · ${own.row}`])];
    const pick = (name, label, values) => el("label", {}, label, el("select", { "data-pick": name, onchange: (event) => choose(name, event.target.value) },
      values.map(([value, text]) => el("option", { value, selected: browser[name] === value || (value === "" && browser[name] === null) ? "" : null }, text))));
    const subtasks = [...new Set(entries.map(([, own]) => own))].sort(byName);
    const partly = file && parts.length < file.names.length;
    if (entries.length && browser.subtask !== ALL && !subtasks.includes(browser.subtask)) { // of a link
      if (partly && !browser.failed) { more(file, parts.length); return; }
      browser.subtask = ALL;
    }
    body.append(el("div", { class: "pick" }, pick("run", "Run", options),
      pick("show", "Show", Object.entries(KINDS).map(([key, [text]]) => [key, text])),
      pick("subtask", "Task", [[ALL, "all"], ...subtasks.map((own) => [own, own])])));
    if (!file) return;
    if (browser.failed) { body.append(el("p", { class: "note bad" }, browser.failed)); return; }
    const found = entries.filter((own) => KINDS[browser.show][1](own) && (browser.subtask === ALL || own[1] === browser.subtask));
    body.append(el("small", {}, `${found.length} of ${entries.length} samples${partly ? `, ${parts.length} of ${file.names.length} files loaded` : ""}; those that lost most come first`), found.some((own) => own[6]) ? legend() : "");
    const prompts = DATA.prompts[file.panel] || {}, excerpts = loaded.get(prompts.name) || {};
    const said = prompts.reason ? `The prompts' text is not shown: ${prompts.reason}.` : prompts.samples < prompts.of ? `The prompts' text is shown for the ${prompts.samples} of ${prompts.of} samples that most runs lose.` : "";
    if (found.length) body.append(el("p", { class: "about" }, prompts.reason ? said : ["Below the strip: the prompt around the targets, shaded like the strip. A target is ", el("mark", { class: "right" }, "green"), " if the answer has it and ", el("mark", { class: "wrong" }, "amber"), ` if not. ${said}`]));
    body.append(...found.slice(0, browser.limit).map((own) => sample(own, file.row, excerpts)));
    if (found.length > browser.limit) body.append(el("button", { onclick: () => { browser.limit += 40; samples(); } }, "Show more"));
    else if (partly) body.append(el("button", { onclick: () => more(file, parts.length) }, "Load more"));
  }
  function more(file, part) {
    const { name } = DATA.prompts[file.panel] || {};
    if (name && !loaded.has(name)) load(name, name).then(samples, () => {}); // without it, the samples lack their prompts
    load(file.names[part], `${file.run} ${part}`).then(() => { browser.failed = null; samples(); }, (error) => { browser.failed = error.message; samples(); });
  }
  function choose(name, value) {
    Object.assign(browser, { [name]: value, limit: 20 }, name === "run" ? { subtask: ALL, failed: null } : {});
    const file = DATA.files.find((own) => own.run === browser.run);
    samples();
    if (name === "run" && file) more(file, 0);
    remember();
  }

  // ---- the address holds the selection, so that a link opens the same view

  const picks = { run: null, show: "all", subtask: ALL }; // and their values without a selection
  function address(method) {
    const own = new URLSearchParams();
    for (const key of Object.keys(FILTERS)) if (state[key] !== ALL) own.set(key, state[key]);
    for (const name of [...state.off].sort()) own.append("hide", name);
    if (method) own.set("method", method);
    for (const key of ["a", "b"]) if (pair[key]) own.set(key, pair[key]);
    for (const key of Object.keys(picks)) if (browser[key] !== picks[key]) own.set(key, browser[key]);
    return `#${own}`;
  }
  function remember() {
    const text = address(state.method);
    if (text !== (location.hash || "#")) history.pushState(null, "", text);
  }
  function recall() {
    const own = new URLSearchParams(location.hash.slice(1));
    for (const key of Object.keys(FILTERS)) state[key] = values(key).includes(own.get(key)) ? own.get(key) : ALL;
    state.off = new Set(own.getAll("hide").filter((name) => Object.hasOwn(DATA.methods, name)));
    state.method = Object.hasOwn(DATA.methods, own.get("method") || "") ? own.get("method") : null;
    const found = ["a", "b"].map((key) => DATA.runs.find(({ hash }) => hash === own.get(key)) || null);
    Object.assign(pair, { a: found[0]?.hash || null, b: found[0] && found[1]?.panel === found[0].panel ? found[1].hash : null, failed: null });
    const file = DATA.files.find(({ run }) => run === own.get("run"));
    Object.assign(browser, picks, { failed: null, limit: 20 });
    if (file) Object.assign(browser, { run: file.run, subtask: own.get("subtask") || ALL });
    if (Object.hasOwn(KINDS, own.get("show"))) browser.show = own.get("show");
    for (const key of Object.keys(FILTERS)) document.querySelector(`[data-filter=${key}]`).value = state[key];
    press();
    if (browser.run) more(file, 0);
  }

  // ---- the page

  function render() {
    waiting.clear();
    watcher.disconnect();
    for (const [id, , , make] of SECTIONS()) {
      const box = document.getElementById(id).querySelector(".panels");
      box.replaceChildren(...chosen().map(({ panel }) => (panel.part ? unloaded(panel) : framed(panel, make))).filter(Boolean));
    }
    for (const id of ["lost", "studies"]) {
      const box = document.getElementById(id);
      box.querySelector(".panels").replaceChildren(...studies(DATA[id] || []));
      box.hidden = !box.querySelector(".panel");
    }
    empty();
    methodSection();
    const first = chosen()[0]?.panel;
    if (first?.part) load(first.part, first.part).then(() => fill(first), () => {}).then(() => afterPaint(lists)); // its place on the page says what failed
    else { samples(); afterPaint(compare); }
  }
  const afterPaint = (work) => requestAnimationFrame(() => setTimeout(work));
  function lists() { // after the first table is shown, because a large store has long lists of runs
    samples();
    compare();
  }
  function framed(panel, make) {
    const made = make(panel);
    return made && el("div", { class: "panel" }, heading(panel), made);
  }
  function unloaded(panel) {
    const { part } = panel; // another section may have loaded it when this node comes near, and then panel.part is null
    const node = el("div", { class: "panel unloaded", "data-panel": DATA.panels.indexOf(panel) }, heading(panel), el("p", { class: "empty" }, "…"));
    later(node, () => load(part, part).then(() => fill(panel), (error) => { node.lastChild.textContent = error.message; }));
    return node;
  }
  function fill(panel) {
    const name = panel.part;
    if (!name) return; // another section has loaded it
    Object.assign(panel, loaded.get(name), { part: null });
    const put = ([id, , , make]) => {
      const node = document.querySelector(`#${id} [data-panel="${DATA.panels.indexOf(panel)}"]`), made = node && framed(panel, make);
      if (made) node.replaceWith(made); else if (node) node.remove();
    };
    const [scores, ...others] = SECTIONS();
    put(scores); // is shown before the others are made
    afterPaint(() => {
      others.forEach(put);
      empty();
      if (state.method) methodSection();
    });
  }
  function empty() {
    const nodes = SECTIONS().map(([id]) => document.getElementById(id));
    for (const node of nodes) node.hidden = !node.querySelector(".panels").children.length;
    document.getElementById("nothing").hidden = nodes.some((node) => !node.hidden);
  }
  function studies(found) {
    return found.filter(({ model }) => state.model === ALL || model === state.model).map((own) => {
      const node = el("div", { class: "study", role: "group", "aria-label": `${own.title}; ${own.about}` });
      later(node, () => load(own.part, own.part).then(() => studied(node, loaded.get(own.part)), (error) => { node.textContent = error.message; }));
      const said = [...own.claims.map((text) => `Claim: ${text}`), ...own.notes.map((text) => `Reading: ${text}`)];
      return el("div", { class: "panel" }, el("header", {}, el("h3", {}, own.title), el("small", {}, own.about)), node, el("ul", {}, said.map((text) => el("li", {}, text))));
    });
  }
  function studied(node, { head, rows, ...spec }) { // a table or a chart
    if (!rows) { draw(node.appendChild(el("div")), structuredClone(spec)); return; }
    const row = (name, texts) => el("tr", {}, texts.map((text, at) => el(at ? name : "th", {}, text)));
    node.replaceChildren(el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((texts) => row("td", texts)))));
  }
  function press() {
    for (const chip of document.querySelectorAll("[data-method]")) chip.setAttribute("aria-pressed", String(!state.off.has(chip.dataset.method)));
    render();
  }
  const values = (key) => (key === "class" ? DATA.classes : key === "block" ? DATA.blocks.map(blockOf).sort(byName) : [...new Set(DATA.panels.map((panel) => panel[key]))].sort());
  function filter(name) {
    return el("label", { title: name === "class" ? "shows the columns of the scores whose budgets are nearest to this one" : null }, FILTERS[name], el("select", { "data-filter": name, onchange: (event) => { state[name] = event.target.value; render(); remember(); } },
      el("option", { value: ALL }, "all"), values(name).map((value) => el("option", { value }, value))));
  }
  function bar() {
    const names = Object.keys(DATA.methods).sort((a, b) => a.localeCompare(b));
    const chips = names.map((name) => {
      const hide = (off) => { state.off = new Set(off); press(); remember(); };
      return el("button", {
        "data-method": name, title: "click: show or hide; double click: only this one",
        onclick: ({ detail }) => { if (detail < 2) hide(state.off.has(name) ? [...state.off].filter((own) => own !== name) : [...state.off, name]); },
        ondblclick: () => hide(names.filter((own) => own !== name)),
      }, mark(DATA.methods[name]), name);
    });
    return el("div", { class: "bar", role: "toolbar", "aria-label": "Filters" }, Object.keys(FILTERS).map(filter), el("div", { class: "chips" }, chips));
  }
  function runs() {
    const cell = (text, kind) => el("td", { class: kind || "" }, text);
    const row = (run) => el("tr", {}, cell(el("code", {}, run.hash)), cell(title(DATA.panels[run.panel])), cell(run.series, "name"), cell(run.budget, "num"),
      cell(run.of === null ? String(run.samples) : `${run.samples} of ${run.of}`, "num"), cell(run.code), cell(el("code", {}, run.sources)), cell(run.date), cell((run.notes || []).join(" ")));
    const head = ["run", "task", "method", "budget", "samples", "code", "sources", "written", ""].map((text) => el("th", { scope: "col", class: text === "budget" || text === "samples" ? "num" : "" }, text));
    const body = el("tbody"), open = () => { if (!body.children.length) body.append(...DATA.runs.slice(0, MOST_ROWS).map(row)); };
    const rest = fold(DATA.runs.length, () => body.append(...DATA.runs.slice(MOST_ROWS).map(row)));
    return el("details", { ontoggle: open }, el("summary", {}, count(DATA.runs.length, "run")), rest, scrolled(el("table", {}, el("thead", {}, el("tr", {}, head)), body)));
  }
  function facts() {
    const each = (key, many) => {
      const own = [...new Set(DATA.runs.map((run) => run[key]).filter(Boolean))].sort();
      return own.length > 3 ? `${own.length} ${many}, listed under Runs` : own.join(", ");
    };
    const dates = DATA.runs.map((run) => run.date).sort();
    const period = dates.length ? (dates[0] === dates[dates.length - 1] ? dates[0] : `${dates[0]} to ${dates[dates.length - 1]}`) : "–";
    const rows = [
      ["Runs", [count(DATA.runs.length, "run"), count(Object.keys(DATA.methods).filter((name) => name !== "full").length, "method"), count(DATA.runs.reduce((sum, run) => sum + run.samples, 0), "answer")].join(", ") + (DATA.unfinished ? `; not finished: ${DATA.unfinished}` : "") + (DATA.empty ? `; without a sample yet: ${DATA.empty}` : "")],
      ["Models", DATA.models.join("; ") || "–"],
      ["Code", [each("code", "revisions"), each("sources", "hashes of sources")].filter(Boolean).join("; sources ") || "–"],
      ["Hardware", DATA.machines.join("; ") || "–"],
      ["Measured", `${period}; page made ${DATA.made}`],
    ];
    return el("dl", { class: "facts" }, rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
  }
  function notes() {
    const every = [...new Set(DATA.panels.flatMap((panel) => panel.notes))];
    const both = (text) => ["full cache", "method"].map((one) => text.replace(`of the ${one}: `, "of the full cache and the method: "));
    const said = every.filter((text) => !both(text).some((other) => other !== text && every.includes(other)));
    const bad = [...DATA.damaged.map(([name, why]) => `${name}: ${why}`), ...DATA.refused];
    return [said.length ? el("p", { class: "note" }, said.join(" ")) : null,
      bad.length ? el("div", { class: "note bad", id: "damaged" }, "Left out, the rest is shown:", el("ul", {}, bad.map((text) => el("li", {}, text)))) : null];
  }

  const section = (id, name, about, wide) => el("section", { id }, el("h2", {}, name), el("p", {}, about), el("div", { class: `panels ${wide || ""}` }));
  const build = () => document.getElementById("page").replaceChildren(
    el("header", {}, el("h1", { tabindex: -1 }, "What KV-cache methods cost, and what they lose"), el("p", { class: "muted" }, "Every number is computed from kvbench's records; runs of different protocols never share a panel."), facts(), ...notes().filter(Boolean)),
    ...(live.seconds ? [live.node] : []), bar(), el("p", { class: "empty", id: "nothing" }, DATA.panels.length ? "No run passes the filters." : "No run is finished yet."),
    el("section", { id: "method", hidden: "" }),
    ...SECTIONS().map(([id, name, about, , wide]) => section(id, name, about, wide)),
    section("lost", "Why points were lost", "What kvbench diagnose found: how far attention outputs are from a full cache's, and where rows of the answer were lost.", "wide"),
    section("studies", "Studies", "What a full cache holds, and which claims of the papers hold on this model. Each exhibit has the reading that was taken.", "wide"),
    el("section", { id: "samples" }, el("h2", {}, "Samples"), el("p", {}, "The full cache's answer next to the method's, with differing words marked, and the rows of the prompt that the method still held."), el("div", { class: "body" })),
    el("section", { id: "compare" }, el("h2", {}, "Two runs"), el("p", {}, "The settings in which two runs of a panel differ, their difference on the same samples, and the samples lost and gained."), el("div", { class: "body" })),
    el("section", { id: "runs" }, el("h2", {}, "Runs"), runs()),
  );
  // ---- the dashboard: the served page asks for the progress of sweeps and updates itself

  const live = { seconds: Number(document.body.dataset.live), page: document.body.dataset.page, said: "", node: el("section", { id: "progress", hidden: "" }) };
  const COLOURS = { done: "#1f5f99", running: "#6fa3cc", stopped: "#e0a030", failed: "#b3261e", refused: "#80868b", missing: "#e3e6ea" };
  window.kvbenchProgress = (said) => {
    if (said.page !== live.page) {
      const { page } = live;
      live.page = said.page;
      ask("data.js").then((there) => { if (!there) live.page = page; }); // so that the next answer asks again
    }
    const { at, ...news } = said, text = JSON.stringify(news);
    live.node.hidden = false;
    if (live.said !== text) live.node.replaceChildren(...progress(news));
    live.said = text;
    live.node.querySelector(".at").textContent = `as of ${at}`;
  };
  window.kvbenchData = anew;
  function ask(name) {
    const script = el("script", { src: `${name}?${performance.now()}` });
    const answer = new Promise((done) => { script.onload = () => done(true); script.onerror = () => done(false); });
    document.body.append(script);
    return answer.finally(() => script.remove());
  }
  async function follow() {
    if (!document.hidden && !(await ask("progress.js"))) {
      live.node.hidden = false;
      live.said = "";
      live.node.replaceChildren(el("h2", {}, "Sweeps"), el("p", { class: "note bad" }, "The dashboard no longer answers. The page below shows its last state."));
    }
    setTimeout(follow, 1000 * live.seconds);
  }
  const minutes = (seconds) => (seconds === null ? "?" : seconds < 90 ? `${Math.ceil(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);
  function progress({ sweeps, problem, making }) {
    const open = new Set([...live.node.querySelectorAll("details[open]")].map((node) => node.dataset.sweep));
    return [el("h2", {}, "Sweeps"), el("p", {}, el("span", { class: "at" }), making ? "; the page is being rebuilt" : ""),
      problem ? el("p", { class: "note bad" }, problem) : null, sweeps.length ? null : el("p", { class: "empty" }, "No sweep was started here."),
      ...sweeps.map((sweep) => oneSweep(sweep, open))].filter(Boolean);
  }
  function oneSweep({ name, wrong, counts, cells }, open) {
    if (wrong) return el("div", { class: "sweep" }, el("h3", {}, name), el("p", { class: "note bad" }, wrong));
    const some = Object.entries(counts).filter(([, count]) => count);
    const waits = cells.reduce((sum, { left }) => sum + (left || 0), 0), unknown = cells.filter(({ left }) => left === null).length;
    const more = [some.map(([state, count]) => `${count} ${state}`).join(", "), waits ? `about ${minutes(waits)} left on one worker` : "", unknown ? `${unknown} without a time estimate` : ""];
    const table = (own) => scrolled(el("table", {}, el("tbody", {}, own.map(({ cell, name: state, records, total, reason, left }) => el("tr", {}, el("td", { class: "name" }, cell),
      el("td", { class: "state" }, el("i", { class: "dot", style: `background: ${COLOURS[state]}` }), state), el("td", { class: "num" }, total === null && !records ? "" : `${records} of ${total === null ? "?" : total}`),
      el("td", { class: "num" }, left ? `${minutes(left)} left` : ""), el("td", { class: "why" }, reason))))));
    const now = cells.filter(({ name: state, reason }) => state === "running" || state === "failed" || state === "stopped" || reason);
    return el("div", { class: "sweep" }, el("h3", {}, name),
      el("div", { class: "share", role: "img", "aria-label": more[0] }, some.map(([state, count]) => el("i", { style: `flex: ${count}; background: ${COLOURS[state]}` }))),
      el("small", {}, more.filter(Boolean).join("; ")), now.length ? table(now) : null,
      el("details", { "data-sweep": name, open: open.has(name) ? "" : null }, el("summary", {}, `${cells.length} cells`), table(cells)));
  }
  function anew(data) { // keeps the reader's place on the screen
    const key = (node) => [node.closest("section").id, node.querySelector("header")?.innerText].join();
    const places = () => [...document.querySelectorAll("#page > section, .panel, .sample")].filter((node) => node.getClientRects().length);
    const place = places().findLast((node) => node.getBoundingClientRect().top <= 150);
    const before = place && [key(place), place.getBoundingClientRect().top], top = scrollY;
    const focus = document.activeElement?.dataset, open = document.querySelector("#runs details")?.open, { limit } = browser;
    for (const node of document.querySelectorAll(".chart[data-drawn]")) heights.set(node.getAttribute("aria-label"), node.offsetHeight);
    show(data).then(() => {
      browser.limit = limit;
      samples();
      if (open) document.querySelector("#runs details").open = true;
      const again = focus && Object.entries(focus).map(([name, value]) => document.querySelector(`[data-${name}="${CSS.escape(value)}"]`)).find(Boolean);
      if (again) again.focus({ preventScroll: true });
      const after = before && places().find((node) => key(node) === before[0]);
      scrollTo(0, after ? scrollY + after.getBoundingClientRect().top - before[1] : top);
    });
  }

  function show(data) {
    DATA = data;
    if (data.panels) { build(); recall(); return Promise.resolve(); }
    return load(data.part, data.part).then(() => show(structuredClone(loaded.get(data.part))), (error) => {
      document.getElementById("page").replaceChildren(el("p", { class: "note bad" }, error.message));
    });
  }
  dark.addEventListener("change", () => { if (DATA.panels) { build(); recall(); } });
  window.addEventListener("popstate", () => {
    const before = state.method;
    if (!DATA.panels) return;
    recall();
    if (state.method === before) return;
    scrollTo(0, 0);
    document.querySelector(state.method ? "#method h2" : "h1").focus({ preventScroll: true });
  });
  show(FIRST).then(() => { if (live.seconds) follow(); });
})();
