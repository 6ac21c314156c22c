// A line of an error has words that only the reader's program has: names of parameters
// and hosts, times, addresses. Sphinx finds a page only if it has all words. If no page
// has them, this finds the pages that have most of the rare ones. In a search of four
// words or more, the pages of failures come first.
{
  const withAll = Search.performTermsSearch;
  const scored = (page, score) => [...page.slice(0, 4), score, ...page.slice(5)];
  const failuresFirst = (page) =>
    scored(page, page[4] + (page[0].startsWith("failures/") ? 20 : 0));

  Search.performTermsSearch = (words, excluded) => {
    const found = withAll(words, excluded);
    if (words.size < 4) return found;
    if (found.length) return found.map(failuresFirst);
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
      .map((page) => failuresFirst(scored(page, weights.get(page[0]))));
  };
}
