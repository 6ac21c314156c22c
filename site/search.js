// A line of an error has words that only the reader's program has: names of parameters
// and hosts, times, addresses. Failures has the texts of all failures, and the rules by
// which ddp_course/cli/diagnosis/matching.py compares a line with them; this does the
// same. The pages that fit come first. If none does, and no page has all words, this
// finds the pages that have most of the rare ones.
class Matcher {
  constructor({ rules, word, signal, noise, general, limits, pages }) {
    this.rules = rules.map(([from, to]) => [new RegExp(from, "g"), to]);
    this.word = new RegExp(word, "g");
    this.noise = new Set(noise);
    this.general = new Set(general);
    this.limits = limits;
    this.pages = pages.map(({ page }) => page);
    this.owned = pages.map(({ owned }) => owned);
    this.texts = pages.map(({ texts }) => texts.map((text) => this.parts(text)));
    const named = new RegExp(signal);
    this.signals = this.texts.map((texts) =>
      texts.map((text) => [...text].filter((part) => named.test(part))),
    );
    const known = new Map();
    for (const texts of this.texts)
      for (const part of new Set(texts.flatMap((text) => [...text])))
        known.set(part, (known.get(part) || 0) + 1);
    this.weights = new Map();
    for (const [part, many] of known)
      this.weights.set(part, this.rareness(part, (pages.length + 1) / many));
    this.saidOfAny = new Set(
      general.flatMap((number) => this.texts[number].flatMap((text) => [...text])),
    );
  }

  rareness(part, rare) {
    return Math.log(rare) * (part.includes(" ") ? this.limits.pair : 1);
  }

  parts(line) {
    for (const [from, to] of this.rules) line = line.replace(from, to);
    const words = (line.toLowerCase().match(this.word) || [])
      .map((word) => word.replace(/^_+|_+$/g, ""))
      .filter((word) => word.length > 1 && !this.noise.has(word));
    const pairs = words.slice(1).map((word, place) => `${words[place]} ${word}`);
    return new Set([...words, ...pairs]);
  }

  weight(parts) {
    let sum = 0;
    for (const part of parts)
      sum += this.weights.get(part) ?? (part.includes(" ") ? 0 : this.limits.strange);
    return sum;
  }

  score(parts, own, number) {
    const { enough, most, share, second } = this.limits;
    let best = 0;
    this.texts[number].forEach((text, place) => {
      const signals = this.signals[number][place];
      if (signals.length && !signals.some((name) => parts.has(name))) return;
      const common = this.weight([...parts].filter((part) => text.has(part)));
      const whole = this.weight(text);
      const needed = Math.min(enough, most * whole);
      const part = common ? common / Math.min(own, whole) : 0;
      if (common < needed || part < share) return;
      const score = (common * (part + (2 * common) / (own + whole))) / 2;
      best = Math.max(best, place < this.owned[number] ? score : second * score);
    });
    return Math.round(best * 1e6) / 1e6;
  }

  // The pages that a line fits, best first: [page, score].
  matches(line) {
    const parts = this.parts(line), own = this.weight(parts);
    const found = this.pages
      .map((_, number) => [number, this.score(parts, own, number)])
      .filter(([, score]) => score > 0)
      .sort(([, one], [, other]) => other - one);
    return this.generalLast(found, parts).map(([number, score]) => [
      this.pages[number], score,
    ]);
  }

  // Where a general page is first, the first page that also fits without the words of
  // the general ones comes before it.
  generalLast(found, parts) {
    if (!found.length || !this.general.has(found[0][0])) return found;
    const rest = new Set([...parts].filter((part) => !this.saidOfAny.has(part)));
    const own = this.weight(rest);
    const first = found.find(
      ([number]) => !this.general.has(number) && this.score(rest, own, number) > 0,
    );
    return first ? [first, ...found.filter((each) => each !== first)] : found;
  }
}

if (typeof Search !== "undefined") {
  const matcher = new Matcher(Failures);
  const withAll = Search.performTermsSearch;
  const search = Search._performSearch;
  const scored = (page, score) => [...page.slice(0, 4), score, ...page.slice(5)];

  Search.performTermsSearch = (words, excluded) => {
    const found = withAll(words, excluded);
    if (words.size < 4 || found.length) return found;
    const weights = new Map(), pages = new Map();
    let known = 0;
    words.forEach((word) => {
      const having = withAll(new Set([word]), excluded);
      if (having.length) known += 1;
      having.forEach((page) => {
        const rare = Math.log((Search._index.docnames.length + 1) / having.length);
        pages.set(page[0], page);
        weights.set(page[0], (weights.get(page[0]) || 0) + rare);
      });
    });
    if (known < words.size / 2) return [];
    const most = Math.max(...weights.values());
    return [...pages.values()]
      .filter((page) => weights.get(page[0]) > 0.7 * most)
      .map((page) => scored(page, weights.get(page[0])));
  };

  // Sphinx shows its results from the last to the first.
  Search._performSearch = (query, ...others) => {
    const { docnames, filenames, titles } = Search._index;
    const fitting = matcher.matches(query).slice(0, 10).map(([page, score]) => {
      const number = docnames.indexOf(`failures/${page}`);
      const kind = SearchResultKind.title;
      return [docnames[number], titles[number], "", null, score, filenames[number], kind];
    });
    const names = new Set(fitting.map(([name]) => name));
    const rest = search(query, ...others).filter(([name]) => !names.has(name));
    return [...rest, ...fitting.reverse()];
  };
}
