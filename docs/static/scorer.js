/* Sphinx gives every page that has a word of the query in any heading the same score. Pages with more of the words in their
 * headings, and in their own title, come first here; generated pages come after those that explain. */
const _questionWords = () => {
  const stemmer = new Stemmer();
  const query = new URLSearchParams(window.location.search).get("q") || "";
  const words = splitQuery(query.toLowerCase()).filter((word) => !stopwords.has(word) && !/^\d+$/.test(word));
  return [...new Set(words.map((word) => stemmer.stemWord(word)))];
};

var Scorer = {
  heading: 3,
  pageTitle: 4,
  generated: -8,
  score: ([name, title, anchor, descr, score, filename, kind]) => {
    const index = Search._index;
    const file = index.docnames.indexOf(name);
    const stemmer = new Stemmer();
    const titleWords = splitQuery(index.titles[file].toLowerCase()).map((word) => stemmer.stemWord(word));
    for (const word of _questionWords()) {
      if ([].concat(index.titleterms[word] ?? []).includes(file)) score += Scorer.heading;
      if (titleWords.includes(word)) score += Scorer.pageTitle;
    }
    return score + (/^(reference|messages|decisions|families)\//.test(name) ? Scorer.generated : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
