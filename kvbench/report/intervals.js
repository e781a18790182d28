"use strict";
// The 95 % interval of a mean over subtasks, as kvbench.analysis.intervals defines it, for differences in points.
// The page compares any two runs, which are too many pairs to compute in advance. A test holds both to equal numbers.
const kvbenchIntervals = (() => {
  const FEW = 6, BOUND = 100, TAIL = 0.975, TOLERANCE = 1e-9, STEPS = 40, CLOSE = 1e-4, HALVINGS = 200;
  const NODES = [...Array(48).keys()].map((node) => 0.1 * node);
  const PLACES = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];
  const LANCZOS = [0.99999999999980993, 676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059, 12.507343278686905, -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7];
  const sum = (values) => values.reduce((total, own) => total + own, 0);
  const most = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity);

  function exactSum(values) { // rounds once, like Python's math.fsum
    const partials = [];
    for (let x of values) {
      let count = 0;
      for (let y of partials) {
        if (Math.abs(x) < Math.abs(y)) [x, y] = [y, x];
        const high = x + y, low = y - (high - x);
        if (low) partials[count++] = low;
        x = high;
      }
      partials.length = count;
      partials.push(x);
    }
    return sum(partials.reverse());
  }
  function weightedMean(shares, values) {
    return values.length > 1 && values.every((own) => own === values[0]) ? values[0] : exactSum(values.map((own, at) => shares[at] * own));
  }

  // ---- quantiles

  function logGamma(x) {
    const t = x + 6.5;
    return Math.log(Math.sqrt(2 * Math.PI)) + (x - 0.5) * Math.log(t) - t + Math.log(LANCZOS.reduce((total, own, at) => total + (at ? own / (x - 1 + at) : own), 0));
  }
  function incompleteBeta(x, a, b) { // regularised; Lentz's continued fraction
    if (x <= 0 || x >= 1) return x <= 0 ? 0 : 1;
    if (x > (a + 1) / (a + b + 2)) return 1 - incompleteBeta(1 - x, b, a);
    const front = Math.exp(a * Math.log(x) + b * Math.log1p(-x) + logGamma(a + b) - logGamma(a) - logGamma(b)) / a;
    let c = 1, d = 1 / (1 - ((a + b) * x) / (a + 1)), total = d;
    for (let m = 1; m < 10000; m++) {
      const before = total;
      for (const own of [(m * (b - m) * x) / ((a + 2 * m - 1) * (a + 2 * m)), (-(a + m) * (a + b + m) * x) / ((a + 2 * m) * (a + 2 * m + 1))]) {
        d = 1 / (1 + own * d);
        c = 1 + own / c;
        total *= c * d;
      }
      if (Math.abs(total - before) <= 1e-16 * Math.abs(total)) break;
    }
    return front * total;
  }
  function inverseBeta(a, b, chance) {
    let low = 0, high = 1;
    for (let step = 0; step < HALVINGS; step++) {
      const middle = (low + high) / 2;
      if (incompleteBeta(middle, a, b) < chance) low = middle; else high = middle;
    }
    return (low + high) / 2;
  }
  function studentT(freedom) {
    const share = inverseBeta(0.5, freedom / 2, 2 * TAIL - 1);
    return Math.sqrt((freedom * share) / (1 - share));
  }
  const clopperPearson = (count, trials) => (count >= trials ? 1 : inverseBeta(count + 1, trials - count, TAIL));

  // ---- one subtask

  function measure({ values, groups }) {
    const members = new Map();
    values.forEach((own, at) => (members.has(groups[at]) ? members.get(groups[at]).push(own) : members.set(groups[at], [own])));
    const count = members.size, mean = exactSum(values) / values.length, scale = Math.sqrt(count / Math.max(count - 1, 1));
    const pull = new Map(), share = new Map(), means = new Map();
    for (const [name, own] of members) {
      const total = exactSum(own);
      pull.set(name, (scale * (total - own.length * mean)) / values.length);
      share.set(name, own.length / values.length);
      means.set(name, total / own.length);
    }
    const ordered = [...means.values()].sort((one, other) => one - other);
    const common = (ordered[Math.floor(count / 2)] + ordered[Math.floor((count - 1) / 2)]) / 2;
    const others = [...means].filter(([, own]) => Math.abs(own - common) > TOLERANCE).map(([name]) => name);
    return { mean, pull, share, means, common, others, partial: values.some((own) => own !== 0 && Math.abs(own) !== BOUND) };
  }

  // ---- exact bounds of right-or-wrong scores

  function exactUpper(parts, shares, leverage, sign) {
    const commons = parts.map(({ common }) => sign * common), groups = leverage.size, weight = groups * most([...leverage.values()]);
    const above = new Set(parts.flatMap(({ means, common }) => [...means].filter(([, own]) => sign * (own - common) > TOLERANCE).map(([name]) => name)));
    const gained = [...above].filter((name) => parts.some(({ means }) => sign * (means.get(name) || 0) > TOLERANCE));
    const moved = (count) => Math.min(weight * clopperPearson(count, groups), 1);
    const high = weightedMean(shares, commons) + moved(above.size) * most(commons.map((own) => Math.max(own, 0) - own));
    return high + moved(gained.length) * most(commons.map((own) => BOUND - Math.max(own, 0)));
  }

  // ---- Gaffke's bound of partial scores

  function chanceAboveZero(factors) { // P(Σ factor · E > 0), and its logarithmic slopes
    const peak = most(factors);
    const tried = PLACES.map((place) => place / peak).map((real) => ({ real, size: -sum(factors.map((own) => Math.log1p(-real * own))) }));
    const { real: c, size } = tried.reduce((one, other) => (other.size - Math.log(other.real) < one.size - Math.log(one.real) ? other : one));
    const bent = factors.map((own) => own / (1 - own * c));
    const width = 1 / Math.sqrt(sum(bent.map((own) => own * own)) + 1 / (c * c));
    const total = sum(NODES.map((node, at) => {
      const y = width * Math.sinh(node);
      let [real, imaginary] = [c, y];
      for (const own of bent) [real, imaginary] = [real + y * own * imaginary, imaginary - y * own * real];
      const height = (real / (real * real + imaginary * imaginary)) * Math.cosh(node);
      return Number.isFinite(height) ? height / (at ? 1 : 2) : 0;
    }));
    return { chance: (width * 0.1 * total * Math.exp(size)) / Math.PI, slopes: factors.map((own) => c / (1 - own * c)) };
  }
  function gaffkeReach(parts, shares, pulls, sign) {
    const names = [...pulls.keys()], sizes = new Map(), room = new Map();
    parts.forEach(({ share, mean }, at) => share.forEach((own, name) => {
      sizes.set(name, (sizes.get(name) || 0) + shares[at] * own);
      room.set(name, (room.get(name) || 0) + shares[at] * own * (BOUND - sign * mean));
    }));
    const [own, size, free] = [names.map((name) => sign * pulls.get(name)), names.map((name) => sizes.get(name)), names.map((name) => room.get(name))];
    const end = most(free.map((value, at) => value / size[at]));
    if (end <= 0) return 0;
    let reach = Math.max(end * clopperPearson(0, names.length), Math.min(2 * Math.sqrt(sum(own.map((value) => value * value))), end / 2)), last = NaN, moved = NaN;
    for (let step = 0; step < STEPS; step++) { // secant method on the logarithm of the chance
      const left = free.map((value, at) => value - reach * size[at]), unseen = left.indexOf(most(left)), all = [...size, size[unseen]];
      const { chance, slopes } = chanceAboveZero([...own, free[unseen]].map((value, at) => value - reach * all[at]));
      const level = Math.log(chance / (1 - TAIL)), slope = step ? (level - last) / moved : -sum(slopes.map((value, at) => value * all[at]));
      let go = slope < 0 ? -level / slope : Infinity;
      if (!(reach + go < end)) go = (end - reach) / 2;
      [reach, last, moved] = [reach + go, level, go];
      if (Math.abs(go) < CLOSE) break;
    }
    return reach;
  }

  // ---- the mean of subtasks that weigh the same

  function mean(subtasks) { // [{ values, groups }] -> { value, low, high }, the ends null if a subtask has only one group
    const parts = subtasks.map(measure), shares = parts.map(() => 1 / parts.length), leverage = new Map(), pulls = new Map();
    const value = weightedMean(shares, parts.map((part) => part.mean));
    const counts = parts.map(({ pull }) => pull.size);
    if (Math.min(...counts) < 2) return { value, low: null, high: null };
    parts.forEach(({ pull }, at) => pull.forEach((own, name) => {
      leverage.set(name, (leverage.get(name) || 0) + shares[at] / pull.size);
      pulls.set(name, (pulls.get(name) || 0) + shares[at] * own);
    }));
    const error = Math.sqrt(exactSum([...pulls.values()].map((own) => own * own)));
    const partial = parts.some((part) => part.partial);
    const alike = parts.every(({ others, means }) => 2 * others.length < means.size) && new Set(parts.flatMap(({ others }) => others)).size < FEW;
    let low, high;
    if (alike && !partial) [low, high] = [-exactUpper(parts, shares, leverage, -1), exactUpper(parts, shares, leverage, 1)];
    else {
      const variances = parts.map(({ pull }, at) => shares[at] ** 2 * exactSum([...pull.values()].map((own) => own * own)));
      const shared = sum(counts) > leverage.size; // between subtasks
      const freedom = shared ? Math.min(...counts) - 1 : error ? sum(variances) ** 2 / sum(variances.map((own, at) => own ** 2 / (counts[at] - 1))) : 1;
      const reach = studentT(freedom) * error;
      [low, high] = [value - reach, value + reach];
    }
    if (partial) [low, high] = [Math.min(low, value - gaffkeReach(parts, shares, pulls, -1)), Math.max(high, value + gaffkeReach(parts, shares, pulls, 1))];
    return { value, low: Math.max(Math.min(low, value), -BOUND), high: Math.min(Math.max(high, value), BOUND) };
  }
  const average = (lists) => weightedMean(lists.map(() => 1 / lists.length), lists.map((own) => exactSum(own) / own.length));
  return { mean, average };
})();
